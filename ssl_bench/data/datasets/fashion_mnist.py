"""Fashion-MNIST, whole and as the small embedded subset."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import torchvision.datasets as tv

from ssl_bench.data.dataset import Dataset, register_dataset
from ssl_bench.data.decoded import decoded_store, from_torchvision
from ssl_bench.data.splits import carve_validation
from ssl_bench.data.store import ImageStore
from ssl_bench.errors import DataError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLASS_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
PREFIX = {"train": "train", "test": "t10k"}


def read_idx_folder(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 28, 28) and labels (N,) of "train" or "test" from idx files, compressed or not.

    Raises:
        DataError: If a file is missing, torn, or not what its header says.
    """
    arrays = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        path = folder / f"{PREFIX[part]}-{kind}"
        packed = path.with_name(path.name + ".gz")
        try:
            data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
            dims = data[3]
            shape = tuple(np.frombuffer(data, ">i4", dims, 4).tolist())
            arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape))
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise DataError(
                f"{path.name} must be a whole idx file in {folder}, got: {error}. Download it again."
            ) from error
    return arrays[0], arrays[1].astype(np.int64)


class _FashionMNIST(Dataset):
    num_classes = 10
    class_names = CLASS_NAMES
    channels = 1
    image_size = 28
    family = "small"

    def _part(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def load_split(self, name: str) -> ImageStore:
        """Load a split; train and validation share the training file."""
        images, labels = self._part("test" if name == "test" else "train")
        store = ImageStore(images[:, None], labels)
        if name == "test":
            return store
        train, validation = carve_validation(labels)
        return store.subset(train if name == "train" else validation)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Hash of images and labels."""
        digest = hashlib.sha256()
        for part in ("train", "test"):
            for array in self._part(part):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


@register_dataset("fashion_mnist_mini", version=1)
class FashionMNISTMini(_FashionMNIST):
    """10,000 + 2,000 real images of Fashion-MNIST that come with the package: no download."""

    mean = (0.2860,)
    std = (0.3530,)

    def _part(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        file = resources.files("ssl_bench.data") / "embedded" / "fashion_mnist_mini.npz"
        with resources.as_file(file) as path, np.load(path) as arrays:
            return arrays[f"{part}_images"], arrays[f"{part}_labels"].astype(np.int64)


@register_dataset("fashion_mnist", version=1)
class FashionMNIST(_FashionMNIST):
    """Fashion-MNIST: 60,000 + 10,000 gray images of 28 px; from a local folder, Debian's package, or downloaded."""

    mean = (0.2860,)
    std = (0.3530,)

    def _part(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        store = decoded_store(self.root / self.name / "decoded", part, lambda: self._decode(part))
        return store.images[:, 0], store.labels

    def _decode(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        folders = [self.root / self.name / "FashionMNIST" / "raw", DEBIAN_FOLDER]
        for folder in folders:
            if any(folder.glob(f"{PREFIX[part]}-images*")):
                images, labels = read_idx_folder(folder, part)
                return images[:, None], labels
        return from_torchvision(
            lambda download: tv.FashionMNIST(self.root / self.name, train=part == "train", download=download),
            f"fashion_mnist in {self.root / self.name}",
        )
