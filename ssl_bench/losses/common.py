"""Small steps every loss shares."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of losses: half-precision tensors become float32, and autocast is off inside.

    Autocast would run the loss's matrix products in half precision, whatever the type of its inputs.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        devices = {"cpu"}

        def widen(value: object) -> object:
            if isinstance(value, Tensor):
                devices.add(value.device.type)
                return at_least_float32(value)
            if isinstance(value, list | tuple):
                return type(value)(widen(item) for item in value)
            return value

        wide_args = [widen(value) for value in args]
        wide_kwargs = {key: widen(value) for key, value in kwargs.items()}
        with contextlib.ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*wide_args, **wide_kwargs)  # type: ignore[arg-type]

    return wrapper


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision tensors in float32, wider ones unchanged: losses are computed so, also under autocast."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit_rows(x: Tensor) -> Tensor:
    """Rows (..., P) of unit Euclidean norm, in at least float32; zero rows stay zero."""
    return F.normalize(at_least_float32(x), dim=-1)
