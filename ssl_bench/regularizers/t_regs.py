"""T-REGS as a regularizer."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.losses.spanning_tree import spanning_tree_entropy, unit_norm_penalty
from ssl_bench.regularizers.base import Regularizer, register_regularizer


@register_regularizer("t_regs", version=1, paper="Mordacq et al. 2025", arxiv="2510.23484")
class TREGS(Regularizer):
    """Sum over views of gamma L_E + lambda L_S: minus the length of the minimum spanning tree over N, and norms near 1.

    The paper adds it to beta times the other loss; with the study's `weight` w, beta is 1 / w. Its coefficients
    beside BYOL and Barlow Twins are not published.

    Args:
        tree_weight: gamma.
        norm_weight: lambda.
    """

    def __init__(self, *, tree_weight: float = 0.2, norm_weight: float = 8e-4) -> None:
        self.tree_weight = tree_weight
        self.norm_weight = norm_weight

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Sum over views."""
        terms = [self.tree_weight * spanning_tree_entropy(z) + self.norm_weight * unit_norm_penalty(z) for z in views]
        return torch.stack(terms).sum()
