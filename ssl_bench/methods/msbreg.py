"""MSBReg: BYOL on the centroids of views, a random push of every embedding, and a flat spectrum.

Source: Moon et al. 2023 (WACV), arXiv 2207.03552, known here by its abstract and introduction.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather_with_grad
from ssl_bench.losses.common import at_least_float32, full_precision, unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.random import normal
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def centroid_terms(online: Tensor, target: Tensor, *, centroid: str) -> Tensor:
    """2 - 2 cos of each image to its target centroid, of unit embeddings (B, V, P), (B,).

    "both": of the online centroid. "target": the mean over the single online views.
    """
    center = target.mean(1)
    if centroid == "both":
        return 2 - 2 * F.cosine_similarity(online.mean(1), center)
    return (2 - 2 * F.cosine_similarity(online, center[:, None], dim=-1)).mean(1)


@full_precision
def flat_spectrum(rows: Tensor) -> Tensor:
    """(1/r) sum_j (s_j^2 r / N - 1)^2 of unit rows (N, P), s_j the r = min(N, P) singular values.

    Since sum_j s_j^2 = N, it equals r / N^2 |rows rows^T|_F^2 - 1 and needs no decomposition: 0 where the
    spectrum is flat, r - 1 at collapse.
    """
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    return min(rows.shape) / len(rows) ** 2 * gram.square().sum() - 1


@register_method("msbreg", family="self-distillation", version=1, paper="Moon et al. 2023", arxiv="2207.03552")
class MSBReg(SSLMethod):
    """L = L_M + singular_weight L_S + brownian_weight L_B; variant, not verified against the paper.

    L_M pulls the centroid of an image's online views (BYOL's predictions) to that of its target views. L_B is the
    mean inner product of the embeddings with a random unit vector, drawn for each image and step and shared by
    its views: a random walk on the sphere. The paper's abstract has both forces; that the centroids meet by
    cosine, and one vector an image, are choices, and 0.1 is a third party's. The form of L_S, on the unit
    centroids of the global batch, and its weight are ours. Heads, momentum and recipes are BYOL's. At batch 256
    and width 1024 on one CPU core, loss and gradient take half of the time of VICReg's.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the hidden layers of projector and predictor.
        projection_dim: Width of projection and prediction.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
        singular_weight: Weight of L_S.
        brownian_weight: Weight of L_B.
        centroid: "both" compares centroids, "target" every online view with the target centroid.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=3e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, BYOL's for small data",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=1.0, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-5, warmup_epochs=10, epochs=1000, global_batch_size=256,
            source="solo-learn's BYOL, CIFAR; the paper's own is not known",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 1024, "projection_dim": 256, "target_momentum": 0.9}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 4096,
        projection_dim: int = 256,
        target_momentum: float = 0.99,
        singular_weight: float = 0.1,
        brownian_weight: float = 0.1,
        centroid: Literal["both", "target"] = "both",
    ) -> None:
        super().__init__(backbone)
        self.target_momentum = target_momentum
        self.singular_weight = singular_weight
        self.brownian_weight = brownian_weight
        self.centroid = centroid
        widths = (hidden_dim, projection_dim)
        self.projector = mlp(backbone.embed_dim, widths, hidden_bias=True, last_bias=False)
        self.predictor = mlp(projection_dim, widths, hidden_bias=True, last_bias=False)
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The spectrum is that of the global batch, the other terms are means over images."""
        online = torch.stack([unit_rows(self.predictor(self.projector(self.backbone(view)))) for view in views], 1)
        target = torch.stack([unit_rows(at_least_float32(self.target(view))) for view in views], 1)  # (B, V, P)
        pull = batch_mean(centroid_terms(online, target, centroid=self.centroid))
        direction = unit_rows(normal(batch.keys("brownian"), online.shape[2], "direction", online.dtype))  # (B, P)
        push = batch_mean((online * direction[:, None]).sum(-1).mean(1))
        spectrum = flat_spectrum(gather_with_grad(unit_rows(online.mean(1))))
        total = pull + self.singular_weight * spectrum + self.brownian_weight * push
        return LossOutput(total, centroid=pull, singular=spectrum, brownian=push)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the target."""
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.projector), momentum)
