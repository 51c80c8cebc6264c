"""Losses that contrast an anchor's positive with negatives.

Shapes: B anchors of this rank and view, N candidates over all ranks, P projection width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.losses.common import full_precision, unit_rows


@full_precision
def nt_xent(z_a: Tensor, z_b: Tensor, all_a: Tensor, all_b: Tensor, *, temperature: float, offset: int = 0) -> Tensor:
    """Normalized temperature-scaled cross entropy of each image, averaged over its two anchors.

    For an anchor i with positive p(i) among the 2N gathered projections:
    log sum_{j != i} exp(s_ij / t) - s_{i,p(i)} / t, with s the cosine similarity; self is left out, the
    positive stays in the denominator. Source: Chen et al. 2020, eq. 1, arXiv 2002.05709. The official
    code returns the sum over the two anchors, twice this value; solo-learn and lightly return this one.

    Args:
        z_a: Projections of view a on this rank, shape (B, P).
        z_b: Projections of view b on this rank, shape (B, P).
        all_a: The same of view a over the global batch, shape (N, P), gathered with gradient.
        all_b: The same of view b, shape (N, P).
        temperature: Positive scale of the similarities.
        offset: Row at which this rank's samples start in the gathered tensors.

    Returns:
        One value an image, shape (B,), float32 or wider.
    """
    z_a, z_b, all_a, all_b = (unit_rows(z) for z in (z_a, z_b, all_a, all_b))
    candidates = torch.cat([all_a, all_b])
    rows = torch.arange(len(z_a), device=z_a.device) + offset
    losses = []
    for anchors, own, positive in ((z_a, rows, rows + len(all_a)), (z_b, rows + len(all_a), rows)):
        logits = anchors @ candidates.T / temperature
        logits = logits.scatter(1, own[:, None], float("-inf"))
        losses.append(F.cross_entropy(logits, positive, reduction="none"))
    return (losses[0] + losses[1]) / 2


@full_precision
def info_nce_with_queue(query: Tensor, key: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """Cross entropy of each query's own key against a queue of older keys.

    log(exp(q.k / t) + sum_m exp(q.Q_m / t)) - q.k / t; keys of the current batch are no negatives.
    Source: He et al. 2020, eq. 1, arXiv 1911.05722. The positive logit comes first in the authors' code
    and last in others; the value is the same.

    Args:
        query: Unit rows with gradient, shape (B, P).
        key: Unit rows without gradient, shape (B, P).
        queue: Unit rows without gradient, shape (K, P).
        temperature: Positive scale of the similarities.

    Returns:
        One value a query, shape (B,).
    """
    positive = (query * key).sum(1, keepdim=True)
    logits = torch.cat([positive, query @ queue.T], dim=1) / temperature
    return torch.logsumexp(logits, 1) - logits[:, 0]


@full_precision
def info_nce_in_batch(anchors: Tensor, candidates: Tensor, *, temperature: float, offset: int = 0) -> Tensor:
    """Cross entropy of each anchor's own candidate among the candidates of the global batch.

    log sum_j exp(a_i.c_j / t) - a_i.c_{i + offset} / t.

    Args:
        anchors: Unit rows of this rank, shape (B, P).
        candidates: Unit rows of the global batch, shape (N, P).
        temperature: Positive scale of the similarities.
        offset: Row at which this rank's candidates start.

    Returns:
        One value an anchor, shape (B,).
    """
    logits = anchors @ candidates.T / temperature
    target = torch.arange(len(anchors), device=anchors.device) + offset
    return F.cross_entropy(logits, target, reduction="none")
