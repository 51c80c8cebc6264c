"""Schedules as functions of the step: nothing to store, nothing to restore."""

from __future__ import annotations

import math

import torch

from ssl_bench.errors import ConfigError
from ssl_bench.records import Recipe


def cosine(start: float, end: float, progress: float) -> float:
    """Half cosine from `start` at progress 0 to `end` at progress 1."""
    progress = min(max(progress, 0.0), 1.0)
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def momentum_schedule(start: float, end: float, step: int, num_steps: int) -> float:
    """Momentum of a target network: half cosine from `start` to `end` over training.

    BYOL, eq. in section 3.3 of arXiv 2006.07733, with end = 1: 1 - (1 - start) (1 + cos(pi k / K)) / 2.
    """
    return cosine(start, end, step / num_steps)


def lr_factor(recipe: Recipe, step: int, num_steps: int, warmup_steps: float, peak_lr: float) -> float:
    """Learning rate over its peak at optimizer step `step` (steps done so far, 0 at the start)."""
    if step < warmup_steps:
        start = recipe.warmup_start_lr / peak_lr if peak_lr else 0.0
        return start + (1.0 - start) * step / warmup_steps
    progress = (step - warmup_steps) / max(1e-12, num_steps - warmup_steps)
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "step":
        return float(recipe.step_factor ** sum(step >= m * num_steps for m in recipe.milestones))
    return cosine(1.0, recipe.end_lr_factor, progress)


def apply_schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, step: int, num_steps: int, steps_per_epoch: int
) -> None:
    """Set every group's lr and weight decay for optimizer step `step` (0 is the first).

    Raises:
        ConfigError: If the warm-up is as long as the training.
    """
    warmup_steps = recipe.warmup_epochs * steps_per_epoch
    if warmup_steps and warmup_steps >= num_steps:
        raise ConfigError(
            f"`warmup_epochs` must be shorter than the training, got {recipe.warmup_epochs} epochs = "
            f"{warmup_steps:g} steps of {num_steps}. Lower recipe.warmup_epochs or raise budget.epochs in the study."
        )
    for group in optimizer.param_groups:
        if group.get("scheduled", True):
            peak = group["peak_lr"]
            group["lr"] = peak * lr_factor(recipe, step, num_steps, warmup_steps, peak)
        if recipe.end_weight_decay is not None and group["peak_weight_decay"]:
            end = recipe.end_weight_decay / recipe.weight_decay
            group["weight_decay"] = group["peak_weight_decay"] * cosine(1.0, end, step / num_steps)
