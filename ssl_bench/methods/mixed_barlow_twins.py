"""Mixed Barlow Twins: Barlow Twins, plus the demand that a mixed image embeds as the mixture.

Source: Bandara et al. 2023, arXiv 2312.02151; official code wgcban/mix-bt.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import gather, gather_with_grad, local_slice
from ssl_bench.losses.common import full_precision
from ssl_bench.losses.covariance import redundancy_loss
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.random import uniform
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method(
    "mixed_barlow_twins", family="redundancy-reduction", version=1, paper="Bandara et al. 2023", arxiv="2312.02151"
)
class MixedBarlowTwins(SSLMethod):
    """L = L_BT + mix_weight * off_diagonal_weight * R on unit projections, as the official small-image code.

    L_BT standardizes with the unbiased deviation and no eps, as that code does (C_ii is at most (N-1)/N). R
    compares the correlations of a mixed view with both views against those that a linear embedding would have:
    |C^MA - G^A|^2 + |C^MB - G^B|^2, gradient through the targets too. Its ImageNet code ramps R up, halves it and
    has another G^B; the README's form is implemented. Mixing share and partner are drawn once for the global
    batch from its samples' keys (the official code: on each rank).

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the projector, without hidden biases; the last one is the projection.
        off_diagonal_weight: Weight of the off-diagonal terms.
        mix_weight: Weight of R over `off_diagonal_weight`.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="adam", base_lr=0.01, weight_decay=1e-6, exclude_bias_and_norm=False,
            warmup_epochs=10, end_lr_factor=1e-3, epochs=2000, global_batch_size=256, source="official code, ResNet-18",
        ),
    }  # fmt: skip
    arguments = {"small": {"projector_widths": (512, 512)}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (512, 1024),
        off_diagonal_weight: float = 1 / 128,
        mix_weight: float = 4.0,
    ) -> None:
        super().__init__(backbone)
        self.off_diagonal_weight = off_diagonal_weight
        self.mix_weight = mix_weight
        self.projector = mlp(backbone.embed_dim, projector_widths)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank; the mixed view is a third forward pass."""
        view_a, view_b = views
        draws = gather(uniform(batch.keys("mix"), 2, "order"))  # (N, 2)
        share, partner = draws[0, 0].to(view_a.dtype), draws[:, 1].argsort()
        own = local_slice(len(batch), view_a.device)
        mixed = share * view_a + (1 - share) * gather(view_b)[partner[own]]
        z_a, z_b, z_m = (
            gather_with_grad(F.normalize(self.projector(self.backbone(view)), dim=1))
            for view in (view_a, view_b, mixed)
        )  # (N, P) each
        twins, mix = mixed_barlow_terms(z_a, z_b, z_m, share, partner, off_diagonal_weight=self.off_diagonal_weight)
        total = twins + self.mix_weight * self.off_diagonal_weight * mix
        return LossOutput(total, barlow_twins=twins, mix=mix)


@full_precision
def mixed_barlow_terms(
    z_a: Tensor, z_b: Tensor, z_m: Tensor, share: Tensor, partner: Tensor, *, off_diagonal_weight: float
) -> tuple[Tensor, Tensor]:
    """Barlow Twins' loss of two views and the mixing term R.

    Args:
        z_a: Projections of view a over the global batch, (N, P).
        z_b: The same of view b.
        z_m: The same of the mixed view.
        share: Share of view a in the mixture, scalar.
        partner: Whose view b was mixed in, (N,).
        off_diagonal_weight: Weight of the off-diagonal terms of the first loss.
    """
    a, b, m = ((z - z.mean(0)) / z.std(0) for z in (z_a, z_b, z_m))
    num = len(a)
    target = share * a + (1 - share) * b[partner]
    twins = redundancy_loss(a.T @ b / num, off_diagonal_weight=off_diagonal_weight)
    mix = ((m - target).T @ a / num).square().sum() + ((m - target).T @ b / num).square().sum()
    return twins, mix
