"""A momentum encoder: a copy that follows the online network and never has gradient."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class TargetNetwork(nn.Module):
    """Exponential moving average of a module's parameters.

    Starts as a copy. Parameters are averaged, buffers (batch-norm statistics) are the target's own:
    it runs in the mode of its parent, so in training it normalizes with its own batch.

    Args:
        online: The module to follow, for instance `nn.Sequential(backbone, projector)`.
    """

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(online).requires_grad_(False)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The target's output, without gradient."""
        out: Tensor = self.module(*args, **kwargs)
        return out

    @torch.no_grad()
    def update(self, online: nn.Module, target_momentum: float) -> None:
        """Target <- target_momentum * target + (1 - target_momentum) * online, once an optimizer step."""
        torch._foreach_lerp_(list(self.module.parameters()), list(online.parameters()), 1.0 - target_momentum)
