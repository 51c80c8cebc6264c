"""LDReg as a regularizer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ssl_bench.losses.local_dimension import local_dimension_regularizer
from ssl_bench.regularizers.base import Regularizer, register_regularizer


@register_regularizer("ldreg", version=1, paper="Huang et al. 2024", arxiv="2401.10474")
class LDReg(Regularizer):
    """Minus the mean log local intrinsic dimension of every view's embedding among all views of the global batch.

    The paper weighs it 0.01 beside SimCLR, 0.005 beside BYOL and MoCo, and starts after 10 of 100 epochs (the study's
    `weight` and `start_epoch`). BYOL's momentum features, which the paper's code adds to the neighbors, are left out.

    Args:
        k: Neighbors of each embedding.
        norm: "l1" or "l2", see `local_dimension_regularizer`.
    """

    layer = "embedding"

    def __init__(self, *, k: int = 64, norm: Literal["l1", "l2"] = "l1") -> None:
        self.k = k
        self.norm = norm

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Over all views together."""
        return local_dimension_regularizer(torch.cat(views), k=self.k, norm=self.norm)
