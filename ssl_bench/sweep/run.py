"""Run a study: plan it, run what is unfinished, build its tables. Any number of runners on one folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ssl_bench.config import StudySpec
from ssl_bench.results.build import build_tables
from ssl_bench.results.store import write_json
from ssl_bench.sweep.job import Job
from ssl_bench.sweep.local import LocalLauncher, StoppedError, make_slots
from ssl_bench.sweep.plan import plan
from ssl_bench.sweep.slurm import SlurmLauncher


def run_study(
    study: StudySpec,
    *,
    results: Path,
    command: str,
    launcher: str = "local",
    jobs: int | None = None,
    retry_broken: bool = False,
    console: Console | None = None,
) -> int:
    """Run what is unfinished of a study, then build its tables.

    Args:
        study: The study.
        results: Folder of all studies; this one goes to `results / study.name`.
        command: What the user typed, for the tables' footer.
        launcher: "local" or "slurm".
        jobs: Trials at once on this machine; by default one a core on a CPU, one a GPU otherwise.
        retry_broken: Run failed, diverged and collapsed trials again.
        console: Where progress goes.

    Returns:
        0 when every trial is done or skipped, 1 when one failed, diverged or collapsed, 128 + the signal's
        number when stopped by one.

    Raises:
        ConfigError: If the study does not describe something that can run; nothing has been started then.
        StoreError: If the results folder can't be written.
    """
    console = console or Console()
    trials = plan(study)
    slots = make_slots(study.devices, jobs) if launcher == "local" else []
    folder = results / study.name
    write_json(folder / "study.json", {"name": study.name, "command": command, "trials": [t.id for t in trials]})
    all_jobs = [Job(config, folder / "trials" / config.id) for config in trials]
    for job in all_jobs:
        job.prepare(retry_broken=retry_broken)
    todo = [job for job in all_jobs if not job.config.skip and job.needs_work()]
    skipped = sum(bool(trial.skip) for trial in trials)
    console.print(
        f"Study {study.name}: {len(trials)} trials, {len(trials) - len(todo) - skipped} already finished, "
        + (f"{skipped} skipped, " if skipped else "")
        + (f"{len(slots)} at once." if slots else "through Slurm."),
        highlight=False,
        soft_wrap=True,
    )
    try:
        if launcher == "slurm":
            SlurmLauncher(folder, study.name, study.devices, study.slurm, console).run(todo)
        else:
            LocalLauncher(slots, console).run(todo)
    except StoppedError as error:
        console.print("Stopped; every trial goes on from its last checkpoint when the command is run again.")
        return 128 + error.number
    written = build_tables(folder)
    console.print(written[0].read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Report: {next(path for path in written if path.suffix == '.html')}", highlight=False, soft_wrap=True
    )
    broken = [job for job in all_jobs if job.status.get("status") not in ("done", "skipped")]
    for job in broken:
        state = job.status
        console.print(
            f"{state.get('status', 'missing')}: {job.config.label}: {state.get('reason', '')}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if broken:
        console.print("Once the cause is gone, --retry-broken runs these again.")
    return 1 if broken else 0
