"""Intrinsic dimension from distances to nearest neighbors: local (LDReg's two estimates) and global (TwoNN).

All estimates are invariant to translation, rotation and scale. They grow with N and change with k: state both.
Shapes: N samples, D features, k neighbors. All sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24  # of neighbors' differences held at once: 128 MB


def neighbor_distances(features: Tensor, k: int) -> Tensor:
    """Euclidean distances of each row to its k nearest other rows, ascending.

    Neighbors are found by inner products, their distances computed anew from differences, so that equal rows are
    at distance 0 and near duplicates keep their digits.

    Args:
        features: (N, D), N >= 2.
        k: Neighbors, at most N - 1.

    Returns:
        (N, k), float64.
    """
    x = features.double()
    x = x - x.mean(dim=0)
    squares = x.square().sum(dim=1)
    found = []
    for own in torch.arange(len(x), device=x.device).split(max(1, CHUNK_ELEMENTS // max(k * x.shape[1], len(x)))):
        squared = squares[own][:, None] + squares - 2 * x[own] @ x.T
        squared.scatter_(1, own[:, None], torch.inf)  # a row is no neighbor of itself; its duplicates are
        nearest = squared.topk(k, dim=1, largest=False).indices
        found.append(torch.linalg.vector_norm(x[own][:, None] - x[nearest], dim=2).sort(dim=1).values)
    return torch.cat(found)


def local_dimension_mle(distances: Tensor) -> Tensor:
    """Maximum-likelihood local dimension, -k / sum_{j <= k} ln(r_j / r_k).

    The term j = k is zero. Source: Huang et al. 2024 (LDReg), arXiv 2401.10474, after Amsaleg et al. 2015. Differs:
    their code adds 1e-4 within the logarithm; Levina and Bickel 2004 divide by k - 1.

    Args:
        distances: (N, k), ascending, > 0, k >= 2.

    Returns:
        (N,); infinite where all k are equal.
    """
    return -distances.shape[1] / (distances / distances[:, -1:]).log().sum(dim=1)


def local_dimension_moments(distances: Tensor) -> Tensor:
    """Moment estimate of the local dimension, m / (r_k - m) with m the mean of r_1..r_k.

    Source: as `local_dimension_mle`. Their paper's mean over all k; their code leaves out the k-th.

    Args:
        distances: (N, k), ascending, > 0, k >= 2.

    Returns:
        (N,); infinite where all k are equal.
    """
    return distances.mean(dim=1) / (distances[:, -1:] - distances).mean(dim=1)


def geometric_mean(dimensions: Tensor) -> float:
    """Exponential of the mean logarithm, how LDReg sums up local dimensions, (N,) to a number."""
    return float(dimensions.log().mean().exp())


def two_nn(distances: Tensor) -> float:
    """TwoNN: N / sum_i ln(r_2 / r_1), the maximum-likelihood form.

    Source: Facco et al. 2017, whose own figure is the slope of a line through the lower 90 % of the same ratios.

    Args:
        distances: (N, 2 or more), ascending, > 0.

    Returns:
        The dimension; infinite if the two nearest are equally far from every sample.
    """
    return float(len(distances) / (distances[:, 1] / distances[:, 0]).log().sum())
