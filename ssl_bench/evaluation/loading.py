"""Batches of a split in a given order, with their views made: for feature extraction and fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssl_bench.records import Batch


class _Crops(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """Decoded and cropped images of a store of large images, for loader workers."""

    def __init__(self, store: Any, views: Any, epoch: int, seed: int) -> None:
        self.store, self.views, self.epoch, self.seed = store, views, epoch, seed

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        crops: tuple[Tensor, ...] = self.views.crop_in_worker(self.store.decode(index), index, self.epoch, self.seed)
        return crops


class JoinedStore:
    """Two stores one after the other (train, then validation), without copying their images.

    Args:
        first: An `ImageStore`.
        second: Another of the same kind.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second
        self.is_large = bool(getattr(first, "is_large", False))
        self.labels = np.concatenate([first.labels, second.labels])

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Tensor:
        """Images at the given places, (B, C, H, W) uint8."""
        early = indices < len(self.first)
        images: Tensor = torch.cat(
            [self.first.take(indices[early]), self.second.take(indices[~early] - len(self.first))]
        )
        return images[early.int().argsort(descending=True, stable=True).argsort()]

    def decode(self, index: int) -> Tensor:
        """One large image, (C, h, w) uint8."""
        num = len(self.first)
        image: Tensor = self.first.decode(index) if index < num else self.second.decode(index - num)
        return image


def _stack(crops: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(view) for view in zip(*crops, strict=True))


def view_batches(
    store: Any,
    views: Any,
    index_batches: Sequence[Tensor],
    *,
    epoch: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
) -> Iterator[Batch]:
    """One batch with views on `device` for each tensor of indices, in order.

    Args:
        store: An `ImageStore`; large images are decoded and cropped in `num_workers` processes.
        views: The view pipeline.
        index_batches: Sample indices of each batch, (B,) int64.
        epoch: Epoch number, part of the random keys of the views.
        seed: Seed of the random keys.
        device: Where the views are made.
        num_workers: Loader processes, used for large images only.
    """
    if getattr(store, "is_large", False):
        lists = [indices.tolist() for indices in index_batches]
        images: Any = torch.utils.data.DataLoader(
            _Crops(store, views, epoch, seed), batch_sampler=lists, collate_fn=_stack, num_workers=num_workers
        )
    else:
        images = (store.take(indices) for indices in index_batches)
    for indices, pixels in zip(index_batches, images, strict=True):
        yield views(Batch(images=pixels, index=indices, epoch=epoch, seed=seed).to(device))
