"""LDReg: SimCLR whose embeddings are kept from collapsing locally, by their local intrinsic dimension.

Source: Huang et al. 2024, arXiv 2401.10474; official code HanxunH/LDReg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.local_dimension import local_dimension_regularizer
from ssl_bench.methods.base import register_method
from ssl_bench.methods.simclr import SimCLR
from ssl_bench.nn.backbone import Backbone
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("ldreg", family="contrastive", version=1, paper="Huang et al. 2024", arxiv="2401.10474")
class LDReg(SimCLR):
    """L = L_SimCLR - weight * mean_i ln LID_i, over the embeddings of both views: the paper's L1 setting.

    LID_i = mu / (w_k - mu) with mu the mean distance to the k nearest embeddings of the global batch, both views,
    itself left out by its index; the neighbors get no gradient. The paper's estimate and logarithm are followed;
    the code averages only k - 1 distances, and takes |ln LID_i|, which is the same where LID >= 1. Dimensions are
    cut off at 1e-6 and 1e6, so that equal embeddings stay finite. The projector is `simclr`'s with three layers
    (here paper and code have two). A step costs 1.06 times one of VICReg, at 256 images and width 1024.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers; None takes the embedding's.
        projection_dim: Width of the projection.
        temperature: Scale of the similarities.
        num_neighbors: k; at most all other embeddings are taken.
        dimension_weight: Weight of the dimension's term.
        start_epoch: First epoch, from 0, with the dimension's term; before it the loss is SimCLR's.
    """

    recipes = {
        "small": SimCLR.recipes["small"],
        "imagenet": Recipe(
            views="simclr", optimizer="lars", base_lr=1.2, lr_scaling="sqrt", weight_decay=1e-6, warmup_epochs=10,
            epochs=100, global_batch_size=2048, source="official configuration, ImageNet, ResNet-50",
        ),
    }  # fmt: skip
    arguments = {"small": {"temperature": 0.2, "start_epoch": 0}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int | None = None,
        projection_dim: int = 128,
        temperature: float = 0.1,
        num_neighbors: int = 64,
        dimension_weight: float = 0.01,
        start_epoch: int = 10,
    ) -> None:
        super().__init__(backbone, hidden_dim=hidden_dim, projection_dim=projection_dim, temperature=temperature)
        self.num_neighbors = num_neighbors
        self.dimension_weight = dimension_weight
        self.start_epoch = start_epoch

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """SimCLR's loss, and from `start_epoch` on the dimension's term."""
        embeddings = [self.backbone(view) for view in views]
        contrast = self.contrast(embeddings)
        if batch.epoch < self.start_epoch:
            return contrast
        term = local_dimension_regularizer(torch.cat([gather_with_grad(h) for h in embeddings]), k=self.num_neighbors)
        return LossOutput(contrast.total + self.dimension_weight * term, log_dimension=-term, **contrast.terms)
