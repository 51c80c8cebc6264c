"""SSOLE: views of an image span little, images of a batch span much, both measured by nuclear norms.

Source: Huang et al. 2025 (ICLR); official code husthuaan/ssole. The paper's text was not at hand, the code is followed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe

NEGLIGIBLE = 1e-12  # squared singular values below this share of the largest count as 0, without gradient
STEEPEST = 2e-6  # below this, 1 - (R / N)^2 has no gradient: the arcsine's slope is infinite at R = N


@full_precision
def nuclear_norm(x: Tensor) -> Tensor:
    """Sum of singular values of matrices (..., n, d), from the eigenvalues of the smaller Gram matrix in float64.

    The gradient is that of the positive singular values (U V^T): finite at repeated and at vanishing ones.
    """
    wide = x.double()
    gram = wide @ wide.mT if x.shape[-2] <= x.shape[-1] else wide.mT @ wide
    squares = torch.linalg.eigvalsh(gram)
    positive = squares > NEGLIGIBLE * squares[..., -1:]
    values: Tensor = torch.where(positive, squares, 1).sqrt() * positive
    return values.sum(-1).to(x.dtype)


@full_precision
def low_rank_terms(z: Tensor) -> Tensor:
    """r^2 / (V - 1)^2 of each image, r the nuclear norm of its unit views (B, V, P) less their detached mean, (B,)."""
    wide = z.double()  # the deviations sum to 0: in float32 rounding would give that direction a gradient
    terms: Tensor = nuclear_norm(wide - wide.mean(1, keepdim=True).detach()).square() / (z.shape[1] - 1) ** 2
    return terms.to(z.dtype)


@full_precision
def high_rank_term(z: Tensor, *, mix: float) -> Tensor:
    """Weighted mean, mix c1 + (1 - mix) c2, of unit rows (N, P), from 0 at orthonormal rows to 1 at equal ones.

    With R the nuclear norm, c1 = (N^2 / R^2 - 1) / (N - 1) and c2 = (N cos^2(b) - 1) / (N - 1),
    b = arcsin(R / N) - arcsin(1 / sqrt N).
    """
    num = len(z)
    ratio: Tensor = nuclear_norm(z) / num
    gap = 1 - ratio.square()
    cosine = torch.where(gap > STEEPEST, gap, gap.detach().clamp(min=0)).sqrt()  # of arcsin(R / N)
    c1 = (1 / ratio.square() - 1) / (num - 1)
    c2 = (num * (cosine * (1 - 1 / num) ** 0.5 + ratio / num**0.5).square() - 1) / (num - 1)
    term: Tensor = mix * c1 + (1 - mix) * c2
    return term


@register_method("ssole", family="redundancy-reduction", version=1, paper="Huang et al. 2025")
class SSOLE(SSLMethod):
    """L = mean_i r_i^2 / (V - 1)^2 + lambda mean_v h(Z_v), of unit projections; r and h rest on nuclear norms.

    r_i is the nuclear norm of image i's views less their detached mean, h a surrogate of the mean squared cosine
    between images of the global batch, for each view by itself. The code lets the arcsine's slope overflow at
    exactly orthonormal images; here it is cut off close to them. At batch 256 and width 1024 on one CPU core,
    loss and gradient take 0.9 of the time of VICReg's with two views, 1.9 with four (for each an eigenvalue problem
    of order N).

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers, without batch norm.
        projection_dim: Width of the projection; at least the global batch, for images can only then be orthogonal.
        high_rank_weight: lambda.
        mix: Share of the ratio form in h; the rest is the angular form.
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
    arguments = {"small": {"hidden_dim": 512, "projection_dim": 512}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 4096,
        projection_dim: int = 4096,
        high_rank_weight: float = 0.6,
        mix: float = 0.5,
    ) -> None:
        super().__init__(backbone)
        self.high_rank_weight = high_rank_weight
        self.mix = mix
        self.projector = mlp(backbone.embed_dim, (hidden_dim, hidden_dim, projection_dim), norm=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The low-rank term is a mean over images, the high-rank term the same on every rank."""
        if len(views) < 2:
            raise ConfigError(f"`ssole` needs at least two views, got {len(views)}. Choose another view recipe.")
        z = torch.stack([unit_rows(self.projector(self.backbone(view))) for view in views], 1)  # (B, V, P)
        low = batch_mean(low_rank_terms(z))
        everything = gather_with_grad(z)  # (N, V, P)
        high = torch.stack([high_rank_term(rows, mix=self.mix) for rows in everything.unbind(1)]).mean()
        return LossOutput(low + self.high_rank_weight * high, low_rank=low, high_rank=high)
