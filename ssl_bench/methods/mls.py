"""MLS: MoCo v2 plus binary labels, one a queue entry: is it among the nearest neighbors of the image?

Source: Zhu et al. 2023, arXiv 2308.03286; no official code is known.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.losses.contrastive import info_nce_with_queue
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.queue import FeatureQueue
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.records import Batch, LossOutput, Recipe


@torch.no_grad()
@full_precision
def nearest_labels(embedding: Tensor, queue: Tensor, *, num_neighbors: int) -> Tensor:
    """1 for each image's `num_neighbors` most similar rows of the queue, else 0: (B, D), (K, D) -> (B, K)."""
    similarity = embedding @ queue.T
    return torch.zeros_like(similarity).scatter_(1, similarity.topk(num_neighbors, dim=1).indices, 1.0)


@full_precision
def multi_label_loss(query: Tensor, queue: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Binary cross entropy of sigmoid(query . Q_j / t) against label j, averaged over the queue: (B,)."""
    return F.binary_cross_entropy_with_logits(query @ queue.T / temperature, labels, reduction="none").mean(1)


@register_method("mls", family="contrastive", version=1, paper="Zhu et al. 2023", arxiv="2308.03286")
class MLS(SSLMethod):
    """L = InfoNCE(z_1, z_2, Q_z) + weight * BCE(z_1 . Q_z / t, y), with y the k nearest neighbors of g_1 in Q_g.

    View 1 passes the online network (g the embedding, z the unit projection), view 2 the momentum target. Q_g and
    Q_z hold the target's unit embeddings and projections of the same past images in the same order, so neighbors
    found among embeddings label logits of projections. The BCE is a plain mean over the queue: positives get no
    greater weight. One direction only.

    The paper fixes neither the order of update and enqueueing nor the head: as in our MoCo v2, the queues are read
    before this step's keys enter, the target follows the optimizer step, and the head is a linear layer, ReLU and
    a linear layer. Both terms run from the first step, although the first neighbors are among random rows.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the head (no batch norm); the last one is the projection.
        temperature: Scale of the similarities in both terms.
        target_momentum: EMA weight of the target, constant.
        queue_size: Rows of each queue; at least one global batch.
        num_neighbors: Positive labels an image, k.
        multi_label_weight: Weight of the binary cross entropy.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.03, weight_decay=5e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=800, global_batch_size=512, source="MoCo's CIFAR notebook; the paper reports none",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.3, lr_scaling="none", weight_decay=1e-4,
            exclude_bias_and_norm=False, warmup_epochs=0, epochs=400, global_batch_size=256,
            source="paper, COCO (batch size not stated, cosine from memory)",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"projector_widths": (512, 128), "target_momentum": 0.99, "queue_size": 2048, "num_neighbors": 10},
    }
    loss_is_sample_mean = True
    min_global_batch = 1

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 256),
        temperature: float = 0.2,
        target_momentum: float = 0.995,
        queue_size: int = 4096,
        num_neighbors: int = 20,
        multi_label_weight: float = 0.5,
    ) -> None:
        super().__init__(backbone)
        if not 1 <= num_neighbors <= queue_size:
            raise ConfigError(
                f"`num_neighbors` of mls must lie between 1 and its queue_size {queue_size}, got {num_neighbors}. "
                "Correct the method's arguments."
            )
        self.temperature = temperature
        self.target_momentum = target_momentum
        self.num_neighbors = num_neighbors
        self.multi_label_weight = multi_label_weight
        self.projector = mlp(backbone.embed_dim, projector_widths, norm=False)
        self.target_backbone = TargetNetwork(backbone)
        self.target_projector = TargetNetwork(self.projector)
        self.embeddings = FeatureQueue(queue_size, backbone.embed_dim)
        self.projections = FeatureQueue(queue_size, projector_widths[-1])
        self._new_rows: list[tuple[Tensor, Tensor]] = []

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both terms against the queues as they stood before this step."""
        embedding = self.backbone(views[0])
        query = unit_rows(self.projector(embedding))
        target_embedding = self.target_backbone(views[1])
        key = unit_rows(self.target_projector(target_embedding))
        labels = nearest_labels(embedding, self.embeddings.rows, num_neighbors=self.num_neighbors)
        queue = self.projections.rows
        nce = batch_mean(info_nce_with_queue(query, key, queue, temperature=self.temperature))
        multi_label = batch_mean(multi_label_loss(query, queue, labels, temperature=self.temperature))
        self._new_rows.append((gather(unit_rows(target_embedding)), gather(key)))
        return LossOutput(nce + self.multi_label_weight * multi_label, info_nce=nce, multi_label=multi_label)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the target, then enqueue this step's rows in both queues."""
        self.target_backbone.update(self.backbone, self.target_momentum)
        self.target_projector.update(self.projector, self.target_momentum)
        for embeddings, projections in self._new_rows:
            self.embeddings.enqueue(embeddings)
            self.projections.enqueue(projections)
        self._new_rows.clear()
