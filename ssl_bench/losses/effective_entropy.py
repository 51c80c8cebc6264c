"""Effective entropy of features: marginal entropies of a bounded map of them, and what correlates (E2MC).

Shapes: N samples over all ranks, P projection width. The caller gathers; nothing here communicates.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.losses.covariance import covariance_penalty

EPS = 1e-7  # added to a scaled spacing: the entropy of equal values is ln of it


@full_precision
def marginal_entropy(u: Tensor) -> Tensor:
    """Mean over features of the m-spacing estimate of their differential entropy, m = round(sqrt N).

    With each column sorted: 1 / (N - m) sum_i ln((N + 1) / m (u_(i + m) - u_(i)) + 1e-7). Compare only at equal
    N: the estimate is biased, and a uniform grid's is above 0. Tied values have a gradient of order 1 / 1e-7.

    Args:
        u: Values over the global batch, shape (N, P), N >= 2.

    Returns:
        Scalar; at least ln 1e-7 = -16.1, its value at a constant.
    """
    num = len(u)
    m = round(math.sqrt(num))
    ordered = u.T.contiguous().sort(dim=1).values  # rows sort several times faster than columns on a CPU
    spacings = ordered[:, m:] - ordered[:, :-m]
    return torch.log((num + 1) / m * spacings + EPS).mean()


@full_precision
def effective_entropy(z: Tensor, *, map: Literal["sigmoid", "normal"]) -> tuple[Tensor, Tensor]:
    """Marginal entropy, to be raised, and covariance penalty, to be lowered, of z mapped into the unit cube.

    "sigmoid", for methods without unit rows: u = 1 / (1 + exp(-z)). "normal", for methods on the unit sphere:
    u = Phi(sqrt(P) z / |z|), Phi the standard normal distribution function, since a coordinate of a uniform
    point on the sphere is close to N(0, 1/P). Source: Chakraborty et al. 2025 (E2MC), arXiv 2411.15931, from a
    transcription of its pseudo-code: a variant, not verified against the paper; sqrt(P) is derived, not read.

    Args:
        z: Projections of one view over the global batch, shape (N, P), N >= 2, gathered with gradient.
        map: "sigmoid" or "normal".

    Returns:
        `marginal_entropy` and VICReg's `covariance_penalty` of u, scalars.
    """
    u = torch.sigmoid(z) if map == "sigmoid" else torch.special.ndtr(math.sqrt(z.shape[1]) * unit_rows(z))
    return marginal_entropy(u), covariance_penalty(u)
