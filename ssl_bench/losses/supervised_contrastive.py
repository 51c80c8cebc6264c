"""Contrastive loss with labels."""

from __future__ import annotations

from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
def sup_con(anchors: Tensor, candidates: Tensor, anchor_rows: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """L_out of supervised contrastive learning, one value an anchor.

    -(1 / |P(i)|) sum_{p in P(i)} [s_ip - log sum_{a != i} exp s_ia], s = z.z / t; P(i) are the other
    candidates of i's label. An anchor without positives contributes 0.
    Source: Khosla et al. 2020, eq. 2, arXiv 2004.11362.

    Args:
        anchors: Unit rows, shape (A, P).
        candidates: Unit rows, all views of the global batch, shape (M, P).
        anchor_rows: Row of each anchor among the candidates, shape (A,).
        labels: Label of each candidate, shape (M,).
        temperature: Positive scale of the similarities.

    Returns:
        Losses, shape (A,).
    """
    logits = anchors @ candidates.T / temperature
    not_self = logits.new_ones(logits.shape).scatter(1, anchor_rows[:, None], 0.0)
    normalizer = logits.masked_fill(not_self == 0, float("-inf")).logsumexp(1, keepdim=True)
    positive = (labels[anchor_rows][:, None] == labels[None]) * not_self
    count = positive.sum(1).clamp(min=1)
    return -(positive * (logits - normalizer)).sum(1) / count
