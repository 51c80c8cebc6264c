"""VSSL: a student's Gaussian posterior meets the prior that a momentum teacher sets from the other view.

Source: Yavuz & Yanikoglu 2025, arXiv 2504.04318; no official code is public.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32, full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.random import normal
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def gaussian_terms(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Expected negative log-likelihood and KL(q || p) of diagonal Gaussians, one value a sample, shape (B,) each.

    With s = ((mu_s - mu_t)^2 + var_s) / var_t: 1/2 sum (s + ln var_t + ln 2 pi) and
    1/2 sum (s + ln var_t - ln var_s - 1).

    Args:
        student: Means and log-variances of q, shape (B, 2 P).
        teacher: The same of p.
    """
    (mu_s, log_s), (mu_t, log_t) = student.chunk(2, 1), teacher.chunk(2, 1)
    scaled = ((mu_s - mu_t).square() + log_s.exp()) / log_t.exp()
    likelihood = (scaled + log_t + math.log(2 * math.pi)).sum(1) / 2
    return likelihood, (scaled + log_t - log_s - 1).sum(1) / 2


@full_precision
def cosine_terms(student: Tensor, teacher: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """-cos(z, mu_t) of a draw z of q, and 1 - cos(mu_s, mu_t) + 1 - cos(var_s, var_t), shape (B,) each."""
    (mu_s, log_s), (mu_t, log_t) = student.chunk(2, 1), teacher.chunk(2, 1)
    draw = mu_s + (log_s / 2).exp() * noise
    divergence = 2 - F.cosine_similarity(mu_s, mu_t) - F.cosine_similarity(log_s.exp(), log_t.exp())
    return -F.cosine_similarity(draw, mu_t), divergence


class GaussianHead(nn.Module):
    """Mean and log-variance of a diagonal Gaussian, (B, D) -> (B, 2 P): means normalized, log-variances clamped."""

    def __init__(self, in_dim: int, hidden_dim: int, latent_dim: int, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.layers = mlp(in_dim, (hidden_dim, 2 * latent_dim))
        self.norm = nn.BatchNorm1d(latent_dim, affine=False)
        self.bounds = bounds

    def forward(self, x: Tensor) -> Tensor:
        """Means, then log-variances."""
        mean, log_variance = self.layers(x).chunk(2, 1)
        return torch.cat([self.norm(mean), log_variance.clamp(*self.bounds)], 1)


@register_method("vssl", family="self-distillation", version=1, paper="Yavuz & Yanikoglu 2025", arxiv="2504.04318")
class VSSL(SSLMethod):
    """L = mean over images and both directions of -E_q ln p(z) + beta KL(q || p).

    Variant, not verified against the paper. q = N(mu_s, var_s) is the student's of one view, p = N(mu_t, var_t)
    the momentum teacher's of the other, of the same shape and without gradient: that is the paper's. The
    likelihood (of the student's latent under the teacher's Gaussian, in closed form), the cosine form, head,
    widths, beta, momentum and recipes are ours, since only the abstract and a summary of the text were at hand.

    Batch norm without gain or shift ends the means: without it they collapse in the Gaussian form (a short run
    gives 65 % under k-NN on validation, no training 76 %). At beta = 1 the best student variance is half the
    teacher's, so that in the Gaussian form both sink to the lower bound; the cosine form leaves their scale free.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the head's hidden layer.
        latent_dim: Features of the Gaussian.
        form: "gaussian", or "cosine": a draw's cosine to mu_t as likelihood, cosines of means and of variances as KL.
        divergence_weight: beta.
        log_variance_bounds: The range that log-variances are clamped to.
        target_momentum: EMA weight at the start; rises to 1 along a half cosine.
    """

    recipes = {
        "small": Recipe(
            views="simclr_asymmetric", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=1.0, lars_trust=0.02, lars_clip=True,
            weight_decay=1e-5, warmup_epochs=10, epochs=1000, global_batch_size=256,
            source="solo-learn's of BYOL, CIFAR; VSSL's own is not known",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512, "latent_dim": 128, "target_momentum": 0.9}}
    loss_is_sample_mean = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 2048,
        latent_dim: int = 256,
        form: str = "gaussian",
        divergence_weight: float = 1.0,
        log_variance_bounds: tuple[float, float] = (-6.0, 2.0),
        target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        if form not in ("gaussian", "cosine"):
            raise ConfigError(
                f"VSSL's `form` must be gaussian or cosine, got {form!r}. Correct the method's arguments."
            )
        self.form = form
        self.divergence_weight = divergence_weight
        self.target_momentum = target_momentum
        self.head = GaussianHead(backbone.embed_dim, hidden_dim, latent_dim, log_variance_bounds)
        self.target = TargetNetwork(nn.Sequential(backbone, self.head))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both directions, averaged."""
        students = [self.head(self.backbone(view)) for view in views]  # (B, 2 P) each
        teachers = [self.target(view) for view in reversed(views)]
        terms = []
        for v, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
            if self.form == "gaussian":
                terms.append(gaussian_terms(student, teacher))
            else:
                noise = normal(batch.keys("latent"), student.shape[1] // 2, f"view{v}")
                terms.append(cosine_terms(student, teacher, noise))
        likelihood, divergence = ((first + second) / 2 for first, second in zip(*terms, strict=True))
        return LossOutput(
            batch_mean(likelihood + self.divergence_weight * divergence),
            negative_log_likelihood=batch_mean(likelihood),
            divergence=batch_mean(divergence),
            teacher_std=(at_least_float32(teachers[0].chunk(2, 1)[1]) / 2).exp().mean(),
        )

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Move the teacher."""
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.head), momentum)
