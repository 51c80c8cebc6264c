"""From a study folder to everything that is derived from it."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from ssl_bench.results import store
from ssl_bench.results.plots import draw_plots
from ssl_bench.results.report import report_html
from ssl_bench.results.rows import collect_rows, rows_text, study_facts
from ssl_bench.results.tables import (
    comparisons_csv,
    leaderboard_csv,
    leaderboard_md,
    leaderboard_tex,
    make_leaderboard,
)
from ssl_bench.results.trial import read_trials


def build_tables(study: Path | str, *, plots: bool = True) -> list[Path]:
    """Write rows.csv, leaderboard.csv, .md and .tex, comparisons.csv, plots/*.png and report.html.

    The files depend on the trial folders alone, byte for byte. Builders of one study wait for each
    other, so that the last one to write has read the newest trials.

    Trials that `study.json` does not name (of an earlier form of the study) are left out; their folders
    stay.

    Args:
        study: The study folder, `results/<study>`.
        plots: False leaves out the pictures and the report, which take most of the time.

    Returns:
        The written files, the main table first.

    Raises:
        StoreError: If the folder holds no trials or cannot be written.
    """
    study = Path(study)
    read_trials(study)  # refuses a wrong folder before anything is created in it
    with FileLock(str(study / ".tables.lock")):
        facts = study_facts(study)
        trials = [trial for trial in read_trials(study) if trial.id in facts.get("trials", [trial.id])]
        rows = collect_rows(study, trials)
        board = make_leaderboard(rows, facts)
        texts = {
            "leaderboard.md": leaderboard_md(board),
            "leaderboard.csv": leaderboard_csv(board),
            "leaderboard.tex": leaderboard_tex(board),
            "rows.csv": rows_text(rows),
            "comparisons.csv": comparisons_csv(board),
        }
        if plots:
            texts["report.html"] = report_html(board, trials, draw_plots(board, trials, image_format="svg"))
        written = []
        for name, text in texts.items():
            store.write_text(study / name, text)
            written.append(study / name)
        if plots:
            images = {f"{name}.png": image for name, image in draw_plots(board, trials).items()}
            for name, image in images.items():
                store.write_bytes(study / "plots" / name, image)
                written.append(study / "plots" / name)
            for old in (study / "plots").glob("*.png"):
                if old.name not in images:
                    old.unlink()  # of an earlier build with other datasets
        return written
