"""Spread and collapse of embeddings.

Every figure depends on layer, split, view, sample count, centering and precision: state them beside it.
Shapes: N samples, D features. All sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def entropy_rank(shares: Tensor) -> float:
    """Exponential of the entropy of shares of a whole: how many there are, were they equal."""
    return float(torch.special.entr(shares).sum().exp())


def rankme(features: Tensor, *, eps: float = 1e-7) -> float:
    """RankMe: exponential of the entropy of the uncentered singular values' shares.

    p_k = s_k / sum(s) + eps. Between 1 and min(N, D) up to eps; a common offset of all samples lowers it,
    since nothing is centered. Source: Garrido et al. 2023, arXiv 2210.02885, eq. 1 and 2.

    Args:
        features: (N, D).
        eps: Added to every share.

    Returns:
        The smooth rank; 0.0 when every feature is zero.
    """
    singular = singular_values(features.double())
    total = singular.sum()
    return entropy_rank(singular / total + eps) if total > 0 else 0.0


def effective_rank(features: Tensor) -> float:
    """Exponential of the entropy of the covariance eigenvalues' shares (centered, float64).

    Source: Roy and Vetterli 2007, applied to eigenvalues of the covariance.

    Args:
        features: (N, D).

    Returns:
        Between 1 and min(N - 1, D); 0.0 when all samples are equal.
    """
    eigenvalues = covariance_eigenvalues(features)
    total = eigenvalues.sum()
    return entropy_rank(eigenvalues / total) if total > 0 else 0.0


def covariance_eigenvalues(features: Tensor) -> Tensor:
    """Eigenvalues of the centered covariance (1 / (N - 1)), descending, the min(N, D) that may differ from 0.

    Those below 1e-13 of the largest are rounding and given as 0; so are all when every sample is equal.

    Args:
        features: (N, D), N >= 2.
    """
    centered = features.double()
    centered = centered - centered.mean(dim=0)
    eigenvalues = singular_values(centered).square().flip(0)
    # rounding leaves about 1e-16 of the uncentered energy where there is no variance at all
    if eigenvalues.sum() <= 1e-13 * features.double().square().sum():
        return torch.zeros_like(eigenvalues)
    return eigenvalues.where(eigenvalues > 1e-13 * eigenvalues[0], 0.0) / (len(features) - 1)


def participation_ratio(eigenvalues: Tensor) -> float:
    """(sum of eigenvalues)^2 / sum of their squares: number of directions that share the variance; 0.0 without any."""
    squares = eigenvalues.square().sum()
    return float(eigenvalues.sum().square() / squares) if squares > 0 else 0.0


def stable_rank(eigenvalues: Tensor) -> float:
    """Sum of eigenvalues / largest: total variance in units of the widest direction's; 0.0 without any."""
    largest = eigenvalues.max()
    return float(eigenvalues.sum() / largest) if largest > 0 else 0.0


def collapse_std(features: Tensor) -> float:
    """Mean over dimensions of the standard deviation (1 / N) of L2-normalized features.

    1 / sqrt(D) when directions are isotropic, 0 at complete collapse. Source: Chen and He 2021,
    arXiv 2011.10566, section 4.1.

    Args:
        features: (N, D).
    """
    directions = normalize(features.double(), eps=1e-12)
    return float(directions.std(dim=0, correction=0).mean())


def alignment(x: Tensor, y: Tensor, *, alpha: float = 2.0) -> Tensor:
    """Mean of ||x_i - y_i||^alpha over positive pairs on the unit sphere.

    Source: Wang and Isola 2020, arXiv 2005.10242.

    Args:
        x: (N, D), rows of norm 1.
        y: Partners, (N, D).
        alpha: Exponent.

    Returns:
        Scalar >= 0.
    """
    mean: Tensor = (x - y).norm(dim=1).pow(alpha).mean()
    return mean


def uniformity(x: Tensor, *, t: float = 2.0) -> Tensor:
    """Log of the mean Gaussian potential exp(-t ||x_i - x_j||^2) over pairs i < j; in [-4 t, 0].

    Source: Wang and Isola 2020, arXiv 2005.10242.

    Args:
        x: (N, D), rows of norm 1, N >= 2.
        t: Inverse width.

    Returns:
        Scalar <= 0; 0 at complete collapse.
    """
    distances = torch.nn.functional.pdist(x)  # differences, not the expanded square: no cancellation
    return torch.logsumexp(-t * distances.square(), dim=0) - torch.log(distances.new_tensor(len(distances)))


def singular_values(x: Tensor) -> Tensor:
    """Singular values from the smaller Gram matrix: in float64 those below 1e-8 of the largest are noise."""
    gram = x.T @ x if x.shape[1] <= x.shape[0] else x @ x.T
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    return eigenvalues.clamp(min=0).sqrt()
