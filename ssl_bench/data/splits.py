"""Fixed, stratified splits."""

from __future__ import annotations

import numpy as np

SPLIT_SEED = 20201130  # never changes: the validation images are the same for everyone


def carve_validation(labels: np.ndarray, *, fraction: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into train and validation, stratified by label, the same on every machine.

    Each class gives round(fraction * size) images to validation, at least one if it has two or more;
    a class of one image stays in train.

    Args:
        labels: Label of each image, shape (N,).
        fraction: Share of validation.

    Returns:
        Sorted train and validation indices.
    """
    rng = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    held_out = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(round(fraction * len(members)), 1) if len(members) > 1 else 0
        held_out.append(rng.permutation(members)[:count])
    validation = np.sort(np.concatenate(held_out)) if held_out else np.zeros(0, dtype=np.int64)
    return np.setdiff1d(np.arange(len(labels)), validation), validation
