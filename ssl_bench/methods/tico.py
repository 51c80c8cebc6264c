"""TiCo: views agree, while directions that past batches occupied repel.

Source: Zhu et al. 2022, arXiv 2206.10698; no official code is public, so the formulas are checked
against lightly's loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import gather, gather_with_grad
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.covariance import second_moment, second_moment_contrast
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("tico", family="redundancy-reduction", version=1, paper="Zhu et al. 2022", arxiv="2206.10698")
class TiCo(SSLMethod):
    """L = 1 - mean a.b + rho mean a^T C a, C the running uncentered second moment of a.

    a are unit projections of view 1, b the target's of view 2; C includes this batch and carries no gradient
    (lightly since its fix; an unofficial code differentiates through the batch's share). Total collapse
    shows as a loss of exactly rho. The memory is a saved buffer, updated once an optimizer step.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        contrast_weight: rho.
        memory_momentum: beta, the weight of the past in C.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="sgd", base_lr=0.3, weight_decay=1e-4, warmup_epochs=40, epochs=800,
            global_batch_size=256, source="lightly's Imagenette benchmark; none is published for CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.2, weight_decay=1.5e-6, warmup_epochs=10, epochs=100,
            global_batch_size=256, source="lightly's ImageNet benchmark",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"hidden_dim": 512, "projection_dim": 128},
        "cifar": {"hidden_dim": 1024, "target_momentum": 0.996},
    }
    second_moment: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 4096,
        projection_dim: int = 256,
        contrast_weight: float = 8.0,
        memory_momentum: float = 0.9,
        target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        self.contrast_weight = contrast_weight
        self.memory_momentum = memory_momentum
        self.target_momentum = target_momentum
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim))
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))
        self.register_buffer("second_moment", torch.zeros(projection_dim, projection_dim))
        self._next_moment: Tensor | None = None

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        a = gather_with_grad(unit_rows(self.projector(self.backbone(views[0]))))  # (N, P)
        b = gather(unit_rows(self.target(views[1])))
        moment = torch.lerp(second_moment(a.detach()), self.second_moment.to(a.dtype), self.memory_momentum)
        self._next_moment = moment
        invariance = 1 - (a * b).sum(1).mean()
        contrast = self.contrast_weight * second_moment_contrast(a, moment)
        return LossOutput(invariance + contrast, invariance=invariance, contrast=contrast)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Keep the new second moment and move the target."""
        if self._next_moment is not None:
            self.second_moment.copy_(self._next_moment)
            self._next_moment = None
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.projector), momentum)
