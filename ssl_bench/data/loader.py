"""Training batches whose order depends on (seed, epoch) alone, at any world size and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ssl_bench.distributed import rank, world_size
from ssl_bench.errors import ConfigError, DataError
from ssl_bench.random import epoch_permutation
from ssl_bench.records import Batch

if TYPE_CHECKING:
    from ssl_bench.data.dataset import Dataset


class GlobalBatchLoader:
    """Deals each global batch out to ranks and accumulation steps in contiguous shares.

    Optimizer step s of an epoch takes the images order[s G : (s + 1) G]; micro-step a of rank r takes its
    share of them. The last, incomplete global batch of an epoch is dropped.

    Args:
        store: Images and labels.
        position: Called when an epoch begins; returns (epoch, batches of it already trained).
        global_batch_size: Images of one optimizer step over all ranks, G.
        seed: Seed of the run.
        with_labels: Whether batches carry labels.
        accumulate_grad_batches: Micro-steps of one optimizer step.
        num_workers: Processes that decode large images; small ones need none.
        crop: Cuts one large image into its views, (image, index, epoch, seed) -> one crop a view.
    """

    def __init__(
        self,
        store: Any,
        position: Callable[[], tuple[int, int]],
        *,
        global_batch_size: int,
        seed: int,
        with_labels: bool,
        accumulate_grad_batches: int,
        num_workers: int,
        crop: Callable[[Tensor, int, int, int], tuple[Tensor, ...]],
    ) -> None:
        shares = world_size() * accumulate_grad_batches
        if global_batch_size % shares:
            raise ConfigError(
                f"`global_batch_size` must be a multiple of world size x accumulation, got {global_batch_size} for "
                f"{world_size()} x {accumulate_grad_batches}. Change recipe.global_batch_size or the devices."
            )
        if len(store) < global_batch_size:
            raise DataError(
                f"An epoch must hold at least one global batch, got {len(store)} images for global_batch_size "
                f"{global_batch_size}. Lower recipe.global_batch_size or use more data."
            )
        self.store = store
        self.position = position
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // shares
        self.seed = seed
        self.with_labels = with_labels
        self.accumulate_grad_batches = accumulate_grad_batches
        self.num_workers = num_workers
        self.crop = crop

    def __len__(self) -> int:
        return len(self.store) // self.global_batch_size * self.accumulate_grad_batches

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the trainer's; its presence tells Lightning that a resume in mid-epoch is exact."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def indices(self, epoch: int) -> list[Tensor]:
        """The images of each batch of this rank in one epoch."""
        order = epoch_permutation(self.seed, epoch, len(self.store))
        shares = order[: len(self) * self.batch_size * world_size()].view(-1, world_size(), self.batch_size)
        return list(shares[:, rank()])

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.position()
        batches = self.indices(epoch)[start:]
        if not self.store.is_large:
            for index in batches:
                yield self._batch(self.store.take(index), index, epoch)
            return
        keys = [[(int(i), epoch) for i in index] for index in batches]
        loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
            _Crops(self.store, self.crop, self.seed),  # type: ignore[arg-type]
            batch_sampler=keys,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        for index, views in zip(batches, loader, strict=True):
            yield self._batch(tuple(views), index, epoch)

    def _batch(self, images: Tensor | tuple[Tensor, ...], index: Tensor, epoch: int) -> Batch:
        labels = torch.from_numpy(self.store.labels[index.numpy()]) if self.with_labels else None
        return Batch(images=images, index=index, epoch=epoch, seed=self.seed, labels=labels)


class _Crops:
    def __init__(self, store: Any, crop: Callable[[Tensor, int, int, int], tuple[Tensor, ...]], seed: int) -> None:
        self.store, self.crop, self.seed = store, crop, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, ...]:
        index, epoch = key
        return self.crop(self.store.decode(index), index, epoch, self.seed)


class PretrainDataModule(lightning.LightningDataModule):
    """Batches with views for pretraining. Give the Trainer `use_distributed_sampler=False`.

    Args:
        dataset: Images; its `pretrain_split` is used.
        view_pipeline: Makes the views of a batch on the device.
        global_batch_size: Images of one optimizer step over all ranks.
        seed: Seed of order and augmentation.
        with_labels: Whether batches carry labels (supervised references only).
        num_workers: Processes that decode large images.
        accumulate_grad_batches: Micro-steps of one optimizer step; the Trainer's value.
    """

    def __init__(
        self,
        dataset: Dataset,
        view_pipeline: Any,
        *,
        global_batch_size: int,
        seed: int,
        with_labels: bool = False,
        num_workers: int = 0,
        accumulate_grad_batches: int = 1,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.view_pipeline = view_pipeline
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.with_labels = with_labels
        self.num_workers = num_workers
        self.accumulate_grad_batches = accumulate_grad_batches

    def _position(self) -> tuple[int, int]:
        trainer = self.trainer
        assert trainer is not None
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def train_dataloader(self) -> GlobalBatchLoader:
        """This rank's batches."""
        return GlobalBatchLoader(
            self.dataset.split(self.dataset.pretrain_split),
            self._position,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            with_labels=self.with_labels,
            accumulate_grad_batches=self.accumulate_grad_batches,
            num_workers=self.num_workers,
            crop=self.view_pipeline.crop_in_worker,
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Make the views on the device."""
        viewed: Batch = self.view_pipeline(batch)
        return viewed
