"""VIbCReg: VICReg with whitened projections and a scale-free covariance term.

Source: Lee & Aune 2021, arXiv 2109.00783 (written for time series); for images solo-learn's form is followed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.covariance import hinge_std, off_diagonal_correlation
from ssl_bench.losses.whitening import group_iter_norm
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("vibcreg", family="redundancy-reduction", version=1, paper="Lee & Aune 2021", arxiv="2109.00783")
class VIbCReg(SSLMethod):
    """L = 25 mse + 25 (v + v') + 200 (c + c') on iteratively normalized projections.

    v is VICReg's hinge without the 1/2 of VICReg's code; c is the mean squared off-diagonal correlation over
    all P^2 entries. IterNorm uses the statistics of the global batch (both public codes: of each rank) and
    keeps no running ones, since the projector is dropped after pretraining.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the projector; the last one is the projection.
        iter_norm_group_dim: Features of one whitening group; 0 for no IterNorm.
        iter_norm_iterations: Newton iterations.
        invariance_weight: Weight of the mean squared distance.
        variance_weight: Weight of the hinge.
        covariance_weight: Weight of the correlation term.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="lars", base_lr=0.3, lars_trust=0.02, weight_decay=1e-4, warmup_epochs=10,
            epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
    }  # fmt: skip
    arguments = {"small": {"projector_widths": (512, 512, 512)}}
    min_global_batch = 4

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 2048, 2048),
        iter_norm_group_dim: int = 32,
        iter_norm_iterations: int = 5,
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 200.0,
    ) -> None:
        super().__init__(backbone)
        self.groups = projector_widths[-1] // iter_norm_group_dim if iter_norm_group_dim else 0
        self.iter_norm_iterations = iter_norm_iterations
        self.invariance_weight = invariance_weight
        self.variance_weight = variance_weight
        self.covariance_weight = covariance_weight
        self.projector = mlp(
            backbone.embed_dim, projector_widths, activation=nn.GELU, hidden_bias=True, last_bias=not self.groups
        )
        if self.groups:
            self.gain = nn.Parameter(torch.ones(projector_widths[-1]))
            self.bias = nn.Parameter(torch.zeros(projector_widths[-1]))

    def _project(self, view: Tensor) -> Tensor:
        z = at_least_float32(gather_with_grad(self.projector(self.backbone(view))))  # (N, P)
        if not self.groups:
            return z
        whitened = group_iter_norm(z, groups=self.groups, iterations=self.iter_norm_iterations)
        return whitened * self.gain + self.bias

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z_a, z_b = (self._project(view) for view in views)
        invariance = (z_a - z_b).square().mean()
        variance = hinge_std(z_a) + hinge_std(z_b)
        covariance = off_diagonal_correlation(z_a) + off_diagonal_correlation(z_b)
        total = (
            self.invariance_weight * invariance + self.variance_weight * variance + self.covariance_weight * covariance
        )
        return LossOutput(total, invariance=invariance, variance=variance, covariance=covariance)
