"""MoCo v2: a query matches the momentum encoder's key of its other view against a queue of older keys.

Source: Chen et al. 2020, arXiv 2003.04297 (v1: He et al. 2020, arXiv 1911.05722); official code
facebookresearch/moco and its CIFAR notebook.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.contrastive import info_nce_with_queue
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.queue import FeatureQueue
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("moco_v2", family="contrastive", version=1, paper="Chen et al. 2020", arxiv="2003.04297")
class MoCoV2(SSLMethod):
    """InfoNCE of (query, key, queue); the queue holds keys of earlier steps only.

    Ours differs from the official code in two named ways: batch norm is synchronized over ranks instead of
    keys being shuffled over devices with per-device statistics (as solo-learn), and the target follows
    after the optimizer step instead of before the next key forward, which is the same sequence.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the head (no batch norm); the last one is the projection.
        temperature: Scale of the similarities: 0.2 for ImageNet, 0.1 in the CIFAR notebook.
        target_momentum: EMA weight of the key encoder, constant.
        queue_size: Keys kept; at least one global batch (two when symmetric).
        symmetric: Also match the second view's query, and enqueue both views' keys; the two losses are
            summed as in the CIFAR notebook.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.03, weight_decay=5e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=800, global_batch_size=512, source="official CIFAR notebook (lr 0.06 at batch 512)",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.03, weight_decay=1e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=200, global_batch_size=256, source="official code",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"projector_widths": (512, 128), "temperature": 0.1, "target_momentum": 0.99, "queue_size": 2048,
                  "symmetric": True},
        "cifar": {"projector_widths": (512, 128), "temperature": 0.1, "target_momentum": 0.99, "queue_size": 4096},
    }  # fmt: skip
    loss_is_sample_mean = True
    min_global_batch = 1

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (2048, 128),
        temperature: float = 0.2,
        target_momentum: float = 0.999,
        queue_size: int = 65536,
        symmetric: bool = False,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.target_momentum = target_momentum
        self.symmetric = symmetric
        self.projector = mlp(backbone.embed_dim, projector_widths, norm=False)
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))
        self.queue = FeatureQueue(queue_size, projector_widths[-1])
        self._new_keys: list[Tensor] = []

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """InfoNCE against the queue as it stood before this step."""
        view_a, view_b = views
        pairs = [(view_a, view_b), (view_b, view_a)] if self.symmetric else [(view_a, view_b)]
        losses = []
        for query_view, key_view in pairs:
            query = unit_rows(self.projector(self.backbone(query_view)))
            key = unit_rows(self.target(key_view))
            losses.append(info_nce_with_queue(query, key, self.queue.rows, temperature=self.temperature))
            self._new_keys.append(gather(key))
        return LossOutput(batch_mean(torch.stack(losses).sum(0)))

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the key encoder, then enqueue this step's keys."""
        self.target.update(nn.Sequential(self.backbone, self.projector), self.target_momentum)
        for keys in self._new_keys:
            self.queue.enqueue(keys)
        self._new_keys.clear()
