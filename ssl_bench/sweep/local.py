"""The local launcher: one process a trial, several at once, pinned to the devices at hand."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ssl_bench.errors import ConfigError, StoreError
from ssl_bench.results.trial import progress
from ssl_bench.sweep import stages
from ssl_bench.sweep.job import Job
from ssl_bench.sweep.worker import EXIT_BROKEN, EXIT_INTERRUPTED, EXIT_LOCKED, EXIT_OK
from ssl_bench.sweep.worker import main as worker_main

KILLED_TRIES = 2  # a trial whose process dies is started this often before it counts as failed
LOCKED_WAIT_SECONDS = 2.0
STOP_SECONDS = 60.0  # time to save a checkpoint before a stopped process is killed


class StoppedError(Exception):
    """A signal ended the runner; every trial can go on."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def make_slots(devices: int, jobs: int | None) -> list[str | None]:
    """One entry a concurrent trial: the GPUs it sees, or None on a CPU.

    Args:
        devices: Processes of one trial, one a GPU or core.
        jobs: Trials at once; by default as many as fit. More than there are GPUs share them.

    Raises:
        ConfigError: If a trial needs more GPUs than there are.
    """
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        groups = [names[i : i + devices] for i in range(0, len(names) - devices + 1, devices)]
        if not groups:
            raise ConfigError(f"`devices` must not exceed the GPUs at hand, got {devices} and {len(names)}.")
        return [",".join(groups[i % len(groups)]) for i in range(jobs or len(groups))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [None] * (jobs or max(1, cores // devices))


class LocalLauncher:
    """Runs jobs in processes of a fork server that has the imports done.

    Args:
        slots: Of `make_slots`.
        console: Where progress goes: a line a finished trial and, on a terminal, a bar.
    """

    def __init__(self, slots: Sequence[str | None], console: Console) -> None:
        self._free = list(slots)
        self._console = console
        self._running: dict[int, tuple[Job, ForkServerProcess, str | None]] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ssl_bench.sweep.worker"])
        self._stopped_by = 0
        self._stopped_at = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, the costly ones first.

        Raises:
            StoppedError: After SIGINT or SIGTERM, once every process has saved and left.
        """
        todo = sorted(jobs, key=lambda job: -job.cost)
        self._total, self._finished, self._began = len(todo), 0, time.monotonic()
        self._cost, self._finished_cost = sum(job.cost for job in todo), 0.0
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._progress:
                self._bar = self._progress.add_task("", total=self._total)
                while todo or self._running:
                    self._start_ready(todo)
                    self._describe()
                    for sentinel in wait(list(self._running), timeout=0.5):
                        assert isinstance(sentinel, int)
                        job = self._reap(sentinel)
                        if job is not None:
                            todo.append(job)
                    if self._stopped_by and not self._running:
                        raise StoppedError(self._stopped_by)
                    if self._stopped_by and time.monotonic() - self._stopped_at > STOP_SECONDS:
                        self._kill()
        finally:
            self._kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopped_by:  # asked twice: no more waiting
            self._kill()
        self._stopped_by, self._stopped_at = number, time.monotonic()
        for _, process, _ in self._running.values():
            process.terminate()  # SIGTERM: the trial saves a checkpoint and leaves

    def _kill(self) -> None:
        for _, process, _ in self._running.values():
            process.kill()

    def _start_ready(self, todo: list[Job]) -> None:
        waiting_for = {job.config.id for job in todo} | {job.config.id for job, _, _ in self._running.values()}
        ready = [job for job in todo if job.not_before <= time.monotonic() and job.config.init_from not in waiting_for]
        for job in ready[: 0 if self._stopped_by else len(self._free)]:
            todo.remove(job)
            slot = self._free.pop(0)
            job.tries += 1
            job.started = time.monotonic()
            process = self._context.Process(
                target=worker_main, args=(job.config.to_json(), str(job.folder), slot), name=job.config.label
            )
            process.start()
            self._running[process.sentinel] = (job, process, slot)

    def _reap(self, sentinel: int) -> Job | None:
        """Take note of a process that ended; returns its job if it is to be started again."""
        job, process, slot = self._running.pop(sentinel)
        process.join()
        self._free.append(slot)
        code = process.exitcode
        if code == EXIT_LOCKED:  # another runner has it: look again later
            job.tries -= 1
            job.not_before = time.monotonic() + LOCKED_WAIT_SECONDS
            if job.needs_work():
                return job
        elif code not in (EXIT_OK, EXIT_BROKEN):
            if self._stopped_by:
                if job.status.get("status") == "running":
                    self._write_status(job, "pending", "stopped; goes on from its last checkpoint")
                return None
            how = "was stopped" if code == EXIT_INTERRUPTED else f"ended with {_exit(code)}"
            if job.tries < KILLED_TRIES:
                self._console.print(
                    f"  the process of {job.config.label} {how}; it is started again", markup=False, soft_wrap=True
                )
                return job
            self._write_status(job, "failed", f"the process {how}, {job.tries} times; see {job.folder / 'trial.log'}")
        self._report(job)
        return None

    def _write_status(self, job: Job, status: str, reason: str) -> None:
        try:
            job.write_status(status, reason)
        except StoreError as error:  # the other trials may still be able to write
            self._console.print(f"  {error}", markup=False, soft_wrap=True)

    def _report(self, job: Job) -> None:
        self._finished += 1
        self._finished_cost += job.cost
        now = time.monotonic()
        left = (now - self._began) / self._finished_cost * (self._cost - self._finished_cost)
        self._console.print(
            f"  [{self._finished}/{self._total}] {job.status.get('status', '?'):<9} {job.config.label}  "
            f"{now - job.started:.0f} s"
            + (f"  (about {_duration(left)} left)" if self._finished < self._total else ""),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        self._progress.update(self._bar, completed=self._finished)

    def _describe(self) -> None:
        labels = ", ".join(_describe(job) for job, _, _ in self._running.values())
        self._progress.update(self._bar, description=f"  running {labels}" if labels else "")


def _describe(job: Job) -> str:
    steps = progress(job.folder)
    share = f" {100 * steps[0] // steps[1]} %" if steps and not stages.is_pretrained(job.folder) else ""
    return f"{job.config.method['name']} {job.config.seed}{share}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _exit(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
