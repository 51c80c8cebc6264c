"""ER: maximize a bound on the views' mutual information, an entropy plus a reconstruction.

Source: Rodríguez-Gálvez et al. 2023, arXiv 2307.10907; official code apple/ml-entropy-reconstruction (the two
estimators only).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_bench.distributed import gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32, full_precision, unit_rows
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe

EPS = 1e-7  # inside the logarithms of the discrete support, as in the code


def log_normalizer(kappa: float, dim: int) -> float:
    """-ln C_d(kappa) of the von Mises-Fisher density, from the power series of the Bessel function in log space.

    The code adds 1e-7 to the Bessel value first, which hides it from a few dozen features on.
    """
    order = dim / 2 - 1
    terms = [
        (2 * m + order) * math.log(kappa / 2) - math.lgamma(m + 1) - math.lgamma(m + order + 1)
        for m in range(2 * math.ceil(kappa) + 50)  # the largest term is before kappa / 2
    ]
    log_bessel = max(terms) + math.log(math.fsum(math.exp(term - max(terms)) for term in terms))
    return dim / 2 * math.log(2 * math.pi) - order * math.log(kappa) + log_bessel


@full_precision
def sphere_entropy(z: Tensor, *, kappa: float, estimator: str) -> Tensor:
    """Kernel estimate of the entropy of unit rows (N, P), up to the kernel's log normalizer.

    With l_i = ln N - logsumexp_j kappa z_i.z_j (j = i included): the mean of l ("joe"), or its mean under the
    densities, weights softmax(-l) with gradient ("plug_in").
    """
    negative_log = math.log(len(z)) - torch.logsumexp(kappa * z @ z.T, 1)
    return negative_log.mean() if estimator == "joe" else ((-negative_log).softmax(0) * negative_log).sum()


@full_precision
def discrete_entropy(p: Tensor) -> Tensor:
    """Entropy of the mean of distributions, rows (N, P)."""
    mean = p.mean(0)
    return -(mean * (mean + EPS).log()).sum()


@full_precision
def discrete_reconstruction(p_a: Tensor, p_b: Tensor) -> Tensor:
    """Cross entropy of distributions, rows (N, P), averaged over both directions."""
    return -(p_a * (p_b + EPS).log() + p_b * (p_a + EPS).log()).sum(1).mean() / 2


@register_method(
    "entropy_reconstruction",
    family="information",
    version=1,
    paper="Rodríguez-Gálvez et al. 2023",
    arxiv="2307.10907",
)
class EntropyReconstruction(SSLMethod):
    """L = rec(Z_1, Z_2) - (H(Z_1) + H(Z_2)) / 2, in place of SimCLR's loss.

    On the sphere rec is the mean of -kappa z_1.z_2 + c and H the kernel entropy, c the log normalizer of the von
    Mises-Fisher kernel. c cancels in L (it is only logged), so L + ln N is InfoNCE with temperature 1 / kappa whose
    negatives are of the anchor's own view, self included. L lies in [-ln N, 0] where the views agree, and is 0 at
    collapse. On the discrete support the projection's softmax replaces the unit vector.

    The code states the two estimators, kappa = 10 and the plug-in estimator as default; weights (here 1), the
    average over both directions, projector and recipes are ours: SimCLR's, without its initialization. The paper's
    other hosts (BYOL, DINO, DeepCluster) are not covered. Statistics are those of the global batch.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers; None takes the embedding's.
        projection_dim: Width of the projection.
        support: "sphere" (unit vectors) or "discrete" (distributions over the projection's features).
        kappa: Concentration of the kernel and of the reconstruction density; sphere only.
        estimator: Of the entropy, "plug_in" or "joe" (a plain mean); sphere only.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "imagenet": Recipe(
            views="simclr", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=100,
            global_batch_size=4096, source="SimCLR's, section 2.2 of its paper; ER's own is not known",
        ),
    }  # fmt: skip

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int | None = None,
        projection_dim: int = 128,
        support: str = "sphere",
        kappa: float = 10.0,
        estimator: str = "plug_in",
    ) -> None:
        super().__init__(backbone)
        if support not in ("sphere", "discrete") or estimator not in ("plug_in", "joe") or kappa <= 0:
            raise ConfigError(
                "EntropyReconstruction needs `support` sphere or discrete, `estimator` plug_in or joe and "
                f"`kappa` > 0, got {support!r}, {estimator!r} and {kappa!r}. Correct the method's arguments."
            )
        self.support = support
        self.kappa = kappa
        self.estimator = estimator
        self.constant = log_normalizer(kappa, projection_dim) if support == "sphere" else 0.0
        hidden = hidden_dim or backbone.embed_dim
        self.projector = mlp(backbone.embed_dim, (hidden, hidden, projection_dim), last_bias=False, last_norm="no_bias")

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z_a, z_b = (at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views)  # (N, P)
        if self.support == "sphere":
            z_a, z_b = unit_rows(z_a), unit_rows(z_b)
            reconstruction = -self.kappa * (z_a * z_b).sum(1).mean()
            entropies = [sphere_entropy(z, kappa=self.kappa, estimator=self.estimator) for z in (z_a, z_b)]
        else:
            p_a, p_b = z_a.softmax(1), z_b.softmax(1)
            reconstruction = discrete_reconstruction(p_a, p_b)
            entropies = [discrete_entropy(p) for p in (p_a, p_b)]
        entropy = (entropies[0] + entropies[1]) / 2
        return LossOutput(
            reconstruction - entropy, reconstruction=reconstruction + self.constant, entropy=entropy + self.constant
        )
