"""CARE: SimCLR whose projections turn together when the same augmentation is applied to several images.

Source: Gupta et al. 2024, arXiv 2306.13924; official code Sharut/CARE.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather_with_grad, local_slice
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.losses.contrastive import nt_xent
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def equivariance(z_a: Tensor, z_b: Tensor, all_a: Tensor, all_b: Tensor, *, chunk_size: int, offset: int = 0) -> Tensor:
    """2 sum_{j != i} (<a_i, a_j> - <b_i, b_j>)^2 over the images j of i's chunk: 0 if a rotation turns all a into b.

    Chunks are runs of successive rows of the global batch. The mean over images is the code's loss, and
    2 (n - 1) times the paper's mean over pairs, n images a chunk; the last chunk may be shorter.

    Args:
        z_a: Unit rows of this rank under one augmentation a chunk, shape (B, P).
        z_b: The same images under another one, shape (B, P).
        all_a: The first over the global batch, shape (N, P), gathered with gradient.
        all_b: The second, shape (N, P).
        chunk_size: Images of a chunk.
        offset: Row at which this rank's images start in the gathered tensors.

    Returns:
        One value an image, shape (B,), >= 0.
    """
    own = torch.arange(len(z_a), device=z_a.device)[:, None] + offset
    other = torch.arange(len(all_a), device=z_a.device)
    pairs = (own // chunk_size == other // chunk_size) & (own != other)
    return 2 * ((z_a @ all_a.T - z_b @ all_b.T).square() * pairs).sum(1)


@register_method("care", family="contrastive", version=1, paper="Gupta et al. 2024", arxiv="2306.13924")
class CARE(SSLMethod):
    """L = NT-Xent(z_1, z_2) + weight * mean_i 2 sum_{j in chunk of i} (<a_i, a_j> - <b_i, b_j>)^2.

    z_1, z_2 are two ordinary views; a and b two more of the same images, whose augmentation is one and the same for
    a chunk of successive images. Each chunk draws its own pair, as the paper means it (the code's chunks share
    one), and both terms and the chunks are those of the global batch (the code's: of each rank). Four forward
    passes a step: it costs twice one of SimCLR. On ImageNet the code takes 128 of the images for the second term and
    a projector without batch norm; here all images, and the same projector.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        temperature: Scale of the similarities.
        equivariance_weight: Weight of the second term; the code's values belong to their chunk sizes.
        chunk_size: Images that are compared under one augmentation; divides the views' `shared_by`.
    """

    recipes = {
        "small": Recipe(
            views="care", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="care", optimizer="adam", base_lr=1e-3, lr_scaling="none", weight_decay=1e-6,
            exclude_bias_and_norm=False, schedule="constant", warmup_epochs=0, epochs=400, global_batch_size=256,
            source="official script, CIFAR-10",
        ),
        "imagenet": Recipe(
            views="care", optimizer="sgd", base_lr=0.4, weight_decay=1e-4, exclude_bias_and_norm=False, warmup_epochs=0,
            epochs=200, global_batch_size=256, source="official script, ImageNet-100",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"temperature": 0.2},
        "imagenet": {"hidden_dim": 2048, "temperature": 0.2, "equivariance_weight": 0.005, "chunk_size": 8},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 512,
        projection_dim: int = 128,
        temperature: float = 0.5,
        equivariance_weight: float = 0.03,
        chunk_size: int = 16,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.equivariance_weight = equivariance_weight
        self.chunk_size = chunk_size
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim))

    def on_pretrain_start(self) -> None:
        """Refuse views that the images of a chunk do not share."""
        if self._trainer is None:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        shared = [spec.shared_by for spec in data.view_pipeline.specs]
        if len(shared) != 4 or any(number % self.chunk_size for number in shared[2:]):
            raise ConfigError(
                f"care needs four views, the last two with a `shared_by` that its `chunk_size` of {self.chunk_size} "
                f"divides, got {shared} (views {data.view_pipeline.name!r}). Take the views `care` and set `shared_by`."
            )

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both terms over the global batch."""
        z_1, z_2, z_a, z_b = (unit_rows(self.projector(self.backbone(view))) for view in views)  # (B, P) each
        all_1, all_2, all_a, all_b = (gather_with_grad(z) for z in (z_1, z_2, z_a, z_b))  # (N, P) each
        offset = local_slice(len(z_1), z_1.device).start
        contrast = batch_mean(nt_xent(z_1, z_2, all_1, all_2, temperature=self.temperature, offset=offset))
        term = batch_mean(equivariance(z_a, z_b, all_a, all_b, chunk_size=self.chunk_size, offset=offset))
        return LossOutput(contrast + self.equivariance_weight * term, contrast=contrast, equivariance=term)
