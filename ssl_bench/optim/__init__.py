"""Optimizers, parameter groups and schedules: the only place where a learning rate is scaled."""

from ssl_bench.optim.build import ParameterGroup, build_optimizer, scaled_lr
from ssl_bench.optim.schedule import apply_schedule, cosine, lr_factor, momentum_schedule

__all__ = [
    "ParameterGroup",
    "apply_schedule",
    "build_optimizer",
    "cosine",
    "lr_factor",
    "momentum_schedule",
    "scaled_lr",
]
