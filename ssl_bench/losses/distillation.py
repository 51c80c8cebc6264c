"""Self-distillation over prototypes.

Shapes: B samples of this rank, K prototypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision


@full_precision
def distillation_cross_entropy(
    student: Sequence[Tensor], teacher: Sequence[Tensor], *, student_temperature: float
) -> Tensor:
    """Mean over pairs (u, v), u != v, of -sum_k P_u log softmax(s_v / t)_k, one value a sample, (B,).

    Source: Caron et al. 2021 (DINO), eqs. 1-3, arXiv 2104.14294, and official code: the teacher's views come
    first among the student's, and pairs of the same view are left out.

    Args:
        student: Logits of every view, (B, K) each.
        teacher: Probabilities of the global views, without gradient, (B, K) each.
        student_temperature: t.
    """
    log_q = [(logits / student_temperature).log_softmax(1) for logits in student]
    pairs = [(u, v) for u in range(len(teacher)) for v in range(len(student)) if u != v]
    total = torch.stack([-(teacher[u] * log_q[v]).sum(1) for u, v in pairs])
    return total.mean(0)
