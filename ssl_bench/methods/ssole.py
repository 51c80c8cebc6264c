"""SSOLE: the views of an image have low rank, the images of a batch have high rank, by nuclear norms.

Source: Huang, Qiu & Sapiro 2025 (ICLR, OpenReview zBgiCWCxJB); the paper's text was not at hand, the official
code husthuaan/ssole is followed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


def nuclear_norm(x: Tensor) -> Tensor:
    """Sum of the singular values of each matrix (..., N, P) in float64, from the eigenvalues of its (N, N) Gram matrix.

    Singular values that are zero up to rounding get no gradient; a decomposition of the matrix itself would send
    them along an arbitrary direction.
    """
    x = x.double()
    eigenvalues = torch.linalg.eigvalsh(x @ x.mT)  # (..., N), ascending
    floor = eigenvalues[..., -1:] * (torch.finfo(x.dtype).eps * x.shape[-2])
    positive = eigenvalues > floor
    norm: Tensor = torch.where(positive, eigenvalues, 1.0).sqrt().mul(positive).sum(-1)
    return norm


@full_precision
def low_rank_loss(z: Tensor) -> Tensor:
    """Squared nuclear norm of each image's views around their fixed mean, over (K - 1)^2: (B, K, P) to (B,)."""
    deviations = z.double() - z.detach().double().mean(1, keepdim=True)
    return (nuclear_norm(deviations) / (z.shape[1] - 1)).square().to(z.dtype)


@full_precision
def high_rank_loss(z: Tensor, *, mix: float) -> Tensor:
    """Spread of N unit rows, mix c_1 + (1 - mix) c_2: 1 if all are equal, 0 if orthonormal; (..., N, P) to (...).

    With x the nuclear norm over N, c_1 = (1 / x^2 - 1) / (N - 1), and c_2 = (N cos^2 b - 1) / (N - 1) for
    b = arcsin x - arcsin(1 / sqrt N). x is kept below 1 - 1e-6, since the arcsine has an infinite slope at 1.
    """
    num = z.shape[-2]
    x = (nuclear_norm(z) / num).clamp(max=1 - 1e-6)
    c_1 = (x.pow(-2) - 1) / (num - 1)
    c_2 = (num * torch.cos(torch.asin(x) - math.asin(num**-0.5)).square() - 1) / (num - 1)
    return (mix * c_1 + (1 - mix) * c_2).to(z.dtype)


@register_method("ssole", family="other", version=1, paper="Huang et al. 2025")
class SSOLE(SSLMethod):
    """L = mean over images of the low-rank loss + lambda mean over views of the high-rank loss, on unit projections.

    The low-rank loss is of the K views of an image, the high-rank loss of one view of the whole global batch;
    the projection should be at least as wide as that batch. With batches of 256 and width 1024 on one CPU core,
    loss and gradient of four views take COST times VICReg's of two views, half of it for the eigenvalues.

    Args:
        backbone: The network to pretrain.
        num_views: K, at least 2; taken from the view recipe.
        projector_widths: Widths of the projector, which has no batch norm; the last one is the projection.
        high_rank_weight: lambda.
        mix: Share of c_1 in the high-rank loss.
    """

    recipes = {
        "small": Recipe(
            views="ssole", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "imagenet": Recipe(
            views="ssole", optimizer="sgd", base_lr=2.0, lr_scaling="none", weight_decay=1e-5, warmup_epochs=0,
            end_lr_factor=1e-3, epochs=100, global_batch_size=128, source="official configuration, ImageNet-100",
        ),
    }  # fmt: skip
    arguments = {"small": {"projector_widths": (512, 512, 512)}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_views: int,
        projector_widths: tuple[int, ...] = (4096, 4096, 4096),
        high_rank_weight: float = 0.6,
        mix: float = 0.5,
    ) -> None:
        super().__init__(backbone)
        if num_views < 2:
            raise ConfigError(
                f"ssole compares views of an image and needs at least 2, got {num_views}. "
                'Choose views "ssole" in its recipe.'
            )
        self.high_rank_weight = high_rank_weight
        self.mix = mix
        self.projector = mlp(backbone.embed_dim, projector_widths, norm=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """All views pass the network together."""
        z = unit_rows(self.projector(self.backbone(torch.cat(views))))  # (K B, P)
        z = torch.stack(z.split(len(batch)), 1)  # (B, K, P)
        low = batch_mean(low_rank_loss(z))
        high = high_rank_loss(gather_with_grad(z).transpose(0, 1), mix=self.mix).mean()
        return LossOutput(low + self.high_rank_weight * high, low_rank=low, high_rank=high)
