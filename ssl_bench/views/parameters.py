"""Random parameters of the operations, distributed as torchvision's, drawn from keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_bench.random import permutation, uniform

TRIES = 10


def random_resized_crop(
    keys: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of each crop, (B,) float32 holding integers.

    Ten tries of area ~ U(scale) and log aspect ~ U(log ratio); the first that fits counts. Where none does:
    the largest central crop with the aspect clamped to `ratio`.
    """
    u = uniform(keys, 4 * TRIES, "crop", torch.float64).view(-1, 4, TRIES)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * u[:, 1])
    w, h = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.to(torch.int8).argmax(1, keepdim=True)
    found = fits.any(1)
    w, h = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0]
    whole = width / height
    if whole < ratio[0]:
        full_w, full_h = width, round(width / ratio[0])
    elif whole > ratio[1]:
        full_w, full_h = round(height * ratio[1]), height
    else:
        full_w, full_h = width, height
    h, w = torch.where(found, h, full_h), torch.where(found, w, full_w)
    top = torch.floor(u[:, 2].gather(1, first)[:, 0] * (height - h + 1))
    left = torch.floor(u[:, 3].gather(1, first)[:, 0] * (width - w + 1))
    top = torch.where(found, top, (height - full_h) // 2)
    left = torch.where(found, left, (width - full_w) // 2)
    return top.float(), left.float(), h.float(), w.float()


def coin(keys: Tensor, draw: str, probability: float) -> Tensor:
    """1.0 with the given probability, else 0.0, (B,)."""
    return (uniform(keys, 1, draw)[:, 0] < probability).float()


def between(keys: Tensor, draw: str, low: float, high: float) -> Tensor:
    """Uniform in [low, high), (B,)."""
    return low + (high - low) * uniform(keys, 1, draw)[:, 0]


def jitter_order(keys: Tensor) -> Tensor:
    """The order of brightness 0, contrast 1, saturation 2 and hue 3 for each sample, (B, 4)."""
    return permutation(keys, 4, "jitter_order")
