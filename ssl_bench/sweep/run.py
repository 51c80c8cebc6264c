"""Run a study on this machine: one process a trial, several at once, any number of runners on one folder."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from ssl_bench.config import StudySpec, TrialConfig
from ssl_bench.errors import ConfigError
from ssl_bench.results.build import build_tables
from ssl_bench.results.store import read_json, write_json
from ssl_bench.sweep import stages
from ssl_bench.sweep.plan import plan
from ssl_bench.sweep.worker import EXIT_BROKEN, EXIT_INTERRUPTED, EXIT_LOCKED, EXIT_OK
from ssl_bench.sweep.worker import main as worker_main

KILLED_TRIES = 2  # a trial whose process dies is started this often before it counts as failed
LOCKED_WAIT_SECONDS = 2.0
BROKEN_STATUSES = ("failed", "diverged", "collapsed")


@dataclasses.dataclass
class _Job:
    config: TrialConfig
    folder: Path
    tries: int = 0
    started: float = 0.0


class _Stop(Exception):
    pass


def run_study(
    study: StudySpec,
    *,
    results: Path,
    command: str,
    jobs: int | None = None,
    retry_broken: bool = False,
    console: Console | None = None,
) -> int:
    """Run what is unfinished of a study, then build its tables.

    Args:
        study: The study.
        results: Folder of all studies; this one goes to `results / study.name`.
        command: What the user typed, for the tables' footer.
        jobs: Trials at once; by default one a core on a CPU, one a GPU otherwise.
        retry_broken: Run failed, diverged and collapsed trials again.
        console: Where progress goes.

    Returns:
        0 when every trial is done, 1 when one is broken, 130 when stopped by a signal.
    """
    console = console or Console()
    trials = plan(study)
    folder = results / study.name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "study.json", {"name": study.name, "command": command, "trials": [t.id for t in trials]})
    slots = _slots(study, jobs)
    todo: deque[_Job] = deque()
    for config in trials:
        job = _Job(config, folder / "trials" / config.id)
        if _needs_work(job, retry_broken):
            job.folder.mkdir(parents=True, exist_ok=True)
            todo.append(job)
    console.print(
        f"Study {study.name}: {len(trials)} trials, {len(trials) - len(todo)} already finished, {len(slots)} at once.",
        highlight=False,
    )
    try:
        _Runner(slots, console, len(todo)).run(todo)
    except _Stop:
        console.print("Stopped; every trial goes on from its last checkpoint when the command is run again.")
        return 130
    written = build_tables(folder)
    console.print(
        (folder / "leaderboard.md").read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True
    )
    console.print(f"Report: {next(path for path in written if path.suffix == '.html')}", highlight=False)
    broken = [t for t in trials if _status(folder / "trials" / t.id).get("status") != "done"]
    for config in broken:
        state = _status(folder / "trials" / config.id)
        console.print(
            f"{state.get('status', 'missing')}: {config.label}: {state.get('reason', '')}", markup=False, soft_wrap=True
        )
    return 1 if broken else 0


def _needs_work(job: _Job, retry_broken: bool) -> bool:
    state = _status(job.folder)
    if state.get("status") in BROKEN_STATUSES:
        stored = _read(job.folder / "trial.json")
        new_protocols = stored.get("protocols") != job.config.to_json()["protocols"]
        return retry_broken or (state["status"] == "failed" and new_protocols)
    return (
        state.get("status") != "done"
        or not stages.is_pretrained(job.folder)
        or bool(stages.pending_protocols(job.config, job.folder))
        or not job.config.same_as(_read(job.folder / "trial.json"))
    )


def _status(folder: Path) -> dict[str, Any]:
    return _read(folder / "status.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path) if path.exists() else {}
    except Exception:  # torn by a full disk, say: as good as absent
        return {}
    return content if isinstance(content, dict) else {}


def _slots(study: StudySpec, jobs: int | None) -> list[str | None]:
    """One entry a concurrent trial: the GPUs it sees, or None on a CPU."""
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        if study.devices > len(names):
            raise ConfigError(f"`devices` must not exceed the GPUs at hand, got {study.devices} and {len(names)}.")
        groups = [",".join(names[i : i + study.devices]) for i in range(0, len(names), study.devices)]
        groups = [group for group in groups if group.count(",") == study.devices - 1]
        count = jobs or len(groups)
        return [groups[i % len(groups)] for i in range(count)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [None] * (jobs or max(1, cores // study.devices))


class _Runner:
    def __init__(self, slots: list[str | None], console: Console, total: int) -> None:
        self.free = list(slots)
        self.console = console
        self.total = total
        self.finished = 0
        self.running: dict[Any, tuple[_Job, Any, str | None]] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["ssl_bench.sweep.worker"])
        self.began = time.monotonic()
        self.stopping = False

    def run(self, todo: deque[_Job]) -> None:
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while todo or self.running:
                while todo and self.free and not self.stopping:
                    self._start(todo.popleft())
                for sentinel in wait([*self.running], timeout=0.5):
                    job = self._reap(sentinel)
                    if job is not None:
                        todo.append(job)
                if self.stopping and not self.running:
                    raise _Stop
        finally:
            for _, process, _ in self.running.values():
                process.terminate()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        for _, process, _ in self.running.values():
            process.terminate()  # SIGTERM: the trial saves a checkpoint and leaves

    def _start(self, job: _Job) -> None:
        slot = self.free.pop()
        job.tries += 1
        job.started = time.monotonic()
        if job.config.devices > 1 and not stages.is_pretrained(job.folder):
            process: Any = _TorchRun(job, slot)
        else:
            process = self.context.Process(
                target=worker_main, args=(job.config.to_json(), str(job.folder), 1, slot), name=job.config.label
            )
            process.start()
        self.running[process.sentinel] = (job, process, slot)

    def _reap(self, sentinel: Any) -> _Job | None:
        job, process, slot = self.running.pop(sentinel)
        process.join()
        self.free.append(slot)
        code = process.exitcode
        if code == EXIT_INTERRUPTED and self.stopping:
            return None
        if code == EXIT_LOCKED:  # another runner has it: look again later
            time.sleep(LOCKED_WAIT_SECONDS)
            job.tries -= 1
            if _needs_work(job, retry_broken=False):
                return job
            self._report(job)
            return None
        if code not in (EXIT_OK, EXIT_BROKEN):
            if job.tries < KILLED_TRIES and not self.stopping:
                self.console.print(f"  process of {job.config.label} ended with {_exit(code)}; starting it again")
                return job
            if not self.stopping:
                reason = f"the process ended with {_exit(code)}, {job.tries} times; see trial.log"
                state = {"status": "failed", "stage": "", "reason": reason, "step": None}
                write_json(job.folder / "status.json", state)
        self._report(job)
        return None

    def _report(self, job: _Job) -> None:
        self.finished += 1
        state = _status(job.folder)
        elapsed = time.monotonic() - self.began
        left = elapsed / self.finished * (self.total - self.finished)
        self.console.print(
            f"  [{self.finished}/{self.total}] {state.get('status', '?'):<9} {job.config.label}  "
            f"{time.monotonic() - job.started:.0f} s  (about {left / 60:.0f} min left)",
            markup=False,
            highlight=False,
        )


class _TorchRun:
    """A trial of several processes, started by torchrun, with the interface of a process."""

    def __init__(self, job: _Job, slot: str | None) -> None:
        write_json(job.folder / "trial.json", job.config.to_json())
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
        command += [f"--nproc-per-node={job.config.devices}", "-m", "ssl_bench.sweep.worker", str(job.folder)]
        with open(job.folder / "trial.log", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.sentinel = os.pidfd_open(self.process.pid)
        self.folder = job.folder

    @property
    def exitcode(self) -> int | None:
        """Exit code; torchrun's own 1 stands for a broken trial whose worker left a status."""
        code = self.process.returncode
        if code == 1 and _status(self.folder).get("status") in BROKEN_STATUSES:
            return EXIT_BROKEN
        return code

    def join(self) -> None:
        """Wait for the end."""
        self.process.wait()
        os.close(self.sentinel)

    def terminate(self) -> None:
        """Ask all its processes to save and leave."""
        self.process.terminate()


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
