"""Every study in experiments/ can be planned, and opens with its command."""

from pathlib import Path

import pytest

from ssl_bench.config import load_study
from ssl_bench.sweep.plan import plan

STUDIES = sorted((Path(__file__).parent.parent / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_is_planned(path):
    study = load_study(path)
    assert study.name == path.stem
    trials = plan(study)
    assert len({trial.id for trial in trials}) == len(trials)
    assert {trial.method["family"] for trial in trials} >= {"baseline"}, "baselines belong into every table"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_opens_with_its_command(path):
    assert path.read_text().startswith("# make bench")
