"""Small images decoded once into files that are memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock

from ssl_bench.data.store import ImageStore
from ssl_bench.errors import DataError, StoreError
from ssl_bench.results.store import content_hash, replacing, write_json

Arrays = tuple[np.ndarray, np.ndarray]


def decoded_store(folder: Path, part: str, decode: Callable[[], Arrays]) -> ImageStore:
    """Images and labels of one part, from `folder` or decoded into it once.

    Processes that ask at the same time wait for one of them; a killed one leaves nothing behind.

    Args:
        folder: Where `<part>_images.npy`, `<part>_labels.npy` and `<part>.json` stand.
        part: Name of the part, such as "train".
        decode: Gives images (N, C, H, W) uint8 and labels (N,).
    """
    images, labels, facts = (folder / f"{part}{suffix}" for suffix in ("_images.npy", "_labels.npy", ".json"))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{part}.lock"):
        if not facts.exists():
            arrays = decode()
            for path, array in zip((images, labels), arrays, strict=True):
                with replacing(path) as temporary, open(temporary, "wb") as file:
                    np.save(file, array)
            write_json(facts, {"images": len(arrays[0]), "sha256": _digest(*arrays)})
    try:
        return ImageStore(np.load(images, mmap_mode="r"), np.load(labels))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{images.name} in {folder} must be whole, got: {error}. Delete the folder and run again."
        ) from error


def stored_digest(folder: Path, parts: tuple[str, ...]) -> str:
    """Hash over the digests of stored parts."""
    return content_hash([json.loads((folder / f"{part}.json").read_text())["sha256"] for part in parts])


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def from_torchvision(factory: Callable[[bool], object], where: str) -> Arrays:
    """Arrays of a torchvision dataset: found on disk, else downloaded.

    Args:
        factory: Builds the dataset, given whether to download.
        where: Name of the dataset and its folder, for the error.

    Raises:
        DataError: If it is neither on disk nor reachable.
    """
    try:
        dataset = factory(False)
    except (RuntimeError, OSError):
        try:
            dataset = factory(True)
        except Exception as error:  # urllib, socket and checksum errors all mean the same to the user
            raise DataError(
                f"{where} must be on disk or downloadable, got {type(error).__name__}: {error}. Download it on a "
                "machine with network into the same folder (SSL_BENCH_DATA names its parent)."
            ) from error
    images = np.asarray(dataset.data)  # type: ignore[attr-defined]
    labels = getattr(dataset, "targets", None)
    labels = dataset.labels if labels is None else labels  # type: ignore[attr-defined]
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images), np.asarray(labels, dtype=np.int64)
