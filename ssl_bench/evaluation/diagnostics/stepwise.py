"""Eigenmodes of embeddings during training: one after another they leave zero and the loss falls by a step.

Source: Simon et al. 2023, arXiv 2303.15438. Shapes: N rows, D width, K modes. All sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.evaluation.diagnostics.geometry import (
    covariance_eigenvalues,
    entropy_rank,
    participation_ratio,
    rankme,
)

KEPT = 64
THRESHOLD = 1e-3  # of the largest eigenvalue, above which a mode counts as learned


def mode_figures(rows: Tensor) -> dict[str, float]:
    """Spectrum of the centered covariance (1 / (N - 1)) of rows as they are, neither standardized nor normalized.

    Args:
        rows: (N, D), N >= 2.

    Returns:
        trace, effective_rank, participation_ratio and num_modes (eigenvalues above 1e-3 of the largest) of the
        covariance, rankme of the rows, uncentered, and eigenvalue_1 to eigenvalue_64, the largest, in order.
    """
    eigenvalues = covariance_eigenvalues(rows)
    total = float(eigenvalues.sum())
    largest = {f"eigenvalue_{k}": value for k, value in enumerate(eigenvalues[:KEPT].tolist(), start=1)}
    return {
        "trace": total,
        "effective_rank": entropy_rank(eigenvalues / total) if total else 0.0,
        "rankme": rankme(rows),
        "participation_ratio": participation_ratio(eigenvalues),
        "num_modes": float((eigenvalues > THRESHOLD * eigenvalues[0]).sum()),
        **largest,
    }


def predicted_eigenvalues(gammas: Tensor, initial: Tensor, time: float) -> Tensor:
    """Eigenvalues gamma_j s_j(t)^2 of the cross-correlation of a linear network under Barlow Twins' loss.

    s_j(t)^2 = e^(8 gamma_j t) / (s_j(0)^-2 + (e^(8 gamma_j t) - 1) gamma_j), for gradient flow of ||W Gamma W^T - I||^2
    from small singular values along the eigenvectors of Gamma, the symmetrized second moment of pairs of views.

    Args:
        gammas: Eigenvalues of Gamma, > 0, (K,).
        initial: Singular values of W at the start, > 0, (K,).
        time: Gradient-flow time: the rate summed over steps.

    Returns:
        (K,), from nearly 0 to 1.
    """
    decay = torch.exp(-8 * gammas.double() * time)
    return gammas / (decay / initial.double().square() + (1 - decay) * gammas)


def critical_times(gammas: Tensor, initial: Tensor) -> Tensor:
    """When each mode is half learned, -ln(s_j(0)^2 gamma_j) / (8 gamma_j): the paper's, up to s_j(0)^2 gamma_j.

    Args:
        gammas: As in `predicted_eigenvalues`.
        initial: As in `predicted_eigenvalues`.

    Returns:
        (K,), in the order of the modes; those with the largest gamma come first.
    """
    return -(initial.double().square() * gammas).log() / (8 * gammas)
