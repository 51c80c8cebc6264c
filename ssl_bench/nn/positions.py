"""Fixed two-dimensional sine-cosine position codes."""

from __future__ import annotations

import torch
from torch import Tensor


def axis_code(positions: Tensor, width: int) -> Tensor:
    """[sin(t w_i); cos(t w_i)] with w_i = 10000^(-i / (width / 2)), (T,) -> (T, width)."""
    omega = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angle = positions.double()[:, None] * omega
    return torch.cat([angle.sin(), angle.cos()], 1)


def grid_code(width: int, grid: tuple[int, int], reference: tuple[int, int]) -> Tensor:
    """Codes of a grid of patches in row-major order, (h w, width) float32.

    The first half codes the column, the second the row (as the MAE code). A grid of another size than
    `reference` is stretched over it, so that coarse and fine views share one coordinate system.
    """
    rows, columns = (
        (torch.arange(n, dtype=torch.float64) + 0.5) * ref / n - 0.5 for n, ref in zip(grid, reference, strict=True)
    )
    row = rows.repeat_interleave(grid[1])
    column = columns.repeat(grid[0])
    return torch.cat([axis_code(column, width // 2), axis_code(row, width // 2)], 1).float()
