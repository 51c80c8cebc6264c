"""Losses and assignments of online clustering.

Shapes: N samples over all ranks, K prototypes, P projection width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
@torch.no_grad()
def sinkhorn(scores: Tensor, *, eps: float = 0.05, iterations: int = 3) -> Tensor:
    """Balanced soft assignment of samples to prototypes; each row sums to 1 exactly.

    M = exp(S / eps) / sum; repeat: divide prototypes by their mass and K, samples by their mass and N;
    return N M. Column masses are only approximately N / K, since samples are normalized last.
    Source: Caron et al. 2020 (SwAV), arXiv 2006.09882 and official code. The maximum is subtracted first,
    which changes nothing but overflow.

    Args:
        scores: Similarities of the whole batch, shape (N, K).
        eps: Entropy regularization.
        iterations: Rounds of normalization.
    """
    mass = ((scores - scores.max()) / eps).exp()
    mass /= mass.sum()
    num, prototypes = mass.shape
    for _ in range(iterations):
        # a prototype whose mass underflowed keeps zero mass instead of turning into NaN
        mass /= mass.sum(0, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny) * prototypes
        mass /= mass.sum(1, keepdim=True) * num
    return mass * num


@full_precision
def swapped_cross_entropy(codes: Tensor, scores: Tensor, *, temperature: float) -> Tensor:
    """-sum_k Q_k log softmax(S / t)_k for each sample, shape (N,)."""
    return -(codes * (scores / temperature).log_softmax(1)).sum(1)
