"""The command line: errors are one line and status 2; listing needs no torch."""

import json
import subprocess
import sys

import pytest

from ssl_bench import cli
from ssl_bench.config import CATALOG


def test_errors_of_the_user_are_one_line_and_status_two(capsys, tmp_path):
    assert cli.main(["run", str(tmp_path / "nothing.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ssl-bench: ")
    assert "nothing.yaml" in error
    assert error.count("\n") == 1


def test_leaderboard_of_an_unknown_study_says_how_to_run_it(capsys, tmp_path):
    assert cli.main(["leaderboard", "nothing", "--results", str(tmp_path)]) == 2
    assert "ssl-bench run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", cli.KINDS)
def test_list_shows_every_plug_in_with_a_summary(kind, capsys):
    assert cli.main(["list", kind, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries
    assert all(entry["summary"] and entry["version"] >= 1 for entry in entries)


@pytest.mark.parametrize("arguments", [["list", "methods"], ["--help"], ["leaderboard", "nothing"]])
def test_light_commands_never_import_torch(arguments):
    code = (
        "import sys\nfrom ssl_bench.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_new_method_refuses_bad_and_taken_names(capsys):
    assert cli.main(["new-method", "MyMethod"]) == 2
    assert "lower-case" in capsys.readouterr().err
    assert cli.main(["new-method", "simclr"]) == 2
    assert "must not exist yet" in capsys.readouterr().err


def test_check_needs_a_method(capsys):
    assert cli.main(["check"]) == 2
    assert "--all" in capsys.readouterr().err


def stored_trial(study, seed, *, method="byol", version=None, dataset="fashion_mnist_mini", status="done"):
    """A trial folder with the present versions, unless one is given; returns its id."""
    folder = study / "trials" / f"trial{seed}"
    folder.mkdir(parents=True)
    current = CATALOG["method"].entry(method).version if method in CATALOG["method"].names() else 1
    config = {
        "dataset": {"name": dataset, "version": 1, "arguments": {}},
        "method": {"name": method, "version": version or current, "arguments": {}},
        "backbone": {"name": "conv4", "version": CATALOG["backbone"].entry("conv4").version, "arguments": {}},
        "protocols": [{"name": "knn", "version": CATALOG["protocol"].entry("knn").version, "arguments": {}}],
        "budget": {"epochs": 1},
        "seed": seed,
    }
    (folder / "trial.json").write_text(json.dumps(config))
    (folder / "status.json").write_text(json.dumps({"status": status, "reason": "", "stage": "", "step": None}))
    return folder.name


def test_status_tells_stale_and_interrupted_trials(tmp_path, capsys):
    study = tmp_path / "s"
    trials = [
        stored_trial(study, 0),
        stored_trial(study, 1, version=99),
        stored_trial(study, 2, method="no_such_method"),
        stored_trial(study, 3, status="running"),
    ]
    stored_trial(study, 4)
    (study / "study.json").write_text(json.dumps({"name": "s", "trials": trials}))
    assert cli.main(["status", "s", "--results", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["done", "stale", "stale", "interrupted"]
    assert "method byol was version 99 and is 1" in lines[1]
    assert "method no_such_method is gone" in lines[2]
    assert lines[4] == "1 done, 2 stale, 1 interrupted"
    assert "1 more of other forms" in lines[5]


def test_prune_removes_only_what_no_table_shows_and_only_when_told(tmp_path, capsys):
    study = tmp_path / "s"
    kept, unused = stored_trial(study, 0), stored_trial(study, 1)
    (study / "study.json").write_text(json.dumps({"name": "s", "trials": [kept]}))
    assert cli.main(["prune", "s", "--results", str(tmp_path)]) == 0
    assert unused in capsys.readouterr().out
    assert (study / "trials" / unused).exists()
    assert cli.main(["prune", "s", "--results", str(tmp_path), "--yes"]) == 0
    assert not (study / "trials" / unused).exists()
    assert (study / "trials" / kept).exists()
