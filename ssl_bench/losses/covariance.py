"""Losses on second moments of a batch.

Shapes: N samples over all ranks, P projection width. The caller gathers; nothing here communicates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def second_moment_contrast(z: Tensor, second_moment: Tensor) -> Tensor:
    """Mean of z_i^T C z_i, with gradient through the two explicit z only.

    Source: Zhu et al. 2022 (TiCo), arXiv 2206.10698.

    Args:
        z: Unit rows over the global batch, shape (N, P).
        second_moment: C, shape (P, P), without gradient.

    Returns:
        Scalar in [0, 1] for unit rows and trace(C) <= 1.
    """
    return ((z @ second_moment) * z).sum(1).mean()


def off_diagonal_correlation(z: Tensor) -> Tensor:
    """Mean square of the off-diagonal correlations, over all P^2 entries with a zeroed diagonal.

    Source: Lee & Aune 2021 (VIbCReg), arXiv 2109.00783: columns are centered and scaled to unit norm.

    Args:
        z: Projections over the global batch, shape (N, P).

    Returns:
        Scalar in [0, (P - 1) / P]; invariant to shift and scale of each feature.
    """
    unit = F.normalize(z - z.mean(0), dim=0)
    correlation = unit.T @ unit
    return (correlation.square().sum() - correlation.diagonal().square().sum()) / correlation.numel()


def hinge_std(z: Tensor, *, floor: float = 1.0, eps: float = 1e-4) -> Tensor:
    """Mean over features of max(0, floor - sqrt(Var + eps)), Var unbiased.

    Source: Bardes et al. 2022 (VICReg), eq. 1, arXiv 2105.04906.

    Args:
        z: Projections over the global batch, shape (N, P), N >= 2.
        floor: Standard deviation below which a feature is penalized.
        eps: Added to the variance, so that the gradient is finite at a constant feature.
    """
    return F.relu(floor - torch.sqrt(z.var(0) + eps)).mean()
