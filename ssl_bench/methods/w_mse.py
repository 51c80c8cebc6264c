"""W-MSE: views agree after whitening, which rules out collapse.

Source: Ermolov et al. 2021, arXiv 2007.06346; official code htdt/self-supervised.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ssl_bench.distributed import gather, gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32, unit_rows
from ssl_bench.losses.whitening import cholesky_whiten
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.random import uniform
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("w_mse", family="whitening", version=1, paper="Ermolov et al. 2021", arxiv="2007.06346")
class WMSE(SSLMethod):
    """Mean of 2 - 2 cos over all pairs of views of Cholesky-whitened projections.

    The global batch is permuted (a function of its samples' keys, the same for all views) and cut into blocks
    that are whitened separately. Gradient flows through both views, as in the official code; solo-learn
    detaches one. A batch that is no multiple of the block is refused. A projection of 32 instead of 64
    features made a short run on small data worse than no training (one seed: k-NN 73 % against 78 % on validation, 76 %
    untrained). With 64 the gain in k-NN is not established: .781 from .756 and .771 from .766 at the seeds on which the
    rate was chosen, .766 from .769 and .778 from .762 at two fresh ones.

    Args:
        backbone: The network to pretrain.
        hidden_dim: Width of the projector's hidden layer.
        projection_dim: Width of the projection.
        block_size: Samples whitened together; at least twice the projection's width is advised.
        num_permutations: Independent partitions averaged in each step.
        eps: Shrinkage of the covariance towards the identity.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=5e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours; rate and width of the projection chosen on validation",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="adam", base_lr=1.5e-3, weight_decay=1e-6, exclude_bias_and_norm=False,
            schedule="step", milestones=(0.95, 0.975), step_factor=0.2, warmup_epochs=5, epochs=1000,
            global_batch_size=512, source="official code, CIFAR (lr 3e-3 at batch 512)",
        ),
    }  # fmt: skip
    arguments = {"small": {"hidden_dim": 512}}

    def __init__(
        self,
        backbone: Backbone,
        *,
        hidden_dim: int = 1024,
        projection_dim: int = 64,
        block_size: int = 128,
        num_permutations: int = 1,
        eps: float = 0.0,
    ) -> None:
        super().__init__(backbone)
        if block_size <= projection_dim:
            raise ConfigError(
                f"`block_size` must exceed `projection_dim` for a full-rank covariance, got {block_size} and "
                f"{projection_dim} (method w_mse). Raise block_size, at best to twice projection_dim or more."
            )
        self.block_size = block_size
        self.min_global_batch = block_size
        self.num_permutations = num_permutations
        self.eps = eps
        self.projector = mlp(backbone.embed_dim, (hidden_dim, projection_dim))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """The same global loss on every rank."""
        z = torch.stack(
            [at_least_float32(gather_with_grad(self.projector(self.backbone(view)))) for view in views]
        )  # (V, N, P)
        num = z.shape[1]
        if num % self.block_size:
            raise ConfigError(
                f"The global batch must be a multiple of `block_size`, got {num} and {self.block_size} (method w_mse). "
                "Change recipe.global_batch_size or the method's block_size."
            )
        orders = gather(uniform(batch.keys("w_mse"), self.num_permutations, "order", torch.float64)).argsort(0)
        pairs = list(itertools.combinations(range(len(views)), 2))
        total = z.new_zeros(())
        for order in orders.T:
            blocks = z[:, order].unflatten(1, (-1, self.block_size))  # (V, N / w, w, P)
            unit = unit_rows(cholesky_whiten(blocks, eps=self.eps))
            total = total + sum(2 - 2 * (unit[a] * unit[b]).sum(-1).mean() for a, b in pairs)
        return LossOutput(total / (len(pairs) * self.num_permutations))
