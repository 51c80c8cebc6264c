"""SwAV: predict the balanced cluster assignment of one view from the others.

Source: Caron et al. 2020, arXiv 2006.09882; official code facebookresearch/swav.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather, local_slice
from ssl_bench.losses.clustering import sinkhorn, swapped_cross_entropy
from ssl_bench.losses.common import unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.queue import FeatureQueue
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("swav", family="clustering", version=1, paper="Caron et al. 2020", arxiv="2006.09882")
class SwAV(SSLMethod):
    """Swapped prediction of Sinkhorn codes: the first two views are assigned, every other view predicts.

    L = 1/2 sum_{u in {1,2}} 1/(V-1) sum_{v != u} -mean_i sum_k Q_u log softmax(S_v / t). Codes are balanced
    over the global batch, with older embeddings of the same view once a queue is full. Prototypes are unit
    rows without bias, renormalized after every step (solo-learn uses weight normalization, lightly a bias).

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        num_prototypes: K; about ten times the number of classes is enough on small data.
        temperature: Temperature of the predictions.
        sinkhorn_eps: Entropy regularization of the codes.
        sinkhorn_iterations: Rounds of normalization.
        queue_size: Embeddings kept for each assigned view; 0 for none.
        queue_start_epoch: First epoch in which full queues take part in the codes.
        freeze_prototypes_epochs: Epochs in which the prototypes are not trained.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="lars", base_lr=0.6, lars_trust=0.02, lars_clip=True, weight_decay=1e-6,
            warmup_epochs=10, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="swav_multicrop", optimizer="lars", base_lr=0.6, weight_decay=1e-6, exclude_bias_and_norm=False,
            warmup_epochs=0, end_lr_factor=1e-3, epochs=400, global_batch_size=256, source="official code, batch 256",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"hidden_dim": 512, "num_prototypes": 128, "queue_size": 0, "freeze_prototypes_epochs": 0},
        "cifar": {"queue_start_epoch": 50, "freeze_prototypes_epochs": 2},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 2048,
        projection_dim: int = 128,
        num_prototypes: int = 3000,
        temperature: float = 0.1,
        sinkhorn_eps: float = 0.05,
        sinkhorn_iterations: int = 3,
        queue_size: int = 3840,
        queue_start_epoch: int = 15,
        freeze_prototypes_epochs: int = 1,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.sinkhorn_eps = sinkhorn_eps
        self.sinkhorn_iterations = sinkhorn_iterations
        self.queue_start_epoch = queue_start_epoch
        self.freeze_prototypes_epochs = freeze_prototypes_epochs
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim))
        self.prototypes = nn.Linear(projection_dim, num_prototypes, bias=False)
        self._normalize_prototypes()
        self.queues = nn.ModuleList(FeatureQueue(queue_size, projection_dim) for _ in range(2 if queue_size else 0))
        self._new_rows: list[list[Tensor]] = [[], []]

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Codes of the first two views, predictions of all."""
        embeddings = [unit_rows(self.projector(self.backbone(view))) for view in views]  # (B, P) each
        scores = [self.prototypes(z) for z in embeddings]  # (B, K) each
        total = scores[0].new_zeros(len(batch))
        for u in range(2):
            codes = self._codes(u, embeddings[u], batch.epoch)
            others = [scores[v] for v in range(len(views)) if v != u]
            for score in others:
                total = total + swapped_cross_entropy(codes, score, temperature=self.temperature) / (2 * len(others))
        return LossOutput(batch_mean(total))

    @torch.no_grad()
    def _codes(self, u: int, embedding: Tensor, epoch: int) -> Tensor:
        rows = gather(embedding)  # (N, P)
        own = local_slice(len(embedding), embedding.device)
        candidates = rows
        if self.queues:
            queue = self.queues[u]
            assert isinstance(queue, FeatureQueue)
            if epoch >= self.queue_start_epoch and int(queue.num_enqueued) >= len(queue.rows):
                candidates = torch.cat([rows, queue.rows])
            self._new_rows[u].append(rows)
        scores = candidates @ self.prototypes.weight.T.to(candidates.dtype)
        codes = sinkhorn(scores, eps=self.sinkhorn_eps, iterations=self.sinkhorn_iterations)
        return codes[: len(rows)][own]

    @torch.no_grad()
    def _normalize_prototypes(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the prototypes fixed in the first epochs."""
        if self.current_epoch < self.freeze_prototypes_epochs:
            self.prototypes.weight.grad = None

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Back to unit prototypes; enqueue this step's embeddings."""
        self._normalize_prototypes()
        for queue, rows in zip(self.queues, self._new_rows, strict=False):
            for part in rows:
                queue.enqueue(part)  # type: ignore[operator]
            rows.clear()
