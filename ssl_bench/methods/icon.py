"""I-Con: match each image's learned neighbors to debiased target neighbors, by one KL divergence.

Source: Alshammari et al. 2025, arXiv 2504.16929; official code ShadeAlsha/ICon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather_with_grad, local_slice
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision, unit_rows
from ssl_bench.methods.base import register_method
from ssl_bench.methods.simclr import SimCLR
from ssl_bench.nn.backbone import Backbone
from ssl_bench.records import LossOutput


@full_precision
def neighborhood_kl(target: Tensor, log_learned: Tensor) -> Tensor:
    """KL(p || q) = sum_j p_j (ln p_j - ln q_j) of each row: I-Con's one loss; entries with p = 0 count nothing.

    Args:
        target: p, rows that sum to one, without gradient, shape (B, M).
        log_learned: ln q, shape (B, M); may be -inf where p is 0.

    Returns:
        One value a row, shape (B,), >= 0.
    """
    return (torch.xlogy(target, target) - torch.where(target > 0, target * log_learned, 0)).sum(1)


@register_method("icon", family="contrastive", version=1, paper="Alshammari et al. 2025", arxiv="2504.16929")
class ICon(SimCLR):
    """L = mean over the 2N views of KL((1 - a) p + a u || q): contrastive I-Con with a debiased target.

    p is one on the other view of the image, u uniform over the 2N - 1 other views of the global batch, q a softmax of
    their cosine similarities. At a = 0 it is `simclr`; the divergence differs from the official code's cross entropy
    by the target's entropy, a constant. The code divides a by the length of a row, self included; here the
    others share it, so that rows sum to one. Its cluster head and mixing of q belong to clustering frozen
    features and are left out. Unverified: a = 0.6 is where the paper's recommendation for clustering starts, and the
    setting of its contrastive runs could not be read, so projector and temperature are `simclr`'s.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layers; None takes the embedding's.
        projection_dim: Width of the projection.
        temperature: Scale of the similarities; twice the squared width of the paper's Gaussian on 1 - cosine.
        debiasing: a, the target's share of the uniform distribution, in [0, 1).
    """

    recipes = {"small": SimCLR.recipes["small"]}
    arguments = {"small": {"temperature": 0.2}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int | None = None,
        projection_dim: int = 128,
        temperature: float = 0.5,
        debiasing: float = 0.6,
    ) -> None:
        super().__init__(backbone, hidden_dim=hidden_dim, projection_dim=projection_dim, temperature=temperature)
        if not 0 <= debiasing < 1:
            raise ConfigError(
                f"`debiasing` must be in [0, 1), got {debiasing} in icon: at 1 the target forgets the positives. "
                "Lower it in the study."
            )
        self.debiasing = debiasing

    def contrast(self, embeddings: Sequence[Tensor]) -> LossOutput:
        """The divergence over both views' anchors."""
        z = [unit_rows(self.projector(h)) for h in embeddings]  # (B, P) each
        candidates = torch.cat([gather_with_grad(z_v) for z_v in z])  # (2N, P)
        rows = torch.arange(len(z[0]), device=z[0].device)[:, None] + local_slice(len(z[0]), z[0].device).start
        num = len(candidates)
        divergences, positives = [], []
        for anchors, own, positive in ((z[0], rows, rows + num // 2), (z[1], rows + num // 2, rows)):
            log_q = neighbor_logits(anchors, candidates, self.temperature).scatter(1, own, -torch.inf).log_softmax(1)
            p = torch.full_like(log_q, self.debiasing / (num - 1)).scatter(1, own, 0.0)
            p = p.scatter_add(1, positive, torch.full_like(positive, 1 - self.debiasing, dtype=p.dtype))
            divergences.append(neighborhood_kl(p, log_q))
            positives.append(log_q.gather(1, positive))
        total = batch_mean((divergences[0] + divergences[1]) / 2)
        return LossOutput(total, positive_probability=torch.cat(positives).exp().mean())


@full_precision
def neighbor_logits(anchors: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Similarities of unit rows (B, P) to unit rows (M, P) over the temperature, shape (B, M)."""
    return anchors @ candidates.T / temperature
