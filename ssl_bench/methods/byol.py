"""BYOL: predict the momentum target's projection of the other view; no negatives.

Source: Grill et al. 2020, arXiv 2006.07733; official code google-deepmind/deepmind-research, byol.
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
from ssl_bench.optim import momentum_schedule
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("byol", family="self-distillation", version=1, paper="Grill et al. 2020", arxiv="2006.07733")
class BYOL(SSLMethod):
    """L = mean over images of |p_1 - t_2|^2 + |p_2 - t_1|^2 on unit vectors, in [0, 8].

    The sum of both directions, as in paper and code (libraries that average them halve the gradient). The
    target starts as a copy of the online network, as in solo-learn and lightly; the official code draws it
    independently. Projector and predictor end without bias and without batch norm, as in the code.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the hidden layers of projector and predictor.
        projection_dim: Width of projection and prediction.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=3e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=1.0, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-5, warmup_epochs=10, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=300,
            global_batch_size=4096, source="official configuration, 300 epochs",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 1024, "projection_dim": 256, "target_momentum": 0.9}}
    loss_is_sample_mean = True

    def __init__(
        self, backbone: Backbone, *, hidden_dim: int = 4096, projection_dim: int = 256, target_momentum: float = 0.99
    ) -> None:
        super().__init__(backbone)
        self.target_momentum = target_momentum
        widths = (hidden_dim, projection_dim)
        self.projector = mlp(backbone.embed_dim, widths, hidden_bias=True, last_bias=False)
        self.predictor = mlp(projection_dim, widths, hidden_bias=True, last_bias=False)
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both directions, summed."""
        predictions = [at_least_float32(self.predictor(self.projector(self.backbone(view)))) for view in views]
        targets = [at_least_float32(self.target(view)) for view in reversed(views)]
        cosines = torch.stack([F.cosine_similarity(p, t) for p, t in zip(predictions, targets, strict=True)]).sum(0)
        std = F.normalize(targets[0], dim=1).std(0, unbiased=False).mean()
        return LossOutput(batch_mean(4 - 2 * cosines), target_std=std)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the target."""
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.projector), momentum)
