"""The Slurm launcher: an array of trials through submitit, one task a device.

The runner only submits and waits: Slurm runs the tasks, which need nothing from it. A runner that died
is replaced by running the same command again; it finds what is queued and does not submit it twice.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ssl_bench.config import SlurmSettings, TrialConfig
from ssl_bench.errors import ConfigError
from ssl_bench.results.store import read_json, write_json
from ssl_bench.results.trial import is_locked
from ssl_bench.sweep.job import Job
from ssl_bench.sweep.local import KILLED_TRIES

QUEUED = "slurm.json"  # in the study's folder: trial -> Slurm job, so that another runner knows
ABSENT_POLLS = 2  # a job counts as ended after this many answers without it: squeue may be late


class SlurmTask:
    """What each Slurm task calls; submitit stores it, and calls `checkpoint` when time is up outside training."""

    def __call__(self, data: dict[str, Any], folder: str) -> int:
        """Run the trial (task 0) or take part in its pretraining (other tasks of a trial with several devices)."""
        from ssl_bench.sweep.worker import slurm_main

        return slurm_main(TrialConfig.from_json(data), Path(folder))

    def checkpoint(self, data: dict[str, Any], folder: str) -> Any:
        """Every stage's files are whole, so the same call goes on where this one ended."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, data, folder)


class SlurmLauncher:
    """Runs jobs through Slurm and waits for them.

    Args:
        folder: The study's folder.
        name: Name of the jobs in the queue.
        devices: Tasks of one trial.
        settings: Partition, time, resources.
        console: Where progress goes, a line a finished trial.
    """

    def __init__(self, folder: Path, name: str, devices: int, settings: SlurmSettings, console: Console) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ConfigError("The Slurm launcher needs submitit. Install ssl_bench[slurm].") from error
        self._folder = folder
        self._console = console
        self._poll_seconds = settings.poll_seconds
        self._queued: dict[str, str] = {}
        if (folder / QUEUED).exists():
            self._queued = dict(read_json(folder / QUEUED))
        try:
            self._executor = submitit.SlurmExecutor(folder / "slurm")
        except RuntimeError as error:
            raise ConfigError(
                f"The Slurm launcher needs Slurm's commands on this machine, got: {error}. Run this on a login node, "
                "or use --launcher local."
            ) from error
        self._executor.update_parameters(
            job_name=name,
            partition=settings.partition,
            time=settings.time_minutes,
            nodes=settings.nodes,
            ntasks_per_node=devices // settings.nodes,
            gpus_per_node=devices // settings.nodes if settings.gpus else None,
            cpus_per_task=settings.cpus_per_task,
            mem=settings.memory,
            constraint=settings.constraint,
            account=settings.account,
            qos=settings.qos,
            array_parallelism=settings.array_parallelism,
            signal_delay_s=settings.signal_seconds,
            srun_args=["--kill-on-bad-exit=1"],  # ranks without their peer would wait for it
            additional_parameters={"requeue": True},
        )

    def run(self, jobs: Sequence[Job]) -> None:
        """Submit what is not queued yet, and wait until every job has ended.

        Raises:
            ConfigError: If Slurm refuses the submission.
        """
        active = self._active()
        todo = [job for job in jobs if self._queued.get(job.config.id) not in active]
        running = {job.config.id: job for job in jobs if self._queued.get(job.config.id) in active}
        absent = dict.fromkeys(running, 0)
        total, finished = len(jobs), 0
        if running:
            self._console.print(f"  {len(running)} trials are queued already")
        while todo or running:
            waiting = {job.config.id for job in todo} | set(running)
            ready = [job for job in todo if job.config.init_from not in waiting]
            if ready:
                self._submit(ready)
                running |= {job.config.id: job for job in ready}
                absent |= {job.config.id: 0 for job in ready}
                todo = [job for job in todo if job not in ready]
            time.sleep(self._poll_seconds)
            active = self._active()
            for trial, job in list(running.items()):
                absent[trial] = 0 if self._queued[trial] in active else absent[trial] + 1
                if absent[trial] < ABSENT_POLLS or is_locked(job.folder):  # locked: another runner's process has it
                    continue
                del running[trial]
                if self._is_over(job):
                    finished += 1
                    self._console.print(
                        f"  [{finished}/{total}] {job.status.get('status', '?'):<9} {job.config.label}",
                        markup=False, highlight=False, soft_wrap=True,
                    )  # fmt: skip
                else:
                    todo.append(job)

    def _submit(self, jobs: Sequence[Job]) -> None:
        ordered = sorted(jobs, key=lambda job: -job.cost)
        try:
            data = [job.config.to_json() for job in ordered]
            submitted = self._executor.map_array(SlurmTask(), data, [str(job.folder.resolve()) for job in ordered])
        except Exception as error:  # submitit wraps sbatch's message in classes of its own
            raise ConfigError(
                f"Slurm must accept the jobs, got: {' '.join(str(error).split())}. Correct the study's `slurm` "
                "settings."
            ) from error
        for job, slurm_job in zip(ordered, submitted, strict=True):
            job.tries += 1
            self._queued[job.config.id] = slurm_job.job_id
        write_json(self._folder / QUEUED, self._queued)
        self._console.print(
            f"  submitted {len(ordered)} trials to Slurm as {submitted[0].job_id.split('_')[0]}", highlight=False
        )

    def _active(self) -> set[str]:
        """Ids of this user's jobs that are queued or running."""
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={getpass.getuser()}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):  # a controller that restarts: nothing is known, so nothing ended
            return set(self._queued.values())
        return set(answer.split())

    def _is_over(self, job: Job) -> bool:
        """Whether a job whose Slurm job has ended is over; otherwise it is to be submitted again."""
        if not job.needs_work():
            return True
        failure = job.rank_failure()
        if failure and failure["status"] != "pending":
            job.write_status(failure["status"], failure["reason"])
            return True
        if job.tries < KILLED_TRIES:
            self._console.print(
                f"  the Slurm job of {job.config.label} ended early; it is submitted again",
                markup=False,
                soft_wrap=True,
            )
            return False
        job.write_status("failed", f"its Slurm job ended early, {job.tries} times; see {job.folder / 'trial.log'}")
        return True


def requeue() -> None:
    """Ask Slurm to run the present job again."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
