"""Any folder of images: classes by folder name, unreadable files set aside and reported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ssl_bench.data.dataset import Dataset, register_dataset
from ssl_bench.data.decoded import decoded_store
from ssl_bench.data.splits import carve_validation
from ssl_bench.data.store import ImageStore
from ssl_bench.errors import DataError
from ssl_bench.results.store import content_hash

SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEST_NAMES = ("test", "val", "validation")
LARGE = 96  # images above this side are decoded in the loop's workers instead of once
TEST_FRACTION = 0.2


def read_rgb(path: Path) -> np.ndarray:
    """One image as RGB (H, W, 3) uint8, whatever its mode; transparency is put on white.

    Raises:
        DataError: If the file is not a whole image.
    """
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
                values = np.asarray(image, dtype=np.float64)
                top = 65535.0 if image.mode != "F" else max(1.0, float(values.max(initial=0)))
                gray = (np.clip(values / top, 0, 1) * 255).round().astype(np.uint8)
                return np.repeat(gray[:, :, None], 3, axis=2)
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                rgba = image.convert("RGBA")
                white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
                return np.asarray(Image.alpha_composite(white, rgba).convert("RGB"))
            return np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} must be a whole image, got: {error}") from error


class FolderStore:
    """Large images, decoded one by one where they are needed."""

    is_large = True

    def __init__(self, paths: Sequence[Path], labels: np.ndarray) -> None:
        self.paths = list(paths)
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def decode(self, index: int) -> Tensor:
        """One image, (3, H, W) uint8."""
        return torch.from_numpy(read_rgb(self.paths[index]).transpose(2, 0, 1).copy())

    def subset(self, indices: np.ndarray) -> FolderStore:
        """A store of some of the images."""
        return FolderStore([self.paths[i] for i in indices], self.labels[indices])


@register_dataset("image_folder", version=1)
class ImageFolder(Dataset):
    """Images in folders named by class: path/train/CLASS and path/test/CLASS (or val), or path/CLASS alone.

    Classes are the sorted folder names over all parts, so ids agree between them; hidden folders and files
    are passed over. Without a test part, a fixed stratified fifth becomes one. Unreadable files are left out
    and listed in `report`.

    Args:
        root: Where decoded images are kept.
        path: The folder.
        image_size: Side to which images are resized (short side) and cropped (center); up to 96 they are
            decoded once, above in the training loop.
    """

    content_is_fixed = False
    channels = 3
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(self, *, root: Path, path: str, image_size: int = 224) -> None:
        super().__init__(root=root)
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise DataError(f"`path` must be a folder of images, got {path!r}. Check datasets[].arguments.path.")
        self.image_size = image_size
        self.family = "cifar" if image_size <= LARGE else "imagenet"
        parts = {"train": self.path / "train"} if (self.path / "train").is_dir() else {"train": self.path}
        if parts["train"] != self.path:
            found = [self.path / name for name in TEST_NAMES if (self.path / name).is_dir()]
            parts |= {"test": found[0]} if found else {}
        self._parts = parts
        self.class_names = tuple(sorted({f.name for part in parts.values() for f in _folders(part)}))
        self.num_classes = len(self.class_names)
        if not self.num_classes:
            raise DataError(f"{self.path} must hold one folder a class, got none. Sort the images into class folders.")

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, int]]]:
        ids = {name: i for i, name in enumerate(self.class_names)}
        return {
            part: [(file, ids[f.name]) for f in _folders(folder) for file in _image_files(f)]
            for part, folder in self._parts.items()
        }

    @cached_property
    def report(self) -> dict[str, object]:
        """Preflight: how many images are good, which files are not and why, which classes are empty."""
        bad: dict[str, str] = {}
        good: dict[str, list[tuple[Path, int]]] = {}
        for part, files in self._files.items():
            good[part] = []
            for file, label in files:
                try:
                    read_rgb(file)
                except DataError as error:
                    bad[str(file)] = str(error)
                else:
                    good[part].append((file, label))
        empty = {
            part: [name for i, name in enumerate(self.class_names) if all(label != i for _, label in files)]
            for part, files in good.items()
        }
        self._good = good
        return {"images": {part: len(files) for part, files in good.items()}, "unreadable": bad, "empty_classes": empty}

    def _usable(self, part: str) -> list[tuple[Path, int]]:
        counts = self.report["images"]
        assert isinstance(counts, dict)
        if not counts.get(part):
            raise DataError(f"{self._parts[part]} must hold readable images, got none. See the dataset's report.")
        return self._good[part]

    def _store(self, part: str) -> ImageStore | FolderStore:
        files = self._usable(part)
        labels = np.array([label for _, label in files])
        if self.image_size > LARGE:
            return FolderStore([file for file, _ in files], labels)

        def decode() -> tuple[np.ndarray, np.ndarray]:
            images = [_square(read_rgb(file), self.image_size) for file, _ in files]
            return np.stack(images).transpose(0, 3, 1, 2).copy(), labels

        return decoded_store(self.root / self.name / self.fingerprint, part, decode)

    def load_split(self, name: str) -> ImageStore:
        """Load a split."""
        whole = self._store("train")
        if "test" in self._parts:
            if name == "test":
                return self._store("test")  # type: ignore[return-value]
            rest = np.arange(len(whole))
        else:
            rest, test = carve_validation(whole.labels, fraction=TEST_FRACTION)
            if name == "test":
                return whole.subset(test)  # type: ignore[return-value]
        train, validation = carve_validation(whole.labels[rest])
        return whole.subset(rest[train if name == "train" else validation])  # type: ignore[return-value]

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Hash of names, sizes and times of the files, and the image size."""
        facts = [
            [part, str(file.relative_to(self.path)), label, file.stat().st_size, file.stat().st_mtime_ns]
            for part, files in self._files.items()
            for file, label in files
        ]
        return content_hash([self.image_size, facts])


def _folders(part: Path) -> list[Path]:
    return sorted(f for f in part.iterdir() if f.is_dir() and not f.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    files = (f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _square(image: np.ndarray, size: int) -> np.ndarray:
    height, width = image.shape[:2]
    short = min(height, width)
    new = (max(size, round(width * size / short)), max(size, round(height * size / short)))
    resized = Image.fromarray(image).resize(new, Image.Resampling.BICUBIC)
    left, top = (new[0] - size) // 2, (new[1] - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))
