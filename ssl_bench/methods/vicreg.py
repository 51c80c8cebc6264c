"""VICReg: views agree, every feature keeps its variance, features decorrelate.

Source: Bardes et al. 2022, arXiv 2105.04906; official code facebookresearch/vicreg.
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.covariance import covariance_penalty, hinge_std
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("vicreg", family="redundancy-reduction", version=1, paper="Bardes et al. 2022", arxiv="2105.04906")
class VICReg(SSLMethod):
    """L = 25 mse + 25 (v + v') / 2 + (c + c').

    The variance term is averaged over the two views, as in the authors' code; the paper's equation sums it
    (and solo-learn follows the paper: an effective weight of 50). The invariance term is a mean over all N P
    entries, again as in the code. Variance and covariance are those of the global batch. On ImageNet the views
    are the code's asymmetric pair, not the paper's symmetric one, as the authors advise.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the expander; the last one is the projection (8192 three times on
            ImageNet).
        invariance_weight: Weight of the mean squared distance.
        variance_weight: Weight of the hinge on the standard deviation.
        covariance_weight: Weight of the off-diagonal covariance.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="vicreg_symmetric", optimizer="lars", base_lr=0.3, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-4, warmup_epochs=10, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=100,
            end_lr_factor=1e-3, global_batch_size=512, source="official README, 100 epochs",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"projector_widths": (512, 512, 512)},
        "imagenet": {"projector_widths": (8192, 8192, 8192)},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 2048, 2048),
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
    ) -> None:
        super().__init__(backbone)
        self.invariance_weight = invariance_weight
        self.variance_weight = variance_weight
        self.covariance_weight = covariance_weight
        self.projector = mlp(backbone.embed_dim, projector_widths, hidden_bias=True, last_bias=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        return self.criterion(*self.projections(views))

    def projections(self, views: tuple[Tensor, ...]) -> list[Tensor]:
        """Projections of every view over the global batch, (N, P) each."""
        return [at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views]

    def criterion(self, z_a: Tensor, z_b: Tensor) -> LossOutput:
        """The loss of two views' projections, (N, P) each."""
        invariance = (z_a - z_b).square().mean()
        variance = (hinge_std(z_a) + hinge_std(z_b)) / 2
        covariance = covariance_penalty(z_a) + covariance_penalty(z_b)
        total = (
            self.invariance_weight * invariance + self.variance_weight * variance + self.covariance_weight * covariance
        )
        return LossOutput(total, invariance=invariance, variance=variance, covariance=covariance)
