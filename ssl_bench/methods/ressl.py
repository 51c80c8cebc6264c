"""ReSSL: a strong view's similarities to a queue follow those of the weakly augmented view.

Source: Zheng et al. 2021, arXiv 2107.09282; official code KyleZheng1997/ReSSL.
"""

from __future__ import annotations

from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.relational import relational_cross_entropy
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.queue import FeatureQueue
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("ressl", family="self-distillation", version=1, paper="Zheng et al. 2021", arxiv="2107.09282")
class ReSSL(SSLMethod):
    """Cross entropy between two distributions over the queue; one direction, weak view as target.

    The queue is the one before this step, so a sample's own key is no reference. Batch norm is
    synchronized over ranks (as solo-learn) where the official code shuffles keys over devices.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the head (no batch norm); the last one is the projection.
        query_temperature: Temperature of the strong view's distribution.
        key_temperature: Temperature of the weak view's distribution; must be lower.
        target_momentum: EMA weight of the key encoder, constant.
        queue_size: Keys kept; at least one global batch.
    """

    recipes = {
        "small": Recipe(
            views="strong_weak", optimizer="adam", base_lr=1.2e-2, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=64, source="ours, a few settings tried on validation",
        ),
        "cifar": Recipe(
            views="strong_weak", optimizer="sgd", base_lr=0.05, weight_decay=1e-4, warmup_epochs=10, epochs=1000,
            global_batch_size=256, source="solo-learn, CIFAR",
        ),
        "imagenet": Recipe(
            views="strong_weak", optimizer="sgd", base_lr=0.05, weight_decay=1e-4, warmup_epochs=5, epochs=200,
            global_batch_size=256, source="official code",
        ),
    }  # fmt: skip
    arguments = {"small": {"projector_widths": (512, 128), "target_momentum": 0.99, "queue_size": 2048}}
    loss_is_sample_mean = True
    min_global_batch = 1

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (4096, 512),
        query_temperature: float = 0.1,
        key_temperature: float = 0.04,
        target_momentum: float = 0.999,
        queue_size: int = 131072,
    ) -> None:
        super().__init__(backbone)
        self.query_temperature = query_temperature
        self.key_temperature = key_temperature
        self.target_momentum = target_momentum
        self.projector = mlp(backbone.embed_dim, projector_widths, norm=False)
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))
        self.queue = FeatureQueue(queue_size, projector_widths[-1])
        self._new_keys: list[Tensor] = []

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """View 0 is the strong one, view 1 the weak one."""
        strong, weak = views
        query = unit_rows(self.projector(self.backbone(strong)))
        key = unit_rows(self.target(weak))
        losses = relational_cross_entropy(
            query,
            key,
            self.queue.rows,
            query_temperature=self.query_temperature,
            key_temperature=self.key_temperature,
        )
        self._new_keys.append(gather(key))
        return LossOutput(batch_mean(losses))

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the key encoder, then enqueue this step's keys."""
        self.target.update(nn.Sequential(self.backbone, self.projector), self.target_momentum)
        for keys in self._new_keys:
            self.queue.enqueue(keys)
        self._new_keys.clear()
