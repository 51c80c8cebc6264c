"""TriBYOL: one view predicts two others, each projected by its own momentum target.

Source: Li et al. 2022, arXiv 2206.03012; no official code is public.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.losses.common import at_least_float32
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method(
    "triplet_small_batch", family="self-distillation", version=1, paper="Li et al. 2022", arxiv="2206.03012"
)
class TriBYOL(SSLMethod):
    """L = (1/3) sum over (a, b, c) = (1, 2, 3), (2, 3, 1), (3, 1, 2) of D(p_a, t_b) + D(p_a, t'_c), in [0, 8].

    Variant, not verified against the paper, whose equations were not at hand. D(p, t) = 2 - 2 cos(p, t); p predicts
    from the online network, t and t' are projections of the first and the second target. Chosen here: the cyclic
    symmetrization; both targets start as copies of the online network, and each follows it with its own constant
    momentum, since with equal ones they would stay identical. Two public reimplementations of other authors instead
    add the symmetric pairs (1, 2) of the first target and (1, 3) of the second, and move the targets in turns; a third
    has the assignment (1, 2, 3) alone. Targets normalize with their own batch, as in BYOL.

    Three online and six target passes a step: with batches of 256 and width 1024 on one CPU core 1.8 (conv4, 28 px)
    to 2.5 times (ResNet-18, 32 px) the cost of VICReg.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the hidden layers of projector and predictor.
        projection_dim: Width of projection and prediction.
        target_momentum: EMA weight of the first target, constant.
        second_target_momentum: EMA weight of the second target, constant.
    """

    recipes = {
        "small": Recipe(
            views="simclr_three", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_three", optimizer="sgd", base_lr=0.03, lr_scaling="none", weight_decay=4e-4,
            exclude_bias_and_norm=False, schedule="constant", warmup_epochs=0, epochs=80, global_batch_size=128,
            source="a reimplementation; epochs from memory, the batch size ours",
        ),
    }  # fmt: skip
    arguments = {"small": {"target_momentum": 0.9, "second_target_momentum": 0.8}}
    loss_is_sample_mean = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 512,
        projection_dim: int = 128,
        target_momentum: float = 0.996,
        second_target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        self.momenta = (target_momentum, second_target_momentum)
        widths = (hidden_dim, projection_dim)
        self.projector = mlp(backbone.embed_dim, widths, hidden_bias=True)
        self.predictor = mlp(projection_dim, widths, hidden_bias=True)
        self.targets = nn.ModuleList(TargetNetwork(nn.Sequential(backbone, self.projector)) for _ in self.momenta)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Every view predicts the next by the first target and the one after it by the second."""
        predictions = [at_least_float32(self.predictor(self.projector(self.backbone(view)))) for view in views]
        first, second = ([at_least_float32(target(view)) for view in views] for target in self.targets)
        pairs = [(predictions[v], first[(v + 1) % 3]) for v in range(3)]
        pairs += [(predictions[v], second[(v + 2) % 3]) for v in range(3)]
        cosines = torch.stack([F.cosine_similarity(p, t) for p, t in pairs]).sum(0) / 3
        std = F.normalize(first[0], dim=1).std(0, unbiased=False).mean()
        return LossOutput(batch_mean(4 - 2 * cosines), target_std=std)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move both targets."""
        online = nn.Sequential(self.backbone, self.projector)
        for target, momentum in zip(self.targets, self.momenta, strict=True):
            target.update(online, momentum)  # type: ignore[operator]
