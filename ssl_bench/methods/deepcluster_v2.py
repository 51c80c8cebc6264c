"""DeepCluster-v2: predict cluster ids that spherical k-means found among the last epoch's embeddings.

Source: Caron et al. 2020 (SwAV, appendix), arXiv 2006.09882; official code facebookresearch/swav.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.kmeans import nearest_centroid, spherical_kmeans
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.random import permutation, sample_keys
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("deepcluster_v2", family="clustering", version=2, paper="Caron et al. 2020", arxiv="2006.09882")
class DeepClusterV2(SSLMethod):
    """Cross entropy of every view against its image's cluster in each head; prototypes are the centroids.

    A memory holds the latest embedding of every image for the first two views; at the start of an epoch each
    head clusters the rows of one view (head h: view h mod 2) that have been visited. A pass over the data fills the
    memory before the first epoch, as in the official code. Every rank holds the whole memory and clusters it alike,
    where the official code shards both. An image without a target (the last epoch dropped it) takes its nearest
    centroid; the official code ignores it.

    Args:
        backbone: The network to pretrain.
        num_samples: Images of the training split; filled in from the data.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        num_clusters: K of each head; at most the number of images.
        num_heads: Independent clusterings.
        temperature: Temperature of the predictions.
        kmeans_iterations: Rounds of k-means an epoch.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="lars", base_lr=0.6, lars_trust=0.02, lars_clip=True, weight_decay=1e-6,
            warmup_epochs=11, end_lr_factor=1e-3, epochs=1000, global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="swav_multicrop", optimizer="lars", base_lr=0.3, weight_decay=1e-6, exclude_bias_and_norm=False,
            warmup_epochs=10, warmup_start_lr=0.3, end_lr_factor=1e-3, epochs=400, global_batch_size=4096,
            source="official code (lr 4.8 at batch 4096)",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512, "num_clusters": 128}}
    loss_is_sample_mean = True
    min_global_batch = 2
    memory: Tensor
    seen: Tensor
    centroids: Tensor
    clustered_epoch: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_samples: int,
        hidden_dim: int = 2048,
        projection_dim: int = 128,
        num_clusters: int = 3000,
        num_heads: int = 3,
        temperature: float = 0.1,
        kmeans_iterations: int = 10,
    ) -> None:
        super().__init__(backbone)
        if num_clusters > num_samples:
            raise ConfigError(
                f"`num_clusters` must not exceed the training images, got {num_clusters} for {num_samples} "
                "(method deepcluster_v2). Lower num_clusters."
            )
        self.temperature = temperature
        self.kmeans_iterations = kmeans_iterations
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim))
        self.register_buffer("memory", torch.zeros(2, num_samples, projection_dim))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.bool))
        directions = F.normalize(torch.randn(num_heads, num_clusters, projection_dim), dim=2)
        self.register_buffer("centroids", directions)
        self.register_buffer("targets", torch.full((num_heads, num_samples), -1))
        self.register_buffer("clustered_epoch", torch.full((1,), -1))
        self._new_rows: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def on_pretrain_start(self) -> None:
        """Fill the memory with the untrained network's embeddings, batch norm in training mode as later."""
        for batch in self.pass_over_data():
            rows = torch.stack([unit_rows(self.projector(self.backbone(view))) for view in batch.views[:2]], 1)
            self._remember(gather(batch.index), gather(rows))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Mean over heads, views and images."""
        if batch.epoch > int(self.clustered_epoch):
            self._cluster(batch.seed, batch.epoch)
        embeddings = [unit_rows(self.projector(self.backbone(view))) for view in views]  # (B, P) each
        pair = torch.stack([z.detach() for z in embeddings[:2]], 1)  # (B, 2, P)
        self._new_rows.append((gather(batch.index), gather(pair)))
        losses = []
        for head, centroids in enumerate(self.centroids.to(pair.dtype)):
            stored = self.targets[head, batch.index]  # type: ignore[index]
            target = torch.where(stored >= 0, stored, nearest_centroid(pair[:, head % 2], centroids))
            for z in embeddings:
                losses.append(F.cross_entropy(z @ centroids.T / self.temperature, target, reduction="none"))
        return LossOutput(batch_mean(torch.stack(losses).mean(0)))

    @torch.no_grad()
    def _cluster(self, seed: int, epoch: int) -> None:
        rows = self.seen.nonzero()[:, 0]
        num_clusters = self.centroids.shape[1]
        if len(rows) >= num_clusters:
            for head in range(len(self.centroids)):
                points = self.memory[head % 2, rows]
                key = sample_keys(seed, epoch, torch.tensor([head]), "kmeans").to(points.device)
                start = points[permutation(key, len(rows), "start")[0, :num_clusters]]
                centroids, assignment = spherical_kmeans(points, start, iterations=self.kmeans_iterations)
                self.centroids[head] = centroids
                self.targets[head, rows] = assignment  # type: ignore[index,operator]
        self.clustered_epoch.fill_(epoch)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Remember this step's embeddings of the first two views."""
        for index, rows in self._new_rows:
            self._remember(index, rows)
        self._new_rows.clear()

    def _remember(self, index: Tensor, rows: Tensor) -> None:
        self.memory[:, index] = rows.transpose(0, 1).to(self.memory.dtype)
        self.seen[index] = True
