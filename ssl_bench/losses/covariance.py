"""Losses on second moments of a batch.

Shapes: N samples over all ranks, P projection width. The caller gathers; nothing here communicates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
def second_moment(z: Tensor) -> Tensor:
    """Uncentered second moment z^T z / N of rows (N, P), shape (P, P)."""
    return z.T @ z / len(z)


@full_precision
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


@full_precision
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
    return _off_diagonal_energy(correlation) / correlation.numel()


@full_precision
def hinge_std(z: Tensor, *, floor: float = 1.0, eps: float = 1e-4) -> Tensor:
    """Mean over features of max(0, floor - sqrt(Var + eps)), Var unbiased.

    Source: Bardes et al. 2022 (VICReg), eq. 1, arXiv 2105.04906.

    Args:
        z: Projections over the global batch, shape (N, P), N >= 2.
        floor: Standard deviation below which a feature is penalized.
        eps: Added to the variance, so that the gradient is finite at a constant feature.
    """
    return F.relu(floor - torch.sqrt(z.var(0) + eps)).mean()


@full_precision
def covariance_penalty(z: Tensor) -> Tensor:
    """Off-diagonal covariance energy divided by the width: (1/P) sum_{i != j} C_ij^2, C with N - 1.

    Source: Bardes et al. 2022 (VICReg), eq. 4, arXiv 2105.04906; equal to the authors' code. eb_jepa divides
    by P (P - 1) instead.

    Args:
        z: Projections over the global batch, shape (N, P), N >= 2.

    Returns:
        Scalar >= 0; 0 when features are uncorrelated.

    Example:
        >>> covariance_penalty(torch.eye(2))
        tensor(0.2500)
    """
    centered = z - z.mean(0)
    covariance = centered.T @ centered / (len(z) - 1)
    return _off_diagonal_energy(covariance) / z.shape[1]


@full_precision
def cross_correlation(z_a: Tensor, z_b: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Correlation of every feature of one view with every feature of the other, (P, P), entries in [-1, 1].

    Features are standardized over the batch with the biased variance plus eps (batch norm's convention).
    Source: Zbontar et al. 2021 (Barlow Twins), eq. 2, arXiv 2103.03230, and official code.

    Args:
        z_a: Projections of one view over the global batch, shape (N, P).
        z_b: The same of the other view.
        eps: Added to the variance.
    """
    units = [(z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + eps) for z in (z_a, z_b)]
    return units[0].T @ units[1] / len(z_a)


@full_precision
def redundancy_loss(correlation: Tensor, *, off_diagonal_weight: float) -> Tensor:
    """sum_i (1 - C_ii)^2 + weight * sum_{i != j} C_ij^2 (Barlow Twins, eq. 1)."""
    return (1 - correlation.diagonal()).square().sum() + off_diagonal_weight * _off_diagonal_energy(correlation)


def _off_diagonal_energy(matrix: Tensor) -> Tensor:
    # the total minus the diagonal's share would cancel, down to values below 0
    return matrix.square().fill_diagonal_(0).sum()
