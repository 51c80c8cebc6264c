"""INTL: iterative normalization with a loss on the trace of the whitened output.

Source: Weng et al. 2024, arXiv 2305.16789; official code winci-ai/INTL.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.losses.common import at_least_float32, unit_rows
from ssl_bench.losses.whitening import iterative_whiten, trace_loss
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("intl", family="whitening", version=1, paper="Weng et al. 2024", arxiv="2305.16789")
class INTL(SSLMethod):
    """L = mean over views i > 0 of 2 - 2 mean cos(Y_i, Y_0) + beta (TL(Y_i) + TL(Y_0)).

    Y are projections of the global batch after T Newton iterations of whitening, TL the trace loss; both
    branches have gradient. beta = 0.01 (log2 n - 3), n the global batch on axis 0 and the projection's width
    on axis 1, as in the official code. A large constant loss is normal: T iterations do not whiten fully.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers.
        projection_dim: Width of the projection.
        iterations: Newton iterations T.
        axis: 0 decorrelates samples over features (the code's default), 1 features over samples.
        trace_weight: beta; None for the rule above.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="sgd", base_lr=0.3, weight_decay=1e-4, exclude_bias_and_norm=False,
            warmup_epochs=2, end_lr_factor=1e-3, epochs=1000, global_batch_size=256, source="official code, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="sgd", base_lr=0.5, weight_decay=1e-5, warmup_epochs=2,
            end_lr_factor=1e-3, epochs=100, global_batch_size=256, source="official code, ImageNet at 100 epochs",
        ),
    }  # fmt: skip
    arguments = {
        "small": {"hidden_dim": 512, "projection_dim": 512},
        "imagenet": {"hidden_dim": 8192, "projection_dim": 8192},
    }
    min_global_batch = 4

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 2048,
        projection_dim: int = 2048,
        iterations: int = 4,
        axis: int = 0,
        trace_weight: float | None = None,
    ) -> None:
        super().__init__(backbone)
        self.iterations = iterations
        self.axis = axis
        self.trace_weight = trace_weight
        self.projector = mlp(backbone.embed_dim, (hidden_dim, hidden_dim, projection_dim))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank; view 0 is the common partner."""
        projections = [at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views]
        weight = self.trace_weight
        if weight is None:
            weight = 0.01 * (math.log2(projections[0].shape[self.axis]) - 3)
        whitened = [iterative_whiten(z, iterations=self.iterations, axis=self.axis) for z in projections]
        traces = [trace_loss(y, axis=self.axis) for y in whitened]
        units = [unit_rows(y) for y in whitened]
        num = len(views) - 1
        distance = torch.stack([2 - 2 * (unit * units[0]).sum(1).mean() for unit in units[1:]]).mean()
        trace = sum(traces[1:]) / num + traces[0]
        return LossOutput(distance + weight * trace, distance=distance, trace=trace)
