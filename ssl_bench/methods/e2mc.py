"""E2MC: VICReg whose projections, mapped into the unit cube, have marginals of high entropy that do not correlate.

Source: Chakraborty et al. 2025, arXiv 2411.15931; no official code is public.
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.losses.effective_entropy import effective_entropy
from ssl_bench.methods.base import register_method
from ssl_bench.methods.vicreg import VICReg
from ssl_bench.nn.backbone import Backbone
from ssl_bench.records import Batch, LossOutput


@register_method("e2mc", family="redundancy-reduction", version=1, paper="Chakraborty et al. 2025", arxiv="2411.15931")
class E2MC(VICReg):
    """L = L_VICReg - w_H (H + H') + w_C (c + c'), H and c the effective entropy's two terms of each view.

    A variant, not verified against the paper: the two terms follow a public transcription of its pseudo-code
    (sigmoid map, m-spacings, covariance after the map); both weights, that the whole of VICReg's loss stays, and
    that order statistics are those of the global batch are ours. The paper continues a finished VICReg run for
    a few epochs with this loss; trained from scratch, it is the same loss from the first step on. A step costs
    1.06 times one of VICReg at 256 images and width 1024 on a CPU, where the sort dominates.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the expander; the last one is the projection.
        invariance_weight: VICReg's weight of the mean squared distance.
        variance_weight: VICReg's weight of the hinge on the standard deviation.
        covariance_weight: VICReg's weight of the off-diagonal covariance.
        entropy_weight: w_H.
        mapped_covariance_weight: w_C; values in the unit cube have variances of at most 1/4.
    """

    recipes = {"small": VICReg.recipes["small"]}
    arguments = {"small": VICReg.arguments["small"]}

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (8192, 8192, 8192),
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
        entropy_weight: float = 1.0,
        mapped_covariance_weight: float = 25.0,
    ) -> None:
        super().__init__(
            backbone,
            projector_widths=projector_widths,
            invariance_weight=invariance_weight,
            variance_weight=variance_weight,
            covariance_weight=covariance_weight,
        )
        self.entropy_weight = entropy_weight
        self.mapped_covariance_weight = mapped_covariance_weight

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z_a, z_b = self.projections(views)
        base = self.criterion(z_a, z_b)
        entropies, covariances = zip(*(effective_entropy(z, map="sigmoid") for z in (z_a, z_b)), strict=True)
        entropy, covariance = sum(entropies), sum(covariances)
        total = base.total - self.entropy_weight * entropy + self.mapped_covariance_weight * covariance
        return LossOutput(total, entropy=entropy, mapped_covariance=covariance, **base.terms)
