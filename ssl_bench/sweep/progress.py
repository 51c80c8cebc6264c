"""How far a trial is, for the runner's bar and `ssl-bench status`."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from ssl_bench.distributed import is_rank_zero
from ssl_bench.results.trial import PROGRESS

EVERY_SECONDS = 2.0


class Progress(Callback):
    """Writes "step steps" to a small file every few seconds; nothing depends on it, so a full disk is no error.

    Args:
        folder: The trial's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        self._written = 0.0

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        """Write when it is time."""
        if time.monotonic() - self._written < EVERY_SECONDS or not is_rank_zero():
            return
        self._written = time.monotonic()
        temporary = self._path.with_name(f"{PROGRESS}.tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(f"{trainer.global_step} {trainer.estimated_stepping_batches}")
            os.replace(temporary, self._path)
