"""SimSiam: predict one view's projection from the other, with a stop-gradient and no negatives.

Source: Chen & He 2021, arXiv 2011.10566; official code facebookresearch/simsiam.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import batch_mean
from ssl_bench.losses.common import unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.optim import ParameterGroup
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("simsiam", family="self-distillation", version=1, paper="Chen & He 2021", arxiv="2011.10566")
class SimSiam(SSLMethod):
    """Negative cosine similarity between prediction and detached projection, both directions averaged.

    L = -1/2 mean cos(p_1, sg z_2) - 1/2 mean cos(p_2, sg z_1), in [-1, 1]. The projector ends in a batch
    norm without affine parameters, as in the official code; the predictor's learning rate stays constant
    ("fix-pred-lr"), also as there.

    Args:
        backbone: The network to pretrain.
        projector_layers: Linear layers of the projector: 3 for ImageNet, 2 for CIFAR (paper, appendix D).
        projection_dim: Width of every projector layer's output and of the projection.
        predictor_hidden_dim: Width of the predictor's bottleneck.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=1.2e-2, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=64, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.03, weight_decay=5e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=800, global_batch_size=512, source="paper, appendix D (rate from memory)",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.05, weight_decay=1e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=100, global_batch_size=512, source="official code",
        ),
    }  # fmt: skip
    loss_is_sample_mean = True
    arguments = {
        "small": {"projector_layers": 2, "projection_dim": 512, "predictor_hidden_dim": 128},
        "cifar": {"projector_layers": 2},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_layers: int = 3,
        projection_dim: int = 2048,
        predictor_hidden_dim: int = 512,
    ) -> None:
        super().__init__(backbone)
        # hidden layers are as wide as the embedding in the official ImageNet code, as the projection on CIFAR
        hidden = backbone.embed_dim if projector_layers > 2 else projection_dim
        widths = (hidden,) * (projector_layers - 1) + (projection_dim,)
        self.projector = mlp(backbone.embed_dim, widths, last_bias=False, last_norm="no_affine")
        self.predictor = mlp(projection_dim, (predictor_hidden_dim, projection_dim))

    def parameter_groups(self) -> list[ParameterGroup]:
        """The predictor keeps its learning rate."""
        named = self.trainable_parameters()
        return [
            ParameterGroup([(name, p) for name, p in named if not name.startswith("predictor.")]),
            ParameterGroup([(name, p) for name, p in named if name.startswith("predictor.")], scheduled=False),
        ]

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Symmetrized negative cosine similarity."""
        z_a, z_b = (self.projector(self.backbone(view)) for view in views)  # (B, P) each
        p_a, p_b = self.predictor(z_a), self.predictor(z_b)
        similarity = F.cosine_similarity(p_a, z_b.detach()) + F.cosine_similarity(p_b, z_a.detach())
        std = unit_rows(z_a.detach()).std(0, unbiased=False).mean()
        return LossOutput(-batch_mean(similarity) / 2, projection_std=std)
