"""Heads that are dropped after pretraining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn


def mlp(
    in_dim: int,
    widths: Sequence[int],
    *,
    norm: bool = True,
    activation: type[nn.Module] = nn.ReLU,
    hidden_bias: bool = False,
    last_bias: bool = True,
    last_norm: bool | Literal["no_affine", "no_bias"] = False,
) -> nn.Sequential:
    """Linear layers of the given widths with batch norm and activation between them.

    Args:
        in_dim: Width of the input.
        widths: Output width of each linear layer; the last one is the head's output.
        norm: Batch norm before each activation.
        activation: Class of the activation.
        hidden_bias: Biases of the hidden linear layers.
        last_bias: Bias of the last linear layer.
        last_norm: Batch norm on the output: True, False, "no_affine" (no gain or shift), or "no_bias" (no shift).
    """
    layers: list[nn.Module] = []
    for width in widths[:-1]:
        layers.append(nn.Linear(in_dim, width, bias=hidden_bias or not norm))
        if norm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(activation())
        in_dim = width
    layers.append(nn.Linear(in_dim, widths[-1], bias=last_bias))
    if last_norm:
        batch_norm = nn.BatchNorm1d(widths[-1], affine=last_norm != "no_affine")
        if last_norm == "no_bias":
            batch_norm.bias.requires_grad_(False)
        layers.append(batch_norm)
    return nn.Sequential(*layers)
