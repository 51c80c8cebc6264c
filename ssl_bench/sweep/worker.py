"""One process, one trial: takes the trial's lock, does what is pending, leaves a status behind.

Also the program of trials with several devices: `torchrun -m ssl_bench.sweep.worker FOLDER`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ssl_bench.config import TrialConfig
from ssl_bench.errors import CollapsedError, DivergedError, InterruptedRunError, SSLBenchError
from ssl_bench.results.store import read_json, write_json, write_text
from ssl_bench.sweep import stages

EXIT_OK, EXIT_BROKEN, EXIT_LOCKED, EXIT_INTERRUPTED = 0, 3, 75, 76


def run_trial(config: TrialConfig, folder: Path) -> int:
    """Do what is pending of a trial; returns one of the EXIT codes."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    lock = FileLock(folder / ".lock", timeout=0)
    if rank == 0:
        try:
            lock.acquire()
        except Timeout:
            return EXIT_LOCKED
    try:
        return _run_locked(config, folder, rank)
    finally:
        if rank == 0:
            lock.release()


def _run_locked(config: TrialConfig, folder: Path, rank: int) -> int:
    if rank == 0:
        write_json(folder / "trial.json", config.to_json())

    def status(name: str, stage: str, reason: str = "", step: int | None = None) -> None:
        write_json(folder / "status.json", {"status": name, "stage": stage, "reason": reason, "step": step})

    stage = "pretrain"
    try:
        if not stages.is_pretrained(folder):
            if rank == 0:
                status("running", stage)
            stages.pretrain_stage(config, folder)
        elif rank == 0:
            # a restart after the collapse check's file was written, and before its status was
            facts = read_json(folder / "pretrain.json")
            stages.check_collapse(facts["embedding_spread"], facts["steps"])
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # rank 0 judges alone: no collective may wait for the others
        if rank != 0:
            return EXIT_OK
        context = None
        failures = []
        for protocol in stages.pending_protocols(config, folder):
            stage = protocol.key
            status("running", stage)
            context = context or stages.evaluation_context(config, folder)
            try:
                stages.evaluate_stage(config, protocol, context, folder)
            except (SSLBenchError, RuntimeError, ValueError, OSError, MemoryError) as error:
                failures.append(f"{protocol.key}: {_one_line(error)}")
                traceback.print_exc()
        if failures:
            status("failed", stage, "; ".join(failures))
            return EXIT_BROKEN
        status("done", "")
        return EXIT_OK
    except InterruptedRunError as error:
        print(error, flush=True)
        return EXIT_INTERRUPTED
    except DivergedError as error:
        status("diverged", stage, str(error), error.step)
        return EXIT_BROKEN
    except CollapsedError as error:
        status("collapsed", stage, str(error), error.step)
        return EXIT_BROKEN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        text = traceback.format_exc()
        print(text, flush=True)
        with contextlib.suppress(Exception):  # the disk may be what failed
            write_text(folder / "traceback.txt", text)
            status("failed", stage, _one_line(error))
        return EXIT_BROKEN


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, SSLBenchError) else f"{type(error).__name__}: {text}"


def main(data: dict[str, Any], folder: str, threads: int, cuda_device: str | None) -> None:
    """Entry of a process of the local launcher."""
    if cuda_device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = cuda_device
    _die_with_parent()
    _log_to(Path(folder))
    _prepare(threads)
    code = run_trial(TrialConfig.from_json(data), Path(folder))
    sys.stdout.flush()
    os._exit(code)  # skip interpreter teardown: nothing is left to save


def _prepare(threads: int) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def _die_with_parent() -> None:
    # a runner that was killed must not leave trials behind that nobody waits for
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


def _log_to(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = open(folder / "trial.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log


if __name__ == "__main__":
    trial_folder = Path(sys.argv[1])
    _prepare(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.exit(run_trial(TrialConfig.from_json(read_json(trial_folder / "trial.json")), trial_folder))
