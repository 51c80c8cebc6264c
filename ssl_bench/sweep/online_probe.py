"""k-NN accuracy during training, on the validation split: a look that cannot touch the run."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ssl_bench.data import Dataset
from ssl_bench.distributed import is_rank_zero
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocols.knn import knn_rankings
from ssl_bench.training import CurveWriter
from ssl_bench.views import build_views

K, TEMPERATURE = 20, 0.07


class OnlineKNN(Callback):
    """Writes probe/knn_top1 of the validation split into the curve every few epochs.

    Embeddings come from evaluation mode without gradient and without random numbers, so weights, buffers
    and generators are the same with and without it.

    Args:
        dataset: Labelled data.
        every_epochs: Epochs between looks.
        bank: Training images used as the bank.
    """

    def __init__(self, dataset: Dataset, every_epochs: int, bank: int = 5000) -> None:
        self.dataset = dataset
        self.every_epochs = every_epochs
        self.bank = bank

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Look when it is time; rank 0 alone, since the networks are equal."""
        if (trainer.current_epoch + 1) % self.every_epochs or not is_rank_zero():
            return
        bank, labels = self._embed(pl_module, "train", self.bank)
        queries, truth = self._embed(pl_module, "validation", None)
        ranking = knn_rankings(
            bank, labels, queries, ks=[K], temperature=TEMPERATURE, num_classes=self.dataset.num_classes
        )[K]
        accuracy = float((ranking[:, 0] == truth).double().mean())
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CurveWriter):
                callback.add(trainer, {"probe/knn_top1": accuracy})

    def _embed(self, module: Any, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
        data = self.dataset
        store = data.split(split)
        views = build_views("eval", image_size=data.image_size, channels=data.channels, mean=data.mean, std=data.std)
        index = torch.arange(min(len(store), limit or len(store)))
        batches = view_batches(store, views, list(index.split(512)), device=module.device)
        embedding = torch.cat([module.embed(batch.views[0]) for batch in batches])
        return embedding, torch.from_numpy(store.labels[index.numpy()]).to(embedding.device)
