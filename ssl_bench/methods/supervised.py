"""Supervised cross entropy: the upper reference, trained and evaluated on the same path as every method."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import all_reduce_sum_with_grad, world_size
from ssl_bench.errors import DataError
from ssl_bench.losses.common import at_least_float32
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("supervised", family="supervised", version=1)
class Supervised(SSLMethod):
    """Mean cross entropy of a linear head over the labelled images of the global batch.

    The head is dropped afterwards: the table's linear and k-NN figures are those of the embedding.

    Args:
        backbone: The network to train.
        num_classes: Classes; filled in from the data.
        label_smoothing: Share of the target spread over all classes.
    """

    recipes = {
        "small": Recipe(
            views="supervised", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="supervised", optimizer="sgd", base_lr=0.2, weight_decay=5e-4, exclude_bias_and_norm=False,
            warmup_epochs=0, epochs=200, global_batch_size=128, source="kuangliu/pytorch-cifar (lr 0.1 at batch 128)",
        ),
        "imagenet": Recipe(
            views="supervised", optimizer="sgd", base_lr=0.1, weight_decay=1e-4, exclude_bias_and_norm=False,
            schedule="step", milestones=(1 / 3, 2 / 3), warmup_epochs=0, epochs=90, global_batch_size=256,
            source="torchvision reference (from memory)",
        ),
    }  # fmt: skip
    uses_labels = True
    loss_is_sample_mean = True

    def __init__(self, backbone: Backbone, *, num_classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__(backbone)
        self.label_smoothing = label_smoothing
        self.head = nn.Linear(backbone.embed_dim, num_classes)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Cross entropy of the first view; images with label -1 are left out."""
        labels = batch.labels
        assert labels is not None
        logits = at_least_float32(self.head(self.backbone(views[0])))
        total = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum", label_smoothing=self.label_smoothing)
        labelled = (labels >= 0).sum()
        count = all_reduce_sum_with_grad(labelled.to(total.dtype))
        if views[0].device.type == "cpu" and not int(count):
            raise DataError("Supervised training needs labels, got a batch without any (all -1). Use a labelled split.")
        accuracy = ((logits.argmax(1) == labels) & (labels >= 0)).sum() / labelled.clamp(min=1)
        return LossOutput(total * world_size() / count, accuracy=accuracy)
