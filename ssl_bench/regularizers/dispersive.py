"""Dispersive loss: features of a batch repel each other; there are no positive pairs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.regularizers.base import Regularizer, register_regularizer


@full_precision
def log_mean_exp(similarity: Tensor) -> Tensor:
    """Log of the mean of exp over all entries of a matrix, self pairs included, as in the authors' code."""
    return similarity.flatten().logsumexp(0) - math.log(similarity.numel())


@register_regularizer("dispersive", version=1, paper="Wang & He 2025", arxiv="2506.09027")
class Dispersive(Regularizer):
    """Mean over views of ln mean_ij exp(-D_ij / t) over all N^2 ordered pairs, self pairs included.

    "l2": D is the squared distance divided by the width, checked against the authors' code. "cosine": D is minus
    the cosine; that form is from memory, a variant not verified against the paper. Both public codes compute
    it on each rank's batch; here it is that of the global batch. Unlike the paper's generator, whose
    intermediate tokens are flattened, the pooled embedding is regularized.

    Args:
        distance: "l2" or "cosine".
        temperature: t, in units of D.
    """

    layer = "embedding"

    def __init__(self, *, distance: Literal["l2", "cosine"] = "l2", temperature: float = 0.5) -> None:
        self.distance = distance
        self.temperature = temperature

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Mean over views."""
        return torch.stack([log_mean_exp(-self._distances(z) / self.temperature) for z in views]).mean()

    @full_precision
    def _distances(self, z: Tensor) -> Tensor:
        if self.distance == "cosine":
            unit = unit_rows(z)
            return -unit @ unit.T
        norms = z.square().sum(1)
        squared = (norms[:, None] + norms - 2 * z @ z.T).clamp(min=0)  # of the Gram matrix: no root, no NaN gradient
        return squared / z.shape[1]
