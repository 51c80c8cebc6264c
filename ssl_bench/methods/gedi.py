"""GEDI: soft cluster assignments that agree across views and are balanced, optionally with an energy model.

Source: Sansone & Manhaeve 2025, arXiv 2401.00873; code of its first author without the generative term in
emsansone/CPLearn (gedi_nogen).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather, gather_with_grad, global_batch_size, local_slice
from ssl_bench.errors import ConfigError
from ssl_bench.losses.clustering import swapped_cross_entropy
from ssl_bench.losses.common import at_least_float32, full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.modes import evaluation_mode
from ssl_bench.random import normal, sample_keys, uniform
from ssl_bench.records import Batch, LossOutput, Recipe


@full_precision
def prior_cross_entropy(logits: Tensor) -> Tensor:
    """-(1 / C) sum_c ln( (1 / N) sum_i softmax(f_i)_c ) of logits (N, C); ln C, its minimum, for a balanced batch."""
    return math.log(len(logits)) - logits.log_softmax(1).logsumexp(0).mean()


@full_precision
def energy(logits: Tensor) -> Tensor:
    """E = -ln sum_c exp f_c of logits (B, C), (B,)."""
    return -logits.logsumexp(1)


def langevin(
    energy_of: Callable[[Tensor], Tensor], x: Tensor, keys: Tensor, *, steps: int, step_size: float, noise: float
) -> Tensor:
    """`steps` times x <- x - step_size dE/dx + noise n, with n standard normal.

    Args:
        energy_of: Energies (B,) of points.
        x: Where the chains start, (B, ...).
        keys: Random keys of the chains, (B,).
        steps: Steps of each chain.
        step_size: Factor of the gradient.
        noise: Standard deviation of the noise.
    """
    for step in range(steps):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(energy_of(x).sum(), x)
        x = x - step_size * gradient + noise * normal(keys, x[0].numel(), f"step{step}").view_as(x).to(x.dtype)
    return x.detach()


@register_method("gedi", family="clustering", version=1, paper="Sansone & Manhaeve 2025", arxiv="2401.00873")
class GEDI(SSLMethod):
    """L = (C L_prior + b L_inv) / 2 + g L_gen on logits f of C clusters; variant, not verified against the paper.

    L_prior is the cross entropy of the uniform prior to the mean assignment of the global batch, from view 1. L_inv is
    the cross entropy of view 1's assignment to view 2's; gradient flows through both. Weights, temperature, direction
    and projector are those of the authors' code for g = 0 on CIFAR; the paper's own weights were not at hand.

    With g > 0, which that code lacks, L_gen = E(x) - E(x'), E = -ln sum_c exp f_c, for the image x with noise of 0.03
    and negatives x' of 20 Langevin steps (step 1, noise 0.01, on standardized pixels) from a replay memory, a chain in
    twenty restarting from U(-1, 1): settings of JEM (Grathwohl et al. 2020), assumed. Chains are resumed in turn, where
    JEM draws them at random, so that they do not depend on the number of devices. Energies take batch norm's running
    statistics, so that an image's energy does not depend on its batch.

    Args:
        backbone: The network to pretrain.
        num_views: Views of the recipe; filled in. Three, the last one the image, where `generative_weight` > 0.
        hidden_dim: Width of the projector's hidden layer.
        num_clusters: C.
        temperature: Divides the projector's output.
        invariance_weight: b.
        generative_weight: g; 0 leaves the energy model out. Needs a view recipe such as "simclr_and_image".
        num_chains: Size of the replay memory; at least the global batch.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, weight_decay=1e-4, exclude_bias_and_norm=False,
            warmup_epochs=10, warmup_start_lr=3e-5, epochs=1000, global_batch_size=256,
            source="authors' code, gedi_nogen on CIFAR",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512, "num_clusters": 512}}
    chains: Tensor
    visits: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_views: int,
        hidden_dim: int = 2048,
        num_clusters: int = 2048,
        temperature: float = 0.1,
        invariance_weight: float = 0.1,
        generative_weight: float = 0.0,
        num_chains: int = 10000,
    ) -> None:
        super().__init__(backbone)
        if generative_weight and num_views != 3:
            raise ConfigError(
                f"`generative_weight` > 0 needs three views, the last one the image, got {num_views} views (method "
                "gedi). Set recipe.views to simclr_and_image."
            )
        self.temperature = temperature
        self.invariance_weight = invariance_weight
        self.generative_weight = generative_weight
        self.projector = mlp(backbone.embed_dim, (hidden_dim, num_clusters), hidden_bias=True)
        self._new_chains: list[Tensor] = []
        if generative_weight:
            side = backbone.arguments["image_size"]
            self.register_buffer("chains", torch.zeros(num_chains, backbone.arguments["in_channels"], side, side))
            self.register_buffer("visits", torch.zeros(1, dtype=torch.int64))

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.projector(self.backbone(images)) / self.temperature
        return logits

    def _energy(self, images: Tensor) -> Tensor:
        return energy(self._logits(images))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The discriminative terms, and the generative one where asked for."""
        view, other, *image = views
        logits, target = self._logits(view), self._logits(other)
        prior = prior_cross_entropy(gather_with_grad(logits))
        invariance = batch_mean(swapped_cross_entropy(at_least_float32(target).softmax(1), logits, temperature=1.0))
        total = (logits.shape[1] * prior + self.invariance_weight * invariance) / 2
        terms = {"prior": prior, "invariance": invariance}
        if self.generative_weight:
            terms["energy_gap"] = batch_mean(self._energy_gaps(image[0], batch))
            total = total + self.generative_weight * terms["energy_gap"]
        return LossOutput(total, **terms)

    def _energy_gaps(self, images: Tensor, batch: Batch) -> Tensor:
        """E(image) - E(negative), (B,); keeps the negatives."""
        num = len(images)
        visit = self.visits + torch.arange(global_batch_size(num, images.device), device=images.device)
        visit = visit[local_slice(num, images.device)]
        keys = sample_keys(batch.seed, 0, visit, "chain")
        fresh = (uniform(keys, 1, "restart")[:, 0] < 0.05) | (visit < len(self.chains))
        start = 2 * uniform(keys, images[0].numel(), "start").view_as(images) - 1
        start = torch.where(fresh[:, None, None, None], start, self.chains[visit % len(self.chains)]).to(images.dtype)
        noise = normal(batch.keys("image_noise"), images[0].numel(), "noise").view_as(images).to(images.dtype)
        with evaluation_mode(self.backbone, self.projector):
            negatives = langevin(self._energy, start, keys, steps=20, step_size=1.0, noise=0.01)
            energies = self._energy(torch.cat([images + 0.03 * noise, negatives]))
        self._new_chains.append(gather(negatives))
        return energies[:num] - energies[num:]

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Put this step's negatives back into the replay memory."""
        for rows in self._new_chains:
            slots = (self.visits + torch.arange(len(rows), device=rows.device)) % len(self.chains)
            self.chains[slots] = rows.to(self.chains.dtype)
            self.visits += len(rows)
        self._new_chains.clear()
