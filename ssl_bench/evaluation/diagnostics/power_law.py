"""Decay of an eigenvalue spectrum."""

from __future__ import annotations

import torch
from torch import Tensor


def alpha_req(eigenvalues: Tensor, *, first: int = 4, last: int = 100) -> float:
    """Exponent alpha of the decay lambda_n ~ n^-alpha: weighted least squares of ln lambda_n on ln n.

    The weight of rank n is 1 / n. Source: Agrawal et al. 2022 (alpha-ReQ), NeurIPS; ranks 4 to 100 are those of the
    authors' training script (kumarkrishna/fastssl), the paper names no range. Not changed by the features' scale.
    The paper takes values near 1 as good: below, the spectrum is flat, above, few directions hold the variance.

    Args:
        eigenvalues: Of the centered covariance, descending, (K,); the fit ends before the first that is 0.
        first: Rank of the first eigenvalue in the fit, from 1.
        last: Rank of the last.

    Returns:
        The exponent; NaN with fewer than two eigenvalues in the range.
    """
    values = eigenvalues.double()[first - 1 : last]
    values = values[values > 0]
    if len(values) < 2:
        return float("nan")
    n = torch.arange(first, first + len(values), dtype=torch.float64, device=values.device)
    x, y = n.log(), values.log()
    weight = (1 / n) / (1 / n).sum()
    x, y = x - (weight * x).sum(), y - (weight * y).sum()
    return -float((weight * x * y).sum() / (weight * x.square()).sum())
