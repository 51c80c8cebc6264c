"""Spectra of embeddings and projections during training, of a fixed batch: a look that cannot touch the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from ssl_bench.data import Dataset
from ssl_bench.distributed import is_rank_zero
from ssl_bench.evaluation.diagnostics.stepwise import mode_figures
from ssl_bench.evaluation.features import evenly_spaced
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.nn.modes import evaluation_mode
from ssl_bench.results.store import write_csv
from ssl_bench.training.callbacks import epoch_of, mean_over_ranks
from ssl_bench.views import build_views

NUM_IMAGES = 1024
BATCH = 256


class Eigenmodes(Callback):
    """eigenmodes.csv: eigenvalues of the embeddings' and the projections' covariance every few optimizer steps.

    Both views of SimCLR of 1,024 training images, the same pixels at every look, in evaluation mode and float32;
    spectra in float64, of values that are neither normalized nor standardized. Projections are those of methods that
    hold a `projector`; its rows are missing for the others. `effective_time` is the sum of the rates of the steps
    it has seen, on which the steps of Simon et al. 2023 (arXiv 2303.15438) are predicted; they show clearly only from a
    small initialization and at a small rate. Weights, buffers and generators are the same with and without it.

    Args:
        dataset: Data; its labels are not read.
        folder: The trial's folder.
        every_steps: Optimizer steps between looks; the first is before training.
    """

    def __init__(self, dataset: Dataset, folder: Path, every_steps: int) -> None:
        self.dataset = dataset
        self.path = folder / "eigenmodes.csv"
        self.every_steps = every_steps
        self.rows: list[dict[str, Any]] = []
        self._time = 0.0
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look before the first step; nothing on a resume."""
        if not trainer.global_step:
            self._look(trainer, pl_module, None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Add the step's rate, and look when it is time."""
        if trainer.global_step == self._step:
            return  # part of an accumulated step
        self._step = trainer.global_step
        self._time += trainer.optimizers[0].param_groups[0]["lr"]
        if self._step % self.every_steps == 0:
            self._look(trainer, pl_module, mean_over_ranks(pl_module.latest["train/loss"]))

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        return {"rows": self.rows, "time": self._time, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the checkpoint's rows."""
        self.rows = list(state_dict["rows"])
        self._time, self._step = state_dict["time"], state_dict["step"]

    def _look(self, trainer: Any, module: Any, loss: float | None) -> None:
        """Rank 0 alone, since the networks are equal."""
        if not is_rank_zero():
            return
        common = {
            "step": trainer.global_step,
            "epoch": epoch_of(trainer),
            "effective_time": self._time,
            "loss": loss,
        }
        for layer, rows in self._embed(module).items():
            self.rows.append({**common, "layer": layer, "num_rows": len(rows), **mode_figures(rows)})
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        write_csv(self.path, columns, self.rows)

    @torch.no_grad()
    def _embed(self, module: Any) -> dict[str, Tensor]:
        """Embeddings and projections of both views, (2 N, D) each."""
        data = self.dataset
        store = data.split(data.pretrain_split)
        views = build_views("simclr", image_size=data.image_size, channels=data.channels, mean=data.mean, std=data.std)
        index = evenly_spaced(NUM_IMAGES, len(store))
        layers: dict[str, Callable[[Tensor], Tensor]] = {"embedding": nn.Identity()}
        if isinstance(getattr(module, "projector", None), nn.Module):
            layers["projection"] = module.projector
        found: dict[str, list[Tensor]] = {name: [] for name in layers}
        with evaluation_mode(module), torch.autocast(module.device.type, enabled=False):
            for batch in view_batches(store, views, index.split(BATCH), device=module.device):
                embeddings = [module.backbone(view) for view in batch.views]
                for name, layer in layers.items():
                    found[name] += [layer(embedding).float() for embedding in embeddings]
        return {name: torch.cat(parts) for name, parts in found.items()}
