"""Relational reasoning: a head tells pairs of views of one image from pairs of different images.

Source: Patacchiola & Storkey 2020, arXiv 2006.05849; official code
mpatacchiola/self-supervised-relational-reasoning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.distributed import batch_mean, gather_with_grad, local_slice
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe

AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b], dim=-1),
    "sum": torch.add,
    "mean": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
}


@full_precision
def focal_cross_entropy(logits: Tensor, targets: Tensor, *, gamma: float) -> Tensor:
    """1/2 (1 - p_t)^gamma (-log p_t) of each logit, p_t the probability of its target 0 or 1."""
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return 0.5 * (-torch.expm1(-cross_entropy)).pow(gamma) * cross_entropy


@register_method(
    "relational_reasoning", family="pretext", version=1, paper="Patacchiola & Storkey 2020", arxiv="2006.05849"
)
class RelationalReasoning(SSLMethod):
    """Binary focal cross entropy of a relation head over the pairs of K views, half of them of different images.

    For each of the K (K - 1) / 2 pairs of views (k, l), image i gives the positive (f_k,i, f_l,i) and the negative
    (f_k,i, f_l,i-s), with i - s cyclic in the batch; the shift s grows by one a pair of views through 1, ..., N - 1
    and starts over. The head takes the backbone's features and sees all pairs as one batch. Negatives
    come from the global batch (official code: each device). The paper takes K = 32, which
    `views: {num_views: 32}` sets; the default is 4.

    A step makes N K (K - 1) pairs and takes K views. With the default K, batches of 256 and width 1024 on one CPU
    core it costs 1.5 (conv4, 28 px) to 2.3 times (ResNet-18, 32 px) VICReg's, which takes two views.

    Args:
        backbone: The network to pretrain.
        num_views: K, at least 2; taken from the view recipe.
        hidden_dim: Width of the relation head's hidden layer.
        aggregation: How two features become the head's input: "cat", "sum", "mean" or "max".
        focal_gamma: Exponent of the focal weight; 0 for half the plain cross entropy.
    """

    recipes = {
        "small": Recipe(
            views="strong_multiview", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="strong_multiview", optimizer="adam", base_lr=1e-3, lr_scaling="none", weight_decay=0.0,
            schedule="constant", warmup_epochs=0, epochs=200, global_batch_size=64,
            source="official code (there with 32 views)",
        ),
    }  # fmt: skip

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_views: int,
        hidden_dim: int = 256,
        aggregation: str = "cat",
        focal_gamma: float = 2.0,
    ) -> None:
        super().__init__(backbone)
        if num_views < 2:
            raise ConfigError(
                f"relational_reasoning compares views of an image and needs at least 2, got {num_views}. "
                'Choose views "strong_multiview" in its recipe.'
            )
        if aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"`aggregation` of relational_reasoning must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}. "
                "Correct the method's arguments."
            )
        self.aggregation = aggregation
        self.focal_gamma = focal_gamma
        width = backbone.embed_dim * (2 if aggregation == "cat" else 1)
        self.head = mlp(width, (hidden_dim, 1), activation=nn.LeakyReLU, hidden_bias=True)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """All views pass the backbone together, all pairs the head."""
        features = self.backbone(torch.cat(views)).split(len(batch))  # K of (B, D)
        everyone = [gather_with_grad(f) for f in features]  # K of (N, D)
        rows = torch.arange(len(everyone[0]), device=everyone[0].device)
        own = local_slice(len(batch), rows.device)
        aggregate = AGGREGATIONS[self.aggregation]
        shifts = itertools.cycle(range(1, len(rows)))
        positives, negatives = [], []
        for (k, other), shift in zip(itertools.combinations(range(len(views)), 2), shifts, strict=False):
            positives.append(aggregate(features[k], features[other]))
            negatives.append(aggregate(features[k], everyone[other][rows.roll(shift)[own]]))
        logits = self.head(torch.cat(positives + negatives))[:, 0]
        targets = (torch.arange(len(logits), device=logits.device) < len(logits) // 2).float()
        losses = focal_cross_entropy(logits, targets.to(logits.dtype), gamma=self.focal_gamma)
        with torch.no_grad():
            accuracy = ((logits > 0) == (targets > 0)).float().mean()
        return LossOutput(batch_mean(losses.view(-1, len(batch)).mean(0)), accuracy=accuracy)
