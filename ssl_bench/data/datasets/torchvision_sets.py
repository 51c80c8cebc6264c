"""Datasets of torchvision whose images are small: decoded once, validation carved from train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets as tv

from ssl_bench.data.dataset import Dataset, register_dataset
from ssl_bench.data.decoded import decoded_store, from_torchvision, stored_digest
from ssl_bench.data.splits import carve_validation
from ssl_bench.data.store import ImageStore


class TorchvisionDataset(Dataset):
    """Shared path of the torchvision datasets; subclasses say how torchvision names the parts."""

    channels = 3
    image_size = 32
    family = "cifar"
    parts: tuple[str, ...] = ("train", "test")

    @property
    def folder(self) -> Path:
        """Where the original files and the decoded ones are kept."""
        return self.root / self.name

    def build(self, part: str, download: bool) -> Any:
        """Torchvision's dataset of "train", "test" or "unlabeled"."""
        raise NotImplementedError

    def part(self, name: str) -> ImageStore:
        """All images of an original part."""

        def decode() -> tuple[np.ndarray, np.ndarray]:
            return from_torchvision(lambda download: self.build(name, download), f"{self.name} in {self.folder}")

        return decoded_store(self.folder / "decoded", name, decode)

    def load_split(self, name: str) -> ImageStore:
        """Load a split; train and validation share the original training part."""
        if name not in ("train", "validation"):
            return self.part(name)
        whole = self.part("train")
        train, validation = carve_validation(whole.labels)
        return whole.subset(train if name == "train" else validation)

    @property
    def fingerprint(self) -> str:
        """Hash of the content of every part."""
        for name in self.parts:
            self.part(name)
        return stored_digest(self.folder / "decoded", self.parts)


@register_dataset("cifar10", version=1)
class CIFAR10(TorchvisionDataset):
    """CIFAR-10: 50,000 + 10,000 color images of 32 px, 10 classes."""

    num_classes = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def build(self, part: str, download: bool) -> Any:
        """Torchvision's CIFAR-10."""
        return tv.CIFAR10(self.folder, train=part == "train", download=download)


@register_dataset("cifar100", version=1)
class CIFAR100(TorchvisionDataset):
    """CIFAR-100: 50,000 + 10,000 color images of 32 px, 100 classes."""

    num_classes = 100
    class_names = tuple(f"class {i}" for i in range(100))
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def build(self, part: str, download: bool) -> Any:
        """Torchvision's CIFAR-100."""
        return tv.CIFAR100(self.folder, train=part == "train", download=download)


@register_dataset("svhn", version=1)
class SVHN(TorchvisionDataset):
    """Street View House Numbers: 73,257 + 26,032 color images of 32 px, 10 digits."""

    num_classes = 10
    class_names = tuple(str(i) for i in range(10))
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.1980, 0.2010, 0.1970)

    def build(self, part: str, download: bool) -> Any:
        """Torchvision's SVHN."""
        return tv.SVHN(self.folder, split=part, download=download)


@register_dataset("stl10", version=1)
class STL10(TorchvisionDataset):
    """STL-10: 5,000 + 8,000 labelled and 100,000 unlabelled color images of 96 px; pretrains on the unlabelled."""

    num_classes = 10
    class_names = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
    image_size = 96
    mean = (0.4467, 0.4398, 0.4066)
    std = (0.2603, 0.2566, 0.2713)
    parts = ("train", "test", "unlabeled")
    split_names = ("train", "validation", "test", "unlabeled")
    pretrain_split = "unlabeled"

    def build(self, part: str, download: bool) -> Any:
        """Torchvision's STL-10."""
        return tv.STL10(self.folder, split=part, download=download)
