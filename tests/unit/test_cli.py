"""The command line: errors are one line and status 2; listing needs no torch."""

import json
import subprocess
import sys

import pytest

from ssl_bench import cli


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
