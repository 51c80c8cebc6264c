"""Small steps every loss shares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision tensors in float32, wider ones unchanged: losses are computed so, also under autocast."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit_rows(x: Tensor) -> Tensor:
    """Rows (..., P) of unit Euclidean norm, in at least float32; zero rows stay zero."""
    return F.normalize(at_least_float32(x), dim=-1)
