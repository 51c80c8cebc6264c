"""Decoded images: one memory-mapped array of bytes, and labels kept beside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ssl_bench.errors import DataError


class ImageStore:
    """N small images as uint8 (N, C, H, W) and their labels (N,), -1 where unlabelled.

    Args:
        images: Array or memory map, uint8.
        labels: int64.

    Raises:
        DataError: If the arrays do not fit each other.
    """

    is_large = False

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(f"Images must be uint8 (N, C, H, W), got {images.dtype} {images.shape}.")
        if len(images) != len(labels):
            raise DataError(f"There must be one label an image, got {len(images)} images and {len(labels)} labels.")
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor | np.ndarray) -> Tensor:
        """Images at the given places, (B, C, H, W) uint8, copied out of the store."""
        return torch.from_numpy(self.images[np.asarray(indices)])

    def subset(self, indices: np.ndarray) -> ImageStore:
        """A store of some of the images, in the given order."""
        return ImageStore(self.images[indices], self.labels[indices])
