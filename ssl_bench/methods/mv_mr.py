"""MV-MR: projections agree across views and depend on fixed descriptors of the image, by distance correlation.

Source: Kinakh et al. 2024, arXiv 2303.12130; official code vkinakh/mv-mr.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import gather, gather_with_grad
from ssl_bench.losses.common import at_least_float32, full_precision
from ssl_bench.losses.covariance import hinge_std
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.descriptors import Scattering, local_std, oriented_gradients
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def centered_distances(x: Tensor, *, floor: float = 1e-4) -> Tensor:
    """Euclidean distances between rows (N, P), less row and column means plus the grand mean, (N, N).

    Squared distances below `floor`, the diagonal among them, count as `floor` and have no gradient.
    """
    x = x - x.mean(0)  # changes no distance, and the inner products lose fewer digits
    squares = x.square().sum(1)
    distances = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=floor).sqrt()
    return distances - distances.mean(0) - distances.mean(1, keepdim=True) + distances.mean()


@full_precision
def distance_correlation(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(mean(A B)) / (mean(A^2) mean(B^2))^(1/4) of centered distances (Szekely et al. 2007), in [0, 1].

    Below 1e-4, and where all distances of one side are below the floor, it is 1e-4 without gradient.
    """
    variances = (a.square().mean() * b.square().mean()).clamp(min=1e-20)
    return ((a * b).mean() * variances.rsqrt()).clamp(min=1e-8).sqrt()


@register_method("mv_mr", family="redundancy-reduction", version=1, paper="Kinakh et al. 2024", arxiv="2303.12130")
class MVMR(SSLMethod):
    """L = mse(z, z0) + hinge(z) + hinge(z0) + 1 - dCor(z, z0) + sum_r [1 - dCor(z, r(x0))].

    z projects an augmented view, z0 the image itself; hinge is the mean of max(0, 1 - std). The descriptors r are
    the pixels of the image and of a second augmented view, its scattering transform, oriented gradients and
    local standard deviation, all weighted 1. The paper maximizes their dependence on z, by its abstract, as
    here (its equations were not at hand); the official code adds +dCor to the loss, which minimizes it
    (`minimize_descriptors`). Statistics are those of the global batch (official code: each device).

    Further departures from the official code: the second augmented view is drawn for each sample (there: one draw a
    batch); oriented gradients are shared between the nearest bins (there: overwritten by scatter); nothing
    is divided by 32, which serves half precision only; the scattering transform is our own. The constants of
    the small and CIFAR augmentations are SimCLR's. Distillation from CLIP is left out.

    Cost of a step with batches of 256 and width 1024 on one CPU core, relative to VICReg: 1.5 times on conv4 with
    28 px and one channel, 3.9 times with 32 px and three channels (the scattering transform), 1.0 on ResNet-18.

    Args:
        backbone: The network to pretrain.
        projector_widths: Widths of the projector; the last one is the projection.
        minimize_descriptors: Add +dCor(z, r(x0)) in place of 1 - dCor, as the official code does.
    """

    recipes = {
        "small": Recipe(
            views="simclr_and_image", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_and_image", optimizer="adam", base_lr=2e-4, lr_scaling="none", weight_decay=1e-6,
            exclude_bias_and_norm=False, warmup_epochs=10, end_lr_factor=0.005, epochs=1000, global_batch_size=512,
            source="official configuration, CIFAR-20",
        ),
        "imagenet": Recipe(
            views="simclr_and_image", optimizer="adam", base_lr=1e-4, lr_scaling="none", weight_decay=1e-6,
            exclude_bias_and_norm=False, warmup_epochs=10, end_lr_factor=0.01, epochs=1000, global_batch_size=256,
            source="official configuration, ImageNet (there: 8 batches of 256 accumulated)",
        ),
    }  # fmt: skip
    arguments = {"small": {"projector_widths": (512, 512, 512)}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        projector_widths: tuple[int, ...] = (8192, 8192, 8192),
        minimize_descriptors: bool = False,
    ) -> None:
        super().__init__(backbone)
        self.minimize_descriptors = minimize_descriptors
        self.projector = mlp(backbone.embed_dim, projector_widths, last_bias=False)
        self.scattering = Scattering()

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        view, other, image = views
        z, z_0 = (at_least_float32(gather_with_grad(self.projector(self.backbone(x)))) for x in (view, image))  # (N, P)
        distances = centered_distances(z)
        agreement = distance_correlation(distances, centered_distances(z_0))
        descriptors = (
            image.flatten(1), other.flatten(1), self.scattering(image), oriented_gradients(image), local_std(image)
        )  # fmt: skip
        dependence = torch.stack([distance_correlation(distances, centered_distances(gather(r))) for r in descriptors])
        invariance = F.mse_loss(z, z_0)
        # the code has no eps; 1e-12 only makes the gradient finite at a constant feature
        variance = hinge_std(z, eps=1e-12) + hinge_std(z_0, eps=1e-12)
        total = invariance + variance + 1 - agreement
        total = total + (dependence if self.minimize_descriptors else 1 - dependence).sum()
        return LossOutput(
            total, invariance=invariance, variance=variance, agreement=agreement, dependence=dependence.mean()
        )
