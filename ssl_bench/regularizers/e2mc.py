"""E2MC as a regularizer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ssl_bench.losses.effective_entropy import effective_entropy
from ssl_bench.regularizers.base import Regularizer, register_regularizer


@register_regularizer("e2mc", version=1, paper="Chakraborty et al. 2025", arxiv="2411.15931")
class E2MC(Regularizer):
    """Sum over views of covariance_weight * cov - H of the mapped projection; variant, not verified against the paper.

    Meant for continued pretraining: give the method `init_from` as well. The paper's coefficients are unknown.

    Args:
        map: "sigmoid", or "normal" for methods on the unit sphere, see `effective_entropy`.
        covariance_weight: Weight of the covariance penalty; the mapped features' variance is at most 1/4.
    """

    def __init__(self, *, map: Literal["sigmoid", "normal"] = "sigmoid", covariance_weight: float = 25.0) -> None:
        self.map = map
        self.covariance_weight = covariance_weight

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Sum over views."""
        terms = []
        for z in views:
            entropy, covariance = effective_entropy(z, map=self.map)
            terms.append(self.covariance_weight * covariance - entropy)
        return torch.stack(terms).sum()
