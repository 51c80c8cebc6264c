"""SimCLR: two views of an image attract, all other images of the global batch repel.

Source: Chen et al. 2020, arXiv 2002.05709, and its official TF2 code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather_with_grad, local_slice
from ssl_bench.losses.contrastive import nt_xent
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("simclr", family="contrastive", version=1, paper="Chen et al. 2020", arxiv="2002.05709")
class SimCLR(SSLMethod):
    """SimCLR with the official code's three-layer projector; negatives come from the whole global batch.

    The paper's projector has two layers; three with batch norm, N(0, 0.01) weights and no bias anywhere, also in
    the last batch norm, are the official code's default. The loss is the paper's mean over all 2N anchors; the
    official code's value is twice that.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers; None takes the embedding's.
        projection_dim: Width of the projection.
        temperature: Scale of the similarities (0.1 in the official code on ImageNet, 0.5 on CIFAR).
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="lars", base_lr=1.0, weight_decay=1e-4, warmup_epochs=10, epochs=1000,
            global_batch_size=512, source="official README, CIFAR-10",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=100,
            global_batch_size=4096, source="paper, section 2.2",
        ),
    }  # fmt: skip
    arguments = {"small": {"temperature": 0.2}, "cifar": {"temperature": 0.5}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int | None = None,
        projection_dim: int = 128,
        temperature: float = 0.1,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        hidden = hidden_dim or backbone.embed_dim
        self.projector = mlp(backbone.embed_dim, (hidden, hidden, projection_dim), last_bias=False, last_norm="no_bias")
        for layer in self.projector:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """NT-Xent over the global batch."""
        return self.contrast([self.backbone(view) for view in views])

    def contrast(self, embeddings: Sequence[Tensor]) -> LossOutput:
        """NT-Xent of the projections of two views' embeddings, (B, D) each."""
        z_a, z_b = (self.projector(h) for h in embeddings)  # (B, P) each
        all_a, all_b = gather_with_grad(z_a), gather_with_grad(z_b)  # (N, P) each
        offset = local_slice(len(z_a), z_a.device).start
        total = batch_mean(nt_xent(z_a, z_b, all_a, all_b, temperature=self.temperature, offset=offset))
        with torch.no_grad():
            alignment = torch.nn.functional.cosine_similarity(z_a, z_b).mean()
        return LossOutput(total, positive_similarity=alignment)
