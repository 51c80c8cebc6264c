"""What a dataset is: fixed splits of stored images, with labels kept beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from ssl_bench.data.store import ImageStore
from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.registry import Entry, Registry

DATASETS: Registry[type[Dataset]] = Registry("dataset", "ssl_bench.data.datasets")
register_dataset = DATASETS.register


class Dataset:
    """Images in three splits: train, validation (carved from train) and test.

    Subclasses set the attributes and override `load_split`; splits are loaded once, on first use.

    Attributes:
        name: Registry name.
        num_classes: Number of classes, also of those missing in a split.
        class_names: One name a class, in the order of the labels.
        channels: Image channels.
        image_size: Side of the square images in pixels.
        mean: Mean of each channel over the training split, in [0, 1].
        std: Standard deviation of each channel.
        family: "small", "cifar" or "imagenet": which of a method's recipes applies.
        pretrain_split: The split that pretraining uses.
        content_is_fixed: The name and arguments say what the images are; False where a folder's content does,
            which then belongs to a trial's identity.
    """

    registry_entry: ClassVar[Entry]
    num_classes: int
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    family: str
    pretrain_split: str = "train"
    content_is_fixed: ClassVar[bool] = True
    split_names: tuple[str, ...] = ("train", "validation", "test")

    def __init__(self, *, root: Path) -> None:
        self.root = root
        self._splits: dict[str, ImageStore] = {}

    @property
    def name(self) -> str:
        """Registry name."""
        return self.registry_entry.name

    def load_split(self, name: str) -> ImageStore:
        """Load one of `split_names`."""
        raise NotImplementedError

    def split(self, name: str) -> ImageStore:
        """The images and labels of a split.

        Raises:
            ConfigError: If the dataset has no such split.
        """
        if name not in self.split_names:
            raise ConfigError(f"Dataset {self.name!r} has no split {name!r}.{did_you_mean(name, self.split_names)}")
        if name not in self._splits:
            self._splits[name] = self.load_split(name)
        return self._splits[name]

    @property
    def fingerprint(self) -> str:
        """Hash of the content of every split, for caches and trial identities."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Facts for reports: counts of each split, class names, fingerprint."""
        return {
            "name": self.name,
            "num_classes": self.num_classes,
            "class_names": list(self.class_names),
            "image_size": self.image_size,
            "channels": self.channels,
            "splits": {name: len(self.split(name)) for name in self.split_names},
            "fingerprint": self.fingerprint,
        }


def data_root() -> Path:
    """Where datasets are kept: SSL_BENCH_DATA, else the user's cache folder."""
    return Path(os.environ.get("SSL_BENCH_DATA") or Path.home() / ".cache" / "ssl_bench")


def load_dataset(name: str, *, root: Path | None = None, **arguments: Any) -> Dataset:
    """Build a dataset by name; images are loaded or downloaded when a split is first used.

    Raises:
        RegistryError: If the name is unknown.
        ConfigError: If an argument is not one of the dataset's.
    """
    cls = DATASETS.get(name)
    try:
        return cls(root=root or data_root(), **arguments)
    except TypeError as error:
        raise ConfigError(f"Dataset {name!r} does not take these arguments: {error}. Given: {arguments}.") from error
