"""MoCo v3: in-batch contrast of predictions with the momentum encoder's keys, both directions.

Source: Chen, Xie & He 2021, arXiv 2104.02057; official code facebookresearch/moco-v3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather, local_slice
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.contrastive import info_nce_in_batch
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("moco_v3", family="contrastive", version=1, paper="Chen et al. 2021", arxiv="2104.02057")
class MoCoV3(SSLMethod):
    """L = ctr(q_1, k_2) + ctr(q_2, k_1), ctr = 2 t * InfoNCE over the keys of the global batch.

    The factor 2 t of paper and code, which some libraries drop, keeps the learning rate independent of
    the temperature. Keys are gathered without gradient; keys of the same view are no negatives.
    Heads follow the paper by backbone kind: two-layer projector and predictor without output norm for a
    CNN; three-layer projector and normalized predictor output for a ViT, whose patch projection is frozen.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the hidden layers of projector and predictor.
        projection_dim: Width of projection and prediction.
        temperature: Scale of the similarities: 1.0 in the code for ResNets, 0.2 for ViTs and on CIFAR.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-6, warmup_epochs=10, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.6, weight_decay=1e-6, warmup_epochs=10, epochs=100,
            global_batch_size=4096, source="official code, ResNet-50 at 100 epochs",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512, "projection_dim": 128}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 4096,
        projection_dim: int = 256,
        temperature: float = 0.2,
        target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.target_momentum = target_momentum
        vit = backbone.kind == "vit"
        hidden = (hidden_dim,) * (2 if vit else 1)
        self.projector = mlp(backbone.embed_dim, (*hidden, projection_dim), last_bias=False, last_norm="no_affine")
        self.predictor = mlp(
            projection_dim, (hidden_dim, projection_dim), last_bias=False, last_norm="no_affine" if vit else False
        )
        if vit:
            backbone.freeze_patch_embedding()  # type: ignore[operator]
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both directions of the in-batch contrast, each times 2 t."""
        queries = [unit_rows(self.predictor(self.projector(self.backbone(view)))) for view in views]
        keys = [gather(unit_rows(self.target(view))) for view in views]  # (N, P) each
        offset = local_slice(len(queries[0]), queries[0].device).start
        directions = [
            info_nce_in_batch(query, key, temperature=self.temperature, offset=offset)
            for query, key in zip(queries, reversed(keys), strict=True)
        ]
        total = 2 * self.temperature * batch_mean(torch.stack(directions).sum(0))
        return LossOutput(total)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the key encoder."""
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.projector), momentum)
