"""Training and evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Put modules and all their parts into evaluation mode; every part gets its own mode back."""
    parts = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in parts:
            part.training = training
