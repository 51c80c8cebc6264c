"""Whitening of a batch of projections.

Shapes: N samples, P projection width; a matrix to whiten is (rows, columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
def cholesky_whiten(h: Tensor, *, eps: float = 0.0) -> Tensor:
    """Whiten samples by the inverse Cholesky factor of their covariance: z_i = L^-1 (h_i - mean).

    (1 - eps) Cov + eps I = L L^T, Cov with N - 1. Source: Ermolov et al. 2021, eq. 6 and the official code,
    arXiv 2007.06346. Gradient flows through mean, covariance and factor.

    Args:
        h: Projections, shape (..., N, P), N > P.
        eps: Shrinkage towards the identity.

    Returns:
        Whitened projections of the same shape: covariance I, sum of squares (N - 1) P (at eps 0).

    Raises:
        torch.linalg.LinAlgError: If a covariance is singular (constant or too few samples).
    """
    centered = h - h.mean(-2, keepdim=True)
    num, dim = h.shape[-2:]
    covariance = centered.mT @ centered / (num - 1)
    shrunk = (1 - eps) * covariance + eps * torch.eye(dim, dtype=h.dtype, device=h.device)
    factor = torch.linalg.cholesky(shrunk)
    whitened: Tensor = torch.linalg.solve_triangular(factor, centered.mT, upper=False)
    return whitened.mT


@full_precision
def newton_whitening_matrix(covariance: Tensor, *, iterations: int) -> Tensor:
    """Approximate inverse square root of a covariance by Newton's iteration (IterNorm).

    S_n = S / tr S; P_0 = I; P_{k+1} = 1.5 P_k - 0.5 P_k^3 S_n; returns P_T / sqrt(tr S). Few iterations
    whiten softly, many diverge numerically. Source: Huang et al. 2019, arXiv 1904.03441.

    Args:
        covariance: Symmetric positive semi-definite, shape (..., d, d).
        iterations: T.
    """
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    normalized = covariance / trace
    p = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    for _ in range(iterations):
        p = 1.5 * p - 0.5 * p @ p @ p @ normalized
    return p / trace.sqrt()


@full_precision
def iterative_whiten(x: Tensor, *, iterations: int, axis: int) -> Tensor:
    """Softly whiten a batch along one axis.

    Axis 0 decorrelates samples over features (rows are centered, covariance (N, N) with P - 1), which the
    official INTL code calls channel whitening; axis 1 decorrelates features over samples (columns are
    centered, covariance (P, P) with N - 1). Source: Weng et al. 2024, arXiv 2305.16789.

    Args:
        x: Projections over the global batch, shape (N, P).
        iterations: Newton iterations T.
        axis: 0 or 1.
    """
    centered = x - x.mean(1 - axis, keepdim=True)
    size = x.shape[1 - axis] - 1
    if axis == 0:
        return newton_whitening_matrix(centered @ centered.T / size, iterations=iterations) @ centered
    return centered @ newton_whitening_matrix(centered.T @ centered / size, iterations=iterations)


@full_precision
def trace_loss(y: Tensor, *, axis: int) -> Tensor:
    """Sum of (variance - 1)^2 over rows (axis 0) or columns (axis 1), variances unbiased.

    Source: Weng et al. 2024, eq. 8, arXiv 2305.16789.
    """
    return (y.var(1 - axis) - 1).square().sum()


@full_precision
def group_iter_norm(x: Tensor, *, groups: int, iterations: int, eps: float = 1e-5) -> Tensor:
    """IterNorm over samples within groups of features; statistics of the batch, no affine part.

    Per group of d = P / groups features: S = x_c^T x_c / N + eps I (biased), y = x_c W with Newton's W.
    Source: Huang et al. 2019, arXiv 1904.03441, as used by VIbCReg.

    Args:
        x: Projections over the global batch, shape (N, P), P divisible by `groups`.
        groups: Number of groups.
        iterations: Newton iterations T.
        eps: Added to the diagonal.
    """
    grouped = (x - x.mean(0)).view(len(x), groups, -1).transpose(0, 1)  # (G, N, d)
    covariance = grouped.mT @ grouped / len(x)
    covariance = covariance + eps * torch.eye(covariance.shape[-1], dtype=x.dtype, device=x.device)
    return (grouped @ newton_whitening_matrix(covariance, iterations=iterations)).transpose(0, 1).reshape(x.shape)
