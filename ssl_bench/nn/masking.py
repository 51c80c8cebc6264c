"""Random masks over patches: exact counts, a function of each sample's key."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.random import permutation, uniform

DRAWS = 16  # of all blocks of an image, until enough context is left


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


def block_sizes(
    u: Tensor, grid: tuple[int, int], scale: tuple[float, float], aspect: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Rows and columns of blocks, (...) uniform numbers -> two (...) float64.

    floor(L s) patches at height over width a, s and a both linear in the one number u, as in the I-JEPA code.
    """
    rows, columns = grid
    area = (rows * columns * (scale[0] + u.double() * (scale[1] - scale[0])) + 1e-6).floor()
    ratio = aspect[0] + u.double() * (aspect[1] - aspect[0])
    return (area * ratio).sqrt().round().clamp(1, rows), (area / ratio).sqrt().round().clamp(1, columns)


def block_masks(size: tuple[Tensor, Tensor], u: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
    """Blocks of a size at places uniform over all that fit, (...) uniform numbers -> (..., L) bool, row-major."""
    sides = []
    for length, number, side in zip(size, (u, v), grid, strict=True):
        start = (number * (side - length + 1)).floor()[..., None]
        place = torch.arange(side, device=u.device)
        sides.append((place >= start) & (place < start + length[..., None]))
    return (sides[0][..., :, None] & sides[1][..., None, :]).flatten(-2)


def multi_block_masks(
    keys: Tensor,
    grid: tuple[int, int],
    *,
    num_targets: int,
    target_scale: tuple[float, float],
    target_aspect: tuple[float, float],
    context_scale: tuple[float, float],
    min_context: int,
) -> tuple[Tensor, Tensor]:
    """Target blocks of one size an image, and a square context block without them (I-JEPA's multi-block masks).

    All blocks of an image are drawn again until `min_context` patches of context are left; of 16 draws that all
    leave fewer, the one that leaves most is taken.

    Args:
        keys: One key a sample, (B,).
        grid: Rows and columns of patches.
        num_targets: M.
        target_scale: Range of a target block's share of the patches.
        target_aspect: Range of its height over its width.
        context_scale: Range of the context block's share of the patches.
        min_context: Fewest patches of context.

    Returns:
        Context, (B, L) bool, and targets, (B, M, L) bool; no patch of an image is in both.
    """
    numbers = uniform(keys, DRAWS * (2 * num_targets + 4), "blocks", torch.float64).unflatten(1, (DRAWS, -1))
    target_u, context_u, top, left = numbers.split([1, 1, num_targets + 1, num_targets + 1], 2)
    sizes = block_sizes(target_u, grid, target_scale, target_aspect)
    targets = block_masks(sizes, top[..., 1:], left[..., 1:], grid)  # (B, draws, M, L)
    square = block_sizes(context_u, grid, context_scale, (1.0, 1.0))
    context = block_masks(square, top[..., :1], left[..., :1], grid)[:, :, 0] & ~targets.any(2)
    chosen = context.sum(2).clamp(max=min_context).argmax(1)  # the first of equal ones
    row = torch.arange(len(keys), device=keys.device)
    return context[row, chosen], targets[row, chosen]


def true_places(mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Indices of the true entries in ascending order, padded to `length`, (..., L) -> (..., length) int64 and bool.

    The second tensor is false at the padding, which consists of other indices.
    """
    places = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :length]
    return places, mask.gather(-1, places)
