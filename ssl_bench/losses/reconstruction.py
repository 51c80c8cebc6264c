"""Losses of masked image modeling.

Shapes: B images, L patches, V = patch_size^2 * C values of a patch (row, column, channel; channel fastest).
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.losses.common import full_precision


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Pixels of each patch, (B, C, H, W) -> (B, L, V)."""
    batch, channels, height, width = images.shape
    p = patch_size
    x = images.reshape(batch, channels, height // p, p, width // p, p)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, p * p * channels)


def unpatchify(patches: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """Inverse of `patchify`, (B, L, V) -> (B, C, H, W)."""
    p = patch_size
    x: Tensor = patches.unflatten(1, grid).unflatten(3, (p, p, -1))
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, grid[0] * p, grid[1] * p)


def normalize_patches(patches: Tensor, eps: float = 1e-6) -> Tensor:
    """(y - mean) / sqrt(var + eps) within each patch, variance unbiased (MAE's norm_pix_loss)."""
    mean = patches.mean(-1, keepdim=True)
    return (patches - mean) / (patches.var(-1, keepdim=True) + eps).sqrt()


@full_precision
def masked_mse(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean squared error over the masked patches of each image, (B,).

    Source: He et al. 2022 (MAE), arXiv 2111.06377. With equal counts in every image, the mean over images is
    the official code's sum over masked patches divided by their number.

    Args:
        prediction: (B, L, V).
        target: (B, L, V).
        mask: 1 or true where masked, (B, L), at least one a row.
    """
    weight = mask.to(prediction.dtype)
    return ((prediction - target).square().mean(-1) * weight).sum(1) / weight.sum(1)
