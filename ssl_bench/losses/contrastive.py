"""Losses that contrast an anchor's positive with negatives.

Shapes: B anchors of this rank and view, N candidates over all ranks, P projection width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(
    z_a: Tensor, z_b: Tensor, all_a: Tensor, all_b: Tensor, *, temperature: float, offset: int = 0
) -> Tensor:
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
    z_a, z_b, all_a, all_b = (F.normalize(_widen(z), dim=1) for z in (z_a, z_b, all_a, all_b))
    candidates = torch.cat([all_a, all_b])
    rows = torch.arange(len(z_a), device=z_a.device) + offset
    losses = []
    for anchors, own, positive in ((z_a, rows, rows + len(all_a)), (z_b, rows + len(all_a), rows)):
        logits = anchors @ candidates.T / temperature
        logits = logits.scatter(1, own[:, None], float("-inf"))
        losses.append(F.cross_entropy(logits, positive, reduction="none"))
    return (losses[0] + losses[1]) / 2


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
