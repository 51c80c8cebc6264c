"""LFR: predict what fixed random networks make of an image, from its embedding; no augmentation.

Source: Sui et al. 2024, arXiv 2310.07756; official code layer6ai-labs/lfr.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ssl_bench.distributed import gather, gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.losses.covariance import redundancy_loss
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.modes import evaluation_mode
from ssl_bench.optim import ParameterGroup
from ssl_bench.records import Batch, LossOutput, Recipe


class RandomProjector(nn.Module):
    """A fixed network: three times (convolution, ReLU, convolution, ReLU, halving by maximum), then linear.

    Convolution weights follow 2 Beta(1/2, 1/2) - 1; two fifths of the linear weights are 0.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels.
        out_dim: Width of the output.
    """

    def __init__(self, in_channels: int, image_size: int, out_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((8, 16), (32, 32), (32, 32)):
            layers += [nn.Conv2d(in_channels, inner, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            in_channels = outer
        linear = nn.Linear(in_channels * (image_size // 8) ** 2, out_dim)
        self.layers = nn.Sequential(*layers, nn.Flatten(), linear).requires_grad_(False)
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.weight.copy_(torch.cos(math.pi * torch.rand_like(layer.weight)))  # the arcsine law
        dropped = torch.randperm(linear.weight.numel())[: round(0.4 * linear.weight.numel())]
        linear.weight.view(-1)[dropped] = 0

    @full_precision
    def forward(self, images: Tensor) -> Tensor:
        """Targets, (B, C, H, W) -> (B, P); in full precision, since activations grow from layer to layer."""
        out: Tensor = self.layers(images)
        return out


@full_precision
def batch_correlation_loss(prediction: Tensor, target: Tensor, *, off_diagonal_weight: float) -> Tensor:
    """sum_i (c_ii - 1)^2 + weight * sum_{i != j} c_ij^2, c_ij = cos(prediction_i, target_j), of rows (N, P)."""
    return redundancy_loss(unit_rows(prediction) @ unit_rows(target).T, off_diagonal_weight=off_diagonal_weight)


@register_method("lfr", family="predictive", version=1, paper="Sui et al. 2024", arxiv="2310.07756")
class LFR(SSLMethod):
    """L = 1/T sum_t [ sum_i (c_ii - 1)^2 + 0.01 sum_{i != j} c_ij^2 ], c_ij = cos(h_t(f(x_i)), g_t(x_j)).

    g_t are random networks, f the backbone, h_t predictors. Sums and not means, over the global batch (official
    code: each device's), and without the code's assertion that |c| < 1. An epoch that trains the backbone alone
    alternates with `predictor_epochs` that train the predictors alone, the backbone in evaluation mode, as in the
    official code; an epoch is one pass over the data in either case, so that most of the budget goes to predictors.
    The code's other mode trains both at once.

    The networks g_t are those of the code for images (Kvasir). Its encoder ends in a linear layer and batch norm of
    width `target_dim`, which are evaluated; here the backbone's own embedding is the encoder's output. The selection of
    diverse g_t by a determinantal point process, which the code uses on tables and time series, is left out.

    Args:
        backbone: The network to pretrain.
        num_projectors: T.
        target_dim: Width of the random projections.
        predictor_hidden_dim: Width of the predictors' hidden layer.
        predictor_epochs: Epochs for the predictors after each epoch for the backbone; 0 trains both at once.
        off_diagonal_weight: Weight of the similarities to other images' targets.
    """

    recipes = {
        "small": Recipe(
            views="eval", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="eval", optimizer="sgd", base_lr=1e-4, lr_scaling="none", weight_decay=5e-4,
            exclude_bias_and_norm=False, warmup_epochs=0, epochs=2400, global_batch_size=256,
            source="official script, Kvasir (400 epochs for the encoder)",
        ),
    }  # fmt: skip
    arguments = {"small": {"target_dim": 512, "predictor_epochs": 1}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_projectors: int = 6,
        target_dim: int = 2048,
        predictor_hidden_dim: int = 256,
        predictor_epochs: int = 5,
        off_diagonal_weight: float = 0.01,
    ) -> None:
        super().__init__(backbone)
        channels, side = backbone.arguments["in_channels"], backbone.arguments["image_size"]
        if side < 8:
            raise ConfigError(
                f"Images must have at least 8 pixels a side, got {side} (method lfr). Take larger images."
            )
        self.predictor_epochs = predictor_epochs
        self.off_diagonal_weight = off_diagonal_weight
        self.projectors = nn.ModuleList(RandomProjector(channels, side, target_dim) for _ in range(num_projectors))
        widths = (predictor_hidden_dim, target_dim)
        self.predictors = nn.ModuleList(mlp(backbone.embed_dim, widths) for _ in range(num_projectors))

    def parameter_groups(self) -> list[ParameterGroup]:
        """The predictors' rate stays constant."""
        named = self.trainable_parameters()
        return [
            ParameterGroup([(name, p) for name, p in named if not name.startswith("predictors.")]),
            ParameterGroup([(name, p) for name, p in named if name.startswith("predictors.")], scheduled=False),
        ]

    def _is_predictor_epoch(self, epoch: int) -> bool:
        return epoch % (self.predictor_epochs + 1) > 0

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        (view,) = views
        resting = torch.zeros((), device=view.device)
        if self._is_predictor_epoch(batch.epoch):
            with torch.no_grad(), evaluation_mode(self.backbone):
                embedding = self.backbone(view)
            # training on several devices waits for a gradient of every parameter
            resting = sum((0 * p.sum() for p in self.backbone.parameters() if p.requires_grad), resting)
        else:
            embedding = self.backbone(view)
        losses = [
            batch_correlation_loss(
                gather_with_grad(predictor(embedding)),
                gather(projector(view)),
                off_diagonal_weight=self.off_diagonal_weight,
            )
            for predictor, projector in zip(self.predictors, self.projectors, strict=True)
        ]
        return LossOutput(torch.stack(losses).mean() + resting)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Only the backbone or only the predictors move."""
        if self.predictor_epochs:
            resting = self.backbone if self._is_predictor_epoch(self.current_epoch) else self.predictors
            for parameter in resting.parameters():
                parameter.grad = None
