"""Every trainable method's present version stands in a committed study, with what made it."""

from pathlib import Path

import pandas as pd
import pytest

from ssl_bench.config.catalog import CATALOG
from ssl_bench.methods import METHODS

COMMITTED = Path(__file__).parent.parent / "results" / "committed"
TRAINABLE = [name for name in METHODS.names() if METHODS.get(name).trainable]


@pytest.fixture(scope="module")
def rows():
    files = sorted(COMMITTED.glob("*/rows.csv"))
    assert files, "results/committed must hold the tables of at least one study"
    return pd.concat([pd.read_csv(file, keep_default_na=False) for file in files])


@pytest.mark.parametrize("name", TRAINABLE)
def test_method_has_a_measured_row_of_its_present_version(name, rows):
    version = CATALOG["method"].entry(name).version
    own = rows[(rows["method"] == name) & (rows["method_version"].astype(str) == str(version))]
    measured = own[(own["status"] == "done") & own["metric"].str.startswith("top1") & (own["value"].astype(str) != "")]
    assert len(measured), f"run {name} version {version} in a study and commit its tables to results/committed"
    assert set(measured["commit"]) != {""}
    assert (measured["n_test"].astype(int) > 0).all()


def test_every_committed_study_names_its_command_and_seeds():
    for folder in COMMITTED.iterdir():
        board = (folder / "leaderboard.md").read_text()
        for word in ("Produced by: ssl-bench run", "Seeds:", "Commit:"):
            assert word in board, f"{folder.name}/leaderboard.md must say {word!r}"
