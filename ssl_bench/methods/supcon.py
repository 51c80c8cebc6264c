"""SupCon: all images of a class attract. A supervised reference, never ranked with label-free methods.

Source: Khosla et al. 2020, arXiv 2004.11362; code HobbitLong/SupContrast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_bench.distributed import batch_mean, gather, gather_with_grad, local_slice
from ssl_bench.errors import DataError
from ssl_bench.losses.common import unit_rows
from ssl_bench.losses.supervised_contrastive import sup_con
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("supcon", family="supervised", version=1, paper="Khosla et al. 2020", arxiv="2004.11362")
class SupCon(SSLMethod):
    """The paper's L_out over both views of the global batch, labels included.

    The reference code multiplies value and gradient by temperature / 0.07; `base_temperature` states that
    factor, and its default (None: the temperature itself) gives the paper's plain loss. solo-learn's SupCon
    is a different loss (the sum over positives stands inside the logarithm).

    Args:
        backbone: The network to pretrain.
        projection_dim: Width of the projection.
        temperature: Scale of the similarities.
        base_temperature: The loss is multiplied by temperature / base_temperature; None for 1.
    """

    recipes = {
        "small": Recipe(
            views="simclr", optimizer="adam", base_lr=2e-3, weight_decay=1e-6, warmup_epochs=0.5, epochs=8,
            global_batch_size=128, source="ours, a plain default that was not tuned",
        ),
        "cifar": Recipe(
            views="simclr", optimizer="sgd", base_lr=0.125, weight_decay=1e-4, exclude_bias_and_norm=False,
            warmup_epochs=10, end_lr_factor=1e-3, epochs=1000, global_batch_size=1024,
            source="SupContrast, CIFAR (lr 0.5 at batch 1024)",
        ),
    }  # fmt: skip
    uses_labels = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        projection_dim: int = 128,
        temperature: float = 0.1,
        base_temperature: float | None = None,
    ) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        self.scale = 1.0 if base_temperature is None else temperature / base_temperature
        self.projector = mlp(backbone.embed_dim, (backbone.embed_dim, projection_dim), norm=False)

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """L_out with local anchors and global candidates."""
        assert batch.labels is not None
        if bool((batch.labels < 0).any()):
            raise DataError(
                "SupCon needs a label for every image, got unlabelled ones (label -1). Train on a labelled split."
            )
        z = [unit_rows(self.projector(self.backbone(view))) for view in views]  # (B, P) each
        everything = torch.cat([gather_with_grad(z_view) for z_view in z])  # (V N, P)
        labels = gather(batch.labels)
        offset = local_slice(len(batch), batch.labels.device).start
        own = torch.arange(len(batch), device=labels.device) + offset
        anchor_rows = torch.cat([own + v * len(labels) for v in range(len(z))])
        losses = sup_con(torch.cat(z), everything, anchor_rows, labels.repeat(len(z)), temperature=self.temperature)
        return LossOutput(self.scale * batch_mean(losses.view(len(z), -1).mean(0)))
