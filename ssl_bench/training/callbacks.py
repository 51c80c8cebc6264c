"""What happens around the steps: checkpoints, the curve file, the NaN guard, the clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ssl_bench.distributed import is_distributed, is_rank_zero
from ssl_bench.errors import DivergedError, InterruptedRunError, StoreError
from ssl_bench.results.store import write_csv

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
AGREE_EVERY = 10  # steps between the ranks' agreement on time and signals


def latest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest readable checkpoint of a trial, and notes about unreadable ones.

    Files are read as tensors and plain types only.
    """
    notes = []
    for name in (LAST, PREVIOUS):
        path = folder / "checkpoints" / name
        if not path.exists():
            continue
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds for a torn file; each means "not readable"
            notes.append(f"{name} was unreadable and is not used: {type(error).__name__}")
            continue
        return path, notes
    return None, notes


class DivergenceGuard(Callback):
    """Stops at a NaN or infinite loss before it reaches the weights (on CUDA: within a logging interval)."""

    def __init__(self) -> None:
        self._first_bad: Tensor | None = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Look at the loss of this step."""
        step = trainer.global_step
        if loss.device.type == "cpu":
            if not torch.isfinite(loss):
                self._stop(float(loss.detach()), step)
            return
        bad = torch.where(torch.isfinite(loss.detach()), torch.inf, float(step))
        self._first_bad = bad if self._first_bad is None else torch.minimum(self._first_bad, bad)
        if step % trainer.log_every_n_steps == 0 and torch.isfinite(self._first_bad):
            self._stop(float("nan"), int(self._first_bad))

    def _stop(self, value: float, step: int) -> None:
        raise DivergedError(
            f"The loss must stay finite, got {value} at step {step}. Lower recipe.base_lr, lengthen "
            "recipe.warmup_epochs, or train in 32-true precision.",
            step=step,
        )


class Throughput(Callback):
    """Seconds of training over all resumed parts, and images a second after the first steps."""

    warmup_steps = 3

    def __init__(self) -> None:
        self._before = 0.0
        self._start: float | None = None
        self._steady: tuple[float, int] | None = None
        self._last_step = 0

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._before + (time.perf_counter() - self._start if self._start is not None else 0.0)

    def images_per_second(self, global_batch_size: int) -> float:
        """Rate of this process's part after its first steps; 0 if there were none."""
        if self._steady is None:
            return 0.0
        began, step = self._steady
        return (self._last_step - step) * global_batch_size / max(1e-9, self._ended - began)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()
        self._first_step = trainer.global_step
        self._ended = self._start

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Note when the steady part begins."""
        if self._steady is None and trainer.global_step - self._first_step >= self.warmup_steps:
            self._steady = (time.perf_counter(), trainer.global_step)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Stop the clock once the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ended = time.perf_counter()
        self._last_step = trainer.global_step
        self._before, self._start = self.seconds, None

    def state_dict(self) -> dict[str, Any]:
        """Seconds so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._before = float(state_dict["seconds"])


class CurveWriter(Callback):
    """curve.csv: step, epoch, lr, the loss and its terms every few steps, and whatever probes report.

    The rows travel in the checkpoint, so a resume repeats and loses none.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "curve.csv"
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Keep this step's values when it is a logging step."""
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and (not self.rows or self.rows[-1]["step"] != step):
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            values = {name: mean_over_ranks(value) for name, value in pl_module.latest.items()}
            self.rows.append({"step": step, "epoch": epoch_of(trainer), "lr": lr, **values})

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Write the file."""
        self.write()

    def add(self, trainer: lightning.Trainer, values: dict[str, float]) -> None:
        """Add figures measured between steps, such as a probe's."""
        self.rows.append({"step": trainer.global_step, "epoch": epoch_of(trainer), **values})

    def write(self) -> None:
        """Write curve.csv whole; columns in order of appearance."""
        if is_rank_zero() and self.rows:
            columns = list(dict.fromkeys(key for row in self.rows for key in row))
            write_csv(self.path, columns, self.rows)

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the checkpoint's rows."""
        self.rows = list(state_dict["rows"])


class Checkpointer(Callback):
    """Writes last.ckpt whole or not at all, from time to time, on a signal, and keeps the one before.

    Args:
        folder: The trial's folder.
        curve: Written together with each checkpoint.
        every_seconds: Time between checkpoints.
        every_steps: Steps between checkpoints instead, if given.
    """

    def __init__(
        self, folder: Path, curve: CurveWriter, *, every_seconds: float = 60.0, every_steps: int | None = None
    ) -> None:
        self.folder = folder / "checkpoints"
        self.curve = curve
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._saved_at = time.monotonic()
        self._stop_signal = 0
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Listen to the signals of schedulers (only possible in the main thread)."""
        self._saved_at = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Leave the signals to whoever had them."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any) -> None:
        """Save when it is time; stop after saving when a signal asked for it."""
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate():
            return
        due = step % self.every_steps == 0 if self.every_steps else self._time_is_up()
        if is_distributed():
            if step % AGREE_EVERY and not (self.every_steps and due):
                return
            flags = torch.tensor([int(due), self._stop_signal], device=pl_module.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            due, self._stop_signal = bool(flags[0]), int(flags[1])
        if due or self._stop_signal:
            self.save(trainer)
        if self._stop_signal:
            raise InterruptedRunError(
                f"The run was asked to stop (signal {self._stop_signal}) and saved step {step}. "
                "Run the same command again to go on.",
                step=step,
                signal_number=self._stop_signal,
            )

    def _time_is_up(self) -> bool:
        return time.monotonic() - self._saved_at >= self.every_seconds

    def save(self, trainer: lightning.Trainer) -> None:
        """Write a checkpoint on all ranks together; rank 0 puts it in place.

        Raises:
            StoreError: If the file system refuses; the checkpoint before stays.
        """
        temporary, last = self.folder / ".last.tmp", self.folder / LAST
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(temporary)
            if is_rank_zero():
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                if last.exists():
                    os.replace(last, self.folder / PREVIOUS)
                os.replace(temporary, last)
        except (OSError, RuntimeError) as error:
            raise StoreError(
                f"A checkpoint must be writable, got {error} in {self.folder}. Free space or change permissions and "
                "run the same command again: the checkpoint before is untouched."
            ) from error
        self.curve.write()
        self._saved_at = time.monotonic()


def epoch_of(trainer: lightning.Trainer) -> float:
    """Epochs trained so far, fractional."""
    steps = max(1, int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
    return trainer.global_step / steps


def mean_over_ranks(value: Tensor) -> float:
    """A logged scalar, averaged over ranks."""
    value = value.detach().float()
    if is_distributed():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return float(value)
