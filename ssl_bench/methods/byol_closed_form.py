"""BYOL with a predictor in closed form: a matrix computed from second moments, never trained.

Source: Richemond et al. 2023, arXiv 2302.04817 (no official code is public); Tian et al. 2021 (DirectPred),
arXiv 2102.06810, code facebookresearch/luckmatters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import all_reduce_sum_with_grad, batch_mean, global_batch_size
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32, full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.optim import momentum_schedule
from ssl_bench.records import Batch, LossOutput, Recipe

PARTNERS = {
    "ols": "both",
    "procrustes": "target",
    "projection": "online",
    "sqrt": "online",
}  # what Z^T is multiplied by


@full_precision
def moment_sum(z: Tensor, t: Tensor, kind: str) -> Tensor:
    """What the predictor needs of Z^T Z and Z^T T, rows (B, P): one of them, (P, P), or both side by side."""
    return z.T @ {"online": z, "target": t, "both": torch.cat([z, t], 1)}[PARTNERS[kind]]


@full_precision
def closed_form_predictor(moments: Tensor, kind: str, *, ridge: float, energy: float, floor: float) -> Tensor:
    """The matrix P of shape (P, P) with prediction Z P; a positive factor of the moments does not change it.

    Args:
        moments: As from `moment_sum`, of S = Z^T Z and C = Z^T T.
        kind: "ols": (S + ridge mean(diag S) I)^-1 C. "procrustes": U V^T of C = U D V^T. "projection": V_k V_k^T,
            the fewest eigenvectors of S that hold the share `energy` of its trace. "sqrt":
            V diag(sqrt(s / max s) + floor) V^T of S = V diag(s) V^T.
        ridge: Of "ols".
        energy: Of "projection".
        floor: Of "sqrt".
    """
    predictor: Tensor
    if kind == "ols":
        second, cross = moments.chunk(2, 1)
        shift = (ridge * second.diagonal().mean()).clamp_min(1e-12)  # solvable also where all projections are zero
        factor = torch.linalg.cholesky_ex(second + shift * torch.eye(len(second)).to(second)).L
        predictor = torch.cholesky_solve(cross, factor)
    elif kind == "procrustes":
        u, _, v_t = torch.linalg.svd(moments)
        predictor = u @ v_t
    else:
        values, vectors = torch.linalg.eigh(moments)
        values = values.clamp_min(0)
        held = values.cumsum(0)  # ascending, so the trace of this eigenvector and of all below it
        kept = (held > (1 - energy) * held[-1]).to(values)
        scale = kept if kind == "projection" else (values / values[-1].clamp_min(1e-12)).sqrt() + floor
        predictor = (vectors * scale) @ vectors.T
    return predictor


@register_method(
    "byol_closed_form", family="self-distillation", version=1, paper="Richemond et al. 2023", arxiv="2302.04817"
)
class BYOLClosedForm(SSLMethod):
    """BYOL's loss, mean of |p_1 - t_2|^2 + |p_2 - t_1|^2 on unit vectors, with p = z P and P in closed form.

    Variant, not verified against the paper: its four predictors are known to us from the abstract alone (close to
    an orthogonal projection, by orthonormalization), so the four here are ours in its spirit. "ols" is the optimal
    linear predictor, regularized; "sqrt" is DirectPred with the exponent, the memory of 0.3 and the floor of 0.01
    of its README. P is recomputed each step from uncentered moments over the global batch and both directions,
    mixed with those of past steps, and is a constant to the gradient. There are no predictor parameters.

    In short runs on small data "procrustes" and "projection" collapse: k-NN on validation gives, at two seeds, 73 %
    and 76 %, no training 76 % and 77 %, "ols" 78 % and 77 %, "sqrt" 80 % and 80 %. The target stays near the online
    network, which brings both close to the identity, no predictor at all. With a batch below half the width, "ols"
    without memory predicts the batch all but exactly.

    The decompositions, (P, P) in float32, are what a step costs: loss and gradient at batch 256 and width 1024 take
    2.6 ("ols"), 3.9 ("sqrt", "projection") and 7.8 ("procrustes") times VICReg's, at the default width of 256 1.6,
    1.7 and 2.5 times, on one CPU core.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        predictor: "ols", "procrustes", "projection" or "sqrt", see `closed_form_predictor`.
        statistics_momentum: Weight of the past in the moments; 0 for those of this batch alone.
        ridge: Regularization of "ols", relative to the mean second moment.
        energy: Share of the second moment that "projection" keeps.
        floor: Added to the roots of "sqrt".
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
            source="solo-learn's of BYOL, CIFAR",
        ),
        "imagenet": Recipe(
            views="simclr_asymmetric", optimizer="lars", base_lr=0.3, weight_decay=1e-6, warmup_epochs=10, epochs=300,
            global_batch_size=4096, source="official configuration of BYOL, 300 epochs",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512, "projection_dim": 128, "target_momentum": 0.9}}
    moments: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 4096,
        projection_dim: int = 256,
        predictor: str = "ols",
        statistics_momentum: float = 0.3,
        ridge: float = 1e-3,
        energy: float = 0.99,
        floor: float = 0.01,
        target_momentum: float = 0.99,
    ) -> None:
        super().__init__(backbone)
        if predictor not in PARTNERS:
            raise ConfigError(
                f"BYOLClosedForm's `predictor` must be one of {', '.join(PARTNERS)}, got {predictor!r}. "
                "Correct the method's arguments."
            )
        self.predictor = predictor
        self.statistics_momentum = statistics_momentum
        self.constants = {"ridge": ridge, "energy": energy, "floor": floor}
        self.target_momentum = target_momentum
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim), hidden_bias=True, last_bias=False)
        self.target = TargetNetwork(nn.Sequential(backbone, self.projector))
        self.register_buffer("moments", torch.zeros(projection_dim, projection_dim * (2 if predictor == "ols" else 1)))
        self._next_moments: Tensor | None = None

    @torch.no_grad()
    def _predictor(self, z: Tensor, t: Tensor) -> Tensor:
        new = all_reduce_sum_with_grad(moment_sum(z, t, self.predictor)) / global_batch_size(len(z), z.device)
        self._next_moments = torch.lerp(new, self.moments.to(new.dtype), self.statistics_momentum)
        return closed_form_predictor(self._next_moments, self.predictor, **self.constants)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Both directions, summed; one predictor from both."""
        z = at_least_float32(torch.cat([self.projector(self.backbone(view)) for view in views]))  # (2 B, P)
        t = at_least_float32(torch.cat([self.target(view) for view in reversed(views)]))
        prediction = full_precision(torch.matmul)(z, self._predictor(z, t))
        cosines = F.cosine_similarity(prediction, t).chunk(2)
        std = F.normalize(t, dim=1).std(0, unbiased=False).mean()
        return LossOutput(batch_mean(4 - 2 * (cosines[0] + cosines[1])), target_std=std)

    def after_optimizer_step(self, step: int, num_steps: int) -> None:
        """Keep the new moments and move the target."""
        if self._next_moments is not None:
            self.moments.copy_(self._next_moments)
            self._next_moments = None
        momentum = momentum_schedule(self.target_momentum, 1.0, step, num_steps)
        self.target.update(nn.Sequential(self.backbone, self.projector), momentum)
