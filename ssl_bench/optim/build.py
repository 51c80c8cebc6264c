"""Parameter groups and optimizers from a recipe."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from ssl_bench.records import Recipe


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Named parameters that share rates.

    `lr_factor` multiplies the recipe's rate; `scheduled` False keeps it constant after scaling;
    `weight_decay` None takes the recipe's.
    """

    parameters: list[tuple[str, nn.Parameter]]
    lr_factor: float = 1.0
    scheduled: bool = True
    weight_decay: float | None = None


def scaled_lr(recipe: Recipe) -> float:
    """Peak learning rate: `base_lr` scaled from 256 images to the recipe's global batch."""
    ratio = recipe.global_batch_size / 256
    return recipe.base_lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[recipe.lr_scaling]


def build_optimizer(groups: list[ParameterGroup], recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; 1-d parameters leave weight decay (and LARS) when it says so.

    Each torch parameter group carries `peak_lr`, `peak_weight_decay` and `scheduled`, which
    `apply_schedule` reads, so that the schedule is a function of the step and needs no state.
    """
    lr = scaled_lr(recipe)
    torch_groups: list[dict[str, Any]] = []
    for group in groups:
        decay = recipe.weight_decay if group.weight_decay is None else group.weight_decay
        plain = [p for _, p in group.parameters if p.ndim > 1 or not recipe.exclude_bias_and_norm]
        excluded = [p for _, p in group.parameters if p.ndim <= 1 and recipe.exclude_bias_and_norm]
        for params, weight_decay in ((plain, decay), (excluded, 0.0)):
            if params:
                peak = lr * group.lr_factor
                torch_groups.append(
                    {
                        "params": params,
                        "lr": peak,
                        "weight_decay": weight_decay,
                        "peak_lr": peak,
                        "peak_weight_decay": weight_decay,
                        "scheduled": group.scheduled,
                        "adapted": params is plain,
                    }
                )
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(torch_groups, lr=lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(torch_groups, lr=lr, betas=recipe.betas, foreach=True)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(torch_groups, lr=lr, betas=recipe.betas, foreach=True)
    from ssl_bench.optim.lars import LARS

    return LARS(torch_groups, lr=lr, momentum=recipe.momentum, trust=recipe.lars_trust, clip=recipe.lars_clip)
