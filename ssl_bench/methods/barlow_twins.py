"""Barlow Twins: the cross-correlation of two views' features approaches the identity.

Source: Zbontar et al. 2021, arXiv 2103.03230; official code facebookresearch/barlowtwins.
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.covariance import cross_correlation, redundancy_loss
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.optim import ParameterGroup
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method(
    "barlow_twins", family="redundancy-reduction", version=1, paper="Zbontar et al. 2021", arxiv="2103.03230"
)
class BarlowTwins(SSLMethod):
    """L = loss_scale * [sum_i (1 - C_ii)^2 + weight * sum_{i != j} C_ij^2].

    Standardization and C are those of the global batch, with the exact gradient; the official code's
    all-reduce leaves 1 / world size of it (set `loss_scale` to that to reproduce it). The variance is the
    biased one of batch norm, as in the code. `loss_scale` is 1 in paper and code; solo-learn uses 0.1 on CIFAR.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the projector, without biases; the last one is the projection.
        off_diagonal_weight: Weight of the off-diagonal terms; grow it when the projection shrinks.
        loss_scale: Factor on the whole loss.
        bias_lr_factor: Learning rate of 1-d parameters over that of the weights (0.0048 / 0.2 on ImageNet).
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=4e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-4, warmup_epochs=10, warmup_start_lr=3e-5, epochs=1000, global_batch_size=256,
            source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.2, weight_decay=1e-6, warmup_epochs=10, epochs=1000,
            end_lr_factor=1e-3, global_batch_size=2048, source="official code",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"projector_widths": (512, 512, 512), "off_diagonal_weight": 0.02},
        "cifar": {"loss_scale": 0.1},
        "imagenet": {"projector_widths": (8192, 8192, 8192), "bias_lr_factor": 0.024},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 2048, 2048),
        off_diagonal_weight: float = 0.0051,
        loss_scale: float = 1.0,
        bias_lr_factor: float = 1.0,
    ) -> None:
        super().__init__(backbone)
        self.off_diagonal_weight = off_diagonal_weight
        self.loss_scale = loss_scale
        self.bias_lr_factor = bias_lr_factor
        self.projector = mlp(backbone.embed_dim, projector_widths, last_bias=False)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Weights, and biases and batch norm with a rate of their own."""
        named = self.trainable_parameters()
        return [
            ParameterGroup([(name, p) for name, p in named if p.ndim > 1]),
            ParameterGroup([(name, p) for name, p in named if p.ndim <= 1], lr_factor=self.bias_lr_factor),
        ]

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z_a, z_b = (at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views)  # (N, P)
        correlation = cross_correlation(z_a, z_b)
        total = self.loss_scale * redundancy_loss(correlation, off_diagonal_weight=self.off_diagonal_weight)
        return LossOutput(total, mean_diagonal=correlation.diagonal().mean())
