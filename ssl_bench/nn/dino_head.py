"""DINO's projection head: MLP, unit bottleneck, weight-normalized prototypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.nn.heads import mlp


class DINOHead(nn.Module):
    """Linear-GELU-Linear-GELU-Linear, L2 normalization, then prototypes of unit length without bias.

    The prototypes' length g is fixed at 1, as the official `norm_last_layer=True`.

    Args:
        in_dim: Width of the embedding.
        hidden_dim: Width of the MLP.
        bottleneck_dim: Width of the unit vector.
        num_prototypes: K.
    """

    def __init__(self, in_dim: int, hidden_dim: int, bottleneck_dim: int, num_prototypes: int) -> None:
        super().__init__()
        self.mlp = mlp(in_dim, (hidden_dim, hidden_dim, bottleneck_dim), norm=False, activation=nn.GELU)
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        bound = bottleneck_dim**-0.5
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, bottleneck_dim).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (B, D) -> (B, K), in [-1, 1]."""
        z = F.normalize(self.mlp(x), dim=1)
        return z @ F.normalize(self.prototypes, dim=1).T
