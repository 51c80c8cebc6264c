"""One process, one trial: takes the trial's lock, does what is pending, leaves a status behind.

Also the program of each rank of a trial with several devices: `torchrun -m ssl_bench.sweep.worker
FOLDER` pretrains; the process that holds the lock starts it, waits for it, and judges alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ssl_bench.config import TrialConfig
from ssl_bench.errors import CollapsedError, DivergedError, InterruptedRunError, SSLBenchError
from ssl_bench.results.store import read_json, write_json, write_text
from ssl_bench.results.trial import LOCK, is_locked
from ssl_bench.sweep import stages

EXIT_OK, EXIT_BROKEN, EXIT_LOCKED, EXIT_INTERRUPTED, EXIT_CRASHED = 0, 3, 75, 76, 77
EXIT_TIME_IS_UP = 78  # interrupted by a signal that says so, unlike SIGTERM
RANKS = "ranks.json"  # under Slurm: what the first task tells the others of its trial
RANKS_WAIT_SECONDS = 600.0


class _RankFailedError(Exception):
    """A rank ended with this outcome."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        super().__init__(outcome["reason"])
        self.outcome = outcome


class _RanksCrashedError(Exception):
    """A rank died without a word."""


def run_trial(config: TrialConfig, folder: Path) -> int:
    """Do what is pending of a trial; returns one of the EXIT codes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK, timeout=0):
            return _run_locked(config, folder)
    except Timeout:
        return EXIT_LOCKED


def _run_locked(config: TrialConfig, folder: Path) -> int:
    stage, time_is_up = "pretrain", False
    try:
        write_json(folder / "trial.json", config.to_json())
        pretrained = stages.is_pretrained(folder)
        tasks = config.devices > 1 and int(os.environ.get("SLURM_NTASKS", "1")) > 1
        if tasks:
            (folder / stages.FAILURE).unlink(missing_ok=True)
            write_json(folder / RANKS, {"job": _slurm_run(), "pretrain": not pretrained})
        if not pretrained:
            _write_status(folder, {"status": "running"}, stage)
            if config.devices > 1 and not tasks:
                _pretrain_on_ranks(config, folder)
            else:
                stages.pretrain_stage(config, folder)
        # again for a restart after pretrain.json was written and before the status was
        stages.check_pretrained(folder)
        pending = stages.pending_protocols(config, folder)
        context = stages.evaluation_context(config, folder) if pending else None
        failures = []
        for protocol in pending:
            assert context is not None
            stage = protocol.key
            _write_status(folder, {"status": "running"}, stage)
            try:
                stages.evaluate_stage(protocol, context, folder)
            except Exception as error:  # the other protocols still have their say; the status is "failed"
                failures.append(f"{protocol.key}: {_one_line(error)}")
                _keep_traceback(folder)
        if failures:
            _write_status(folder, {"status": "failed", "reason": "; ".join(failures)}, stage)
            return EXIT_BROKEN
        _write_status(folder, {"status": "done"}, "")
        return EXIT_OK
    except _RanksCrashedError as error:
        print(error, flush=True)
        return EXIT_CRASHED
    except _RankFailedError as error:
        outcome = error.outcome
    except Exception as error:
        outcome = _outcome(error)
        if not isinstance(error, SSLBenchError):
            _keep_traceback(folder)
        time_is_up = isinstance(error, InterruptedRunError) and error.signal_number != signal.SIGTERM
    print(outcome["reason"], flush=True)
    with contextlib.suppress(SSLBenchError):  # the disk may be what failed; the log has it
        _write_status(folder, outcome, stage)
    if outcome["status"] != "pending":
        return EXIT_BROKEN
    return EXIT_TIME_IS_UP if time_is_up else EXIT_INTERRUPTED


def _write_status(folder: Path, outcome: dict[str, Any], stage: str) -> None:
    write_json(folder / "status.json", {"reason": "", "step": None, **outcome, "stage": stage})


def _outcome(error: Exception) -> dict[str, Any]:
    """Status, reason and step that an error stands for."""
    kinds = {DivergedError: "diverged", CollapsedError: "collapsed", InterruptedRunError: "pending"}
    return {
        "status": kinds.get(type(error), "failed"),  # type: ignore[arg-type]
        "reason": _one_line(error),
        "step": getattr(error, "step", None),
    }


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, SSLBenchError) else f"{type(error).__name__}: {text}"


def _keep_traceback(folder: Path) -> None:
    text = traceback.format_exc()
    print(text, flush=True)
    with contextlib.suppress(SSLBenchError):
        write_text(folder / "traceback.txt", text)


def _pretrain_on_ranks(config: TrialConfig, folder: Path) -> None:
    """Pretrain through torchrun; this process keeps the lock and passes SIGTERM on."""
    (folder / stages.FAILURE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={config.devices}", "-m", "ssl_bench.sweep.worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # a session of its own: the terminal's Ctrl-C must not reach the ranks, which would be stopped twice
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if (folder / stages.FAILURE).exists():
        outcome = read_json(folder / stages.FAILURE)
        (folder / stages.FAILURE).unlink()
        raise _RankFailedError(outcome)
    if stopped:
        raise InterruptedRunError(
            "The run was asked to stop before its first step.", step=0, signal_number=signal.SIGTERM
        )
    if code:
        raise _RanksCrashedError(f"The ranks ended with exit code {code}; their output is above.")


def _run_rank(folder: Path) -> int:
    """One rank of `_pretrain_on_ranks`."""
    _leave_when(lambda: not is_locked(folder), "the process that started the ranks is gone")
    _prepare()
    return _pretrain_as_rank(TrialConfig.from_json(read_json(folder / "trial.json")), folder)


def _pretrain_as_rank(config: TrialConfig, folder: Path) -> int:
    try:
        stages.pretrain_stage(config, folder)
    except Exception as error:
        traceback.print_exc()
        # that a peer is gone is no reason of its own: the peer's says more, or it was killed and is tried again
        gone = isinstance(error, torch.distributed.DistBackendError) or "gloo" in str(error)
        if not gone and not (folder / stages.FAILURE).exists():
            write_json(folder / stages.FAILURE, _outcome(error))
        return EXIT_INTERRUPTED if isinstance(error, InterruptedRunError) else EXIT_BROKEN
    return EXIT_OK


def slurm_main(config: TrialConfig, folder: Path) -> int:
    """Entry of a Slurm task: the first does the trial, the others of a trial with several devices pretrain with it."""
    from ssl_bench.sweep.slurm import requeue

    _prepare()
    if int(os.environ.get("SLURM_PROCID", "0")):
        return _run_slurm_rank(config, folder)
    _log_to(folder)
    code = run_trial(config, folder)
    if code == EXIT_LOCKED and config.devices > 1:
        write_json(folder / RANKS, {"job": _slurm_run(), "pretrain": False})
    if code == EXIT_TIME_IS_UP:  # after SIGTERM Slurm requeues the job itself, or somebody has cancelled it
        requeue()
    return code


def _run_slurm_rank(config: TrialConfig, folder: Path) -> int:
    deadline = time.monotonic() + RANKS_WAIT_SECONDS
    while time.monotonic() < deadline:
        told = read_json(folder / RANKS) if (folder / RANKS).exists() else {}
        if told.get("job") == _slurm_run():
            code = _pretrain_as_rank(config, folder) if told["pretrain"] else EXIT_OK
            if code == EXIT_BROKEN:
                os._exit(code)  # Slurm ends the other tasks, which would wait for this one
            return code
        time.sleep(0.5)
    return EXIT_CRASHED


def _slurm_run() -> str:
    """Names this run of this Slurm job: a requeued job has the same id."""
    return f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def main(data: dict[str, Any], folder: str, cuda_devices: str | None) -> None:
    """Entry of a process of the local launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner gets Ctrl-C too, and asks with SIGTERM
    if cuda_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = cuda_devices
    runner = multiprocessing.parent_process()
    assert runner is not None
    # a runner that was killed must not leave trials behind that nobody waits for
    _leave_when(lambda: not runner.is_alive(), "the runner is gone")
    _log_to(Path(folder))
    _prepare()
    code = run_trial(TrialConfig.from_json(data), Path(folder))
    sys.stdout.flush()
    os._exit(code)  # skip interpreter teardown: nothing is left to save


def _prepare() -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _leave_when(condition: Callable[[], bool], reason: str) -> None:
    def watch() -> None:
        while not condition():
            time.sleep(1)
        print(f"Leaving: {reason}.", flush=True)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


def _log_to(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = open(folder / "trial.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


if __name__ == "__main__":
    sys.exit(_run_rank(Path(sys.argv[1])))
