"""Random masks over patches: exact counts, a function of each sample's key."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.random import permutation


def num_kept(num_patches: int, mask_ratio: float) -> int:
    """floor(L (1 - ratio)), guarded against float error: 10 patches at 0.9 keep 1, not 0.

    Raises:
        ConfigError: If nothing would be kept, or nothing masked.
    """
    kept = int(num_patches * (1 - mask_ratio) + 1e-6)
    if not 0 < kept < num_patches:
        raise ConfigError(
            f"`mask_ratio` must leave between 1 and {num_patches - 1} of {num_patches} patches visible, got "
            f"{mask_ratio}, which leaves {kept}. Change the method's mask_ratio or the backbone's patch_size."
        )
    return kept


def random_mask(keys: Tensor, num_patches: int, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Uniformly random patches to keep, and the mask.

    Args:
        keys: One key a sample, (B,), such as `batch.keys("mask")`.
        num_patches: L.
        mask_ratio: Share of masked patches.

    Returns:
        Indices of the visible patches, (B, K) int64 in ascending order, and the mask, (B, L) bool, true where
        masked; every row has the same counts.
    """
    kept = num_kept(num_patches, mask_ratio)
    keep = permutation(keys, num_patches, "mask")[:, :kept].sort(1).values
    mask = torch.ones(len(keys), num_patches, dtype=torch.bool, device=keys.device)
    return keep, mask.scatter(1, keep, False)
