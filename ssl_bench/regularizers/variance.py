"""VICReg's variance term as a regularizer."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.losses.covariance import hinge_std
from ssl_bench.regularizers.base import Regularizer, register_regularizer


@register_regularizer("variance", version=1, paper="Bardes et al. 2022", arxiv="2105.04906")
class Variance(Regularizer):
    """Sum over views of the mean hinge max(0, floor - std) of every feature (VICReg, eq. 1).

    Args:
        floor: Standard deviation below which a feature is penalized.
    """

    def __init__(self, *, floor: float = 1.0) -> None:
        self.floor = floor

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Sum over views."""
        return torch.stack([hinge_std(z, floor=self.floor) for z in views]).sum()
