"""Rank of what the features of one image's views have in common.

Shapes: n images, q views of each, D features. All sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.evaluation.diagnostics.geometry import entropy_rank, singular_values


def lidar(views: Tensor, *, delta: float = 1e-4, eps: float = 1e-8) -> float:
    """LiDAR: exponential of the entropy of the shares of the eigenvalues of S_w^-1/2 S_b S_w^-1/2.

    S_b = sum_i (m_i - m)(m_i - m)' / (n - 1) of the images' view means m_i and their mean m; S_w =
    sum_ij (x_ij - m_i)(x_ij - m_i)' / (n (q - 1)) + delta I. Shares are l / sum(l) + eps. Source: Thilak et al. 2023,
    arXiv 2312.04000; a public re-implementation takes (l + eps) / sum(l + eps) instead, which calls complete collapse
    rank D. Changes with the features' scale, since delta does not; with n and q: state them.

    Args:
        views: (n, q, D), n >= 2, q >= 2.
        delta: Added to the variance within an image in every direction.
        eps: Added to every share.

    Returns:
        Between 1 and min(D, n - 1), up to eps; 0.0 when the images do not differ.
    """
    x = views.double()
    n, q, dim = x.shape
    means = x.mean(dim=1)
    between = (means - means.mean(dim=0)) / (n - 1) ** 0.5
    # rounding leaves about 1e-16 of the energy where the images do not differ
    if between.square().sum() <= 1e-13 * means.square().sum() / n:
        return 0.0
    within = (x - means[:, None]).reshape(n * q, dim) / (n * (q - 1)) ** 0.5
    factor = torch.linalg.cholesky(within.T @ within + delta * torch.eye(dim, dtype=x.dtype, device=x.device))
    # L^-1 S_b L^-T, with S_w = L L', has the same eigenvalues
    whitened = torch.linalg.solve_triangular(factor, between.T, upper=False)
    eigenvalues = singular_values(whitened).square()
    return entropy_rank(eigenvalues / eigenvalues.sum() + eps)
