"""Other datasets than the backbone's own, brought to the format of the images that it was made for.

Shapes: B images of C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssl_bench.data import DATASETS, load_dataset
from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.views.operations import luma


@dataclasses.dataclass(frozen=True)
class DatasetChoice:
    """A dataset named in a protocol's arguments.

    Attributes:
        name: Registry name.
        arguments: Of its constructor.
        options: What else the protocol lets one say of it.
    """

    name: str
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Short name for metrics: of the folder where one holds the images, else of the dataset."""
        return Path(self.arguments["path"]).name if "path" in self.arguments else self.name

    def load(self) -> Any:
        """The dataset itself."""
        return load_dataset(self.name, **self.arguments)


def chosen_datasets(
    datasets: Sequence[str | Mapping[str, Any]], *, protocol: str, options: tuple[str, ...] = ()
) -> tuple[DatasetChoice, ...]:
    """Datasets as a study writes them: a name, or a mapping with `name` and `arguments`.

    Args:
        datasets: At least one.
        protocol: Names the protocol in errors.
        options: Further keys that a mapping may have.

    Raises:
        ConfigError: If there is none, two have one label, or a key is unknown.
        RegistryError: If a name is unknown.
    """
    if not datasets:
        raise ConfigError(f"`datasets` must name at least one dataset, got none (protocol {protocol}).")
    choices = []
    for item in datasets:
        entry: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item)
        known = ("name", "arguments", *options)
        if unknown := sorted(set(entry) - set(known)):
            raise ConfigError(
                f"Unknown key {unknown[0]!r} in `datasets` ({protocol}).{did_you_mean(unknown[0], known)}"
            )
        if "name" not in entry:
            raise ConfigError(f"Each of `datasets` must have a name, got {entry} (protocol {protocol}).")
        name = DATASETS.entry(entry.pop("name")).name
        choices.append(DatasetChoice(name, entry.pop("arguments", {}), entry))
    labels = [choice.label for choice in choices]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"`datasets` must have different names, {repeated} stand there twice (protocol {protocol}).")
    return tuple(choices)


class ReformattedStore:
    """The images of a store with other channels, and small ones with another size; bytes throughout.

    Gray images are repeated in every channel; colors become their luma.

    Args:
        store: An `ImageStore` or one of large images.
        channels: 1 or 3.
        size: Height and width of small images; None keeps theirs.
    """

    def __init__(self, store: Any, channels: int, size: tuple[int, int] | None = None) -> None:
        self.store = store
        self.channels = channels
        self.size = size
        self.is_large = bool(getattr(store, "is_large", False))
        self.labels = store.labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Tensor:
        """Images at the given places, (B, C, H, W) uint8."""
        images = self._recolored(self.store.take(indices))
        if self.size is None or images.shape[2:] == self.size:
            return images
        resized = F.interpolate(images.float(), size=self.size, mode="bicubic", antialias=True)
        return resized.round_().clamp_(0, 255).to(torch.uint8)

    def decode(self, index: int) -> Tensor:
        """One large image, (C, h, w) uint8."""
        return self._recolored(self.store.decode(index)[None])[0]

    def _recolored(self, images: Tensor) -> Tensor:
        if images.shape[1] == self.channels:
            return images
        if self.channels == 1:
            return luma(images.float().transpose(0, 1)).round_().to(torch.uint8)[:, None]
        return images.expand(-1, self.channels, -1, -1)


class MatchedDataset:
    """A dataset as the backbone of another sees it: that one's channels, size and normalization.

    The size is left to the evaluation view, which resizes small images whole, and large ones as it does its own.

    Args:
        dataset: The dataset.
        like: The dataset that the backbone was made for.
    """

    def __init__(self, dataset: Any, like: Any) -> None:
        self.dataset = dataset
        self.num_classes = dataset.num_classes
        self.channels, self.image_size, self.mean, self.std = like.channels, like.image_size, like.mean, like.std

    @property
    def fingerprint(self) -> str:
        """Of the content, and of the channels where they were changed."""
        own: str = self.dataset.fingerprint
        return own if self.dataset.channels == self.channels else f"{own} with {self.channels} channels"

    def split(self, name: str) -> ReformattedStore:
        """The images and labels of a split."""
        return ReformattedStore(self.dataset.split(name), self.channels)

    def describe(self) -> dict[str, Any]:
        """The dataset, and its images' format before and after; JSON types."""
        return {
            "dataset": self.dataset.name,
            "fingerprint": self.dataset.fingerprint,
            "own_format": [self.dataset.channels, self.dataset.image_size],
            "seen_format": [self.channels, self.image_size],
        }


class RoundTripDataset:
    """A dataset whose small images went to another format and back: what a change of format alone does to them.

    Args:
        dataset: The dataset.
        channels: Channels on the way.
        image_size: Side on the way; the evaluation view resizes back.
    """

    def __init__(self, dataset: Any, channels: int, image_size: int) -> None:
        self.dataset = dataset
        self.num_classes = dataset.num_classes
        self.channels, self.image_size = dataset.channels, dataset.image_size
        self.mean, self.std = dataset.mean, dataset.std
        self.way = (channels, image_size)
        self.fingerprint = f"{dataset.fingerprint} by way of {channels} channels and {image_size} px"

    def split(self, name: str) -> ReformattedStore:
        """The images and labels of a split."""
        channels, side = self.way
        return ReformattedStore(ReformattedStore(self.dataset.split(name), channels, (side, side)), self.channels)


def round_trip(dataset: Any, other: Any) -> RoundTripDataset | None:
    """A dataset after a trip to the format of another; None if that is its own, or images of either are large."""
    if (dataset.channels, dataset.image_size) == (other.channels, other.image_size):
        return None
    if any(getattr(each.split("test"), "is_large", False) for each in (dataset, other)):
        return None
    return RoundTripDataset(dataset, other.channels, other.image_size)
