"""NNCLR: the positive of a view is the nearest neighbor of its projection in a queue of past projections.

Source: Dwibedi et al. 2021, arXiv 2104.14548; no official code is public, so solo-learn's reading is followed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather, gather_with_grad, local_slice
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.contrastive import info_nce_in_batch
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.queue import FeatureQueue
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("nnclr", family="contrastive", version=1, paper="Dwibedi et al. 2021", arxiv="2104.14548")
class NNCLR(SSLMethod):
    """L = 1/2 l(nn_1, p_2) + 1/2 l(nn_2, p_1); rows are neighbors, columns predictions of the global batch.

    nn_v is the queue row most similar to the projection z_v (no gradient); p_v predicts from z_v. View
    1's projections are enqueued after the loss. The transposed softmax that the paper's text mentions, and
    the NT-Xent form of lightly's benchmark, are different losses and not used (nor in the pseudo-code).

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers.
        projection_dim: Width of projection and prediction.
        predictor_hidden_dim: Width of the predictor's hidden layer.
        temperature: Scale of the similarities.
        queue_size: Projections kept; at least one global batch.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.4, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-5, warmup_epochs=10, warmup_start_lr=3e-5, epochs=1000, global_batch_size=256,
            source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=1000,
            global_batch_size=4096, source="paper (from memory)",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"hidden_dim": 512, "projection_dim": 128, "predictor_hidden_dim": 512, "queue_size": 1024},
    }

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 2048,
        projection_dim: int = 256,
        predictor_hidden_dim: int = 4096,
        temperature: float = 0.2,
        queue_size: int = 65536,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.projector = mlp(
            backbone.embed_dim, (hidden_dim, hidden_dim, projection_dim), last_bias=False, last_norm=True
        )
        self.predictor = mlp(projection_dim, (predictor_hidden_dim, projection_dim))
        self.queue = FeatureQueue(queue_size, projection_dim)
        self._new_rows: list[Tensor] = []

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both directions, averaged, against the queue as it stood before this step."""
        projections = [self.projector(self.backbone(view)) for view in views]
        predictions = [gather_with_grad(unit_rows(self.predictor(z))) for z in projections]  # (N, P) each
        units = [unit_rows(z.detach()) for z in projections]  # (B, P) each
        neighbors = [self.queue.rows[(z @ self.queue.rows.T).argmax(1)] for z in units]
        offset = local_slice(len(units[0]), units[0].device).start
        directions = [
            info_nce_in_batch(neighbor, prediction, temperature=self.temperature, offset=offset)
            for neighbor, prediction in zip(neighbors, reversed(predictions), strict=True)
        ]
        self._new_rows.append(gather(units[0]))
        similarity = (neighbors[0] * units[0]).sum(1).mean()
        return LossOutput(batch_mean(torch.stack(directions).mean(0)), neighbor_similarity=similarity)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Enqueue this step's projections of view 1."""
        for rows in self._new_rows:
            self.queue.enqueue(rows)
        self._new_rows.clear()
