"""Random parameters of the operations, distributed as torchvision's, drawn from keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ssl_bench.random import uniform

TRIES = 10
NUMBERS = (
    "flip", "top", "left", "jitter", "brightness", "contrast", "saturation", "hue", "brightness_place",
    "contrast_place", "saturation_place", "hue_place", "gray", "blur", "blur_sigma", "solarize",
)  # fmt: skip


def random_resized_crop(
    keys: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Top, left, height and width of each crop: rows of a (4, B) float32 tensor, holding integers.

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
    return torch.stack([top, left, h, w]).float()


def draw_numbers(keys: Tensor) -> Tensor:
    """Every other random number of a view in one draw: uniform in [0, 1), one row for each of `NUMBERS`, (R, B)."""
    return uniform(keys, len(NUMBERS), "view").T.contiguous()


def named(numbers: Tensor) -> dict[str, Tensor]:
    """The rows of `draw_numbers` by name, (B,) each."""
    return dict(zip(NUMBERS, numbers, strict=True))


def padded_crop(u: Mapping[str, Tensor], height: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Top and left of a (size, size) crop of a padded image, uniform over all places, (B,) float32."""
    return torch.floor(u["top"] * (height - size + 1)), torch.floor(u["left"] * (width - size + 1))


def between(u: Tensor, low: float, high: float) -> Tensor:
    """Uniform in [low, high) from uniform in [0, 1)."""
    return low + (high - low) * u


@dataclasses.dataclass(frozen=True)
class Jitter:
    """Color jitter of B samples: K blends (brightness, contrast, saturation) in an order of their own, one hue shift.

    `factors`, `gray_shares` and `mean_shares` (B, K) are `operations.blend_`'s, in order; the hue shift (B,), in
    turns, comes after the first `before` (B,) of the blends. `applied` (B,) says whether any of it happens.
    """

    applied: Tensor
    before: Tensor
    factors: Tensor
    gray_shares: Tensor | None
    mean_shares: Tensor | None
    hue: Tensor | None


def jitter(
    u: Mapping[str, Tensor], probability: float, brightness: float, contrast: float, saturation: float, hue: float
) -> Jitter:
    """Factors ~ U(max(0, 1 - strength), 1 + strength), hue ~ U(-hue, hue), all orders equally likely.

    Operations of strength 0 are left out.
    """
    strengths = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    names = [name for name in strengths if strengths[name]]
    empty = u["jitter"].new_zeros(len(u["jitter"]), 0)
    # the operations come in ascending order of their places
    places = torch.stack([u[f"{name}_place"] for name in names], 1) if names else empty
    factors = [between(u[name], max(0.0, 1 - strengths[name]), 1 + strengths[name]) for name in names]
    order = places.argsort(dim=1, stable=True)
    before = (places < u["hue_place"][:, None]).sum(1)
    return Jitter(
        applied=u["jitter"] < probability,
        before=before if hue else torch.zeros_like(before),
        factors=(torch.stack(factors, 1) if names else empty).gather(1, order),
        gray_shares=(order == names.index("saturation")).float() if saturation else None,
        mean_shares=(order == names.index("contrast")).float() if contrast else None,
        hue=between(u["hue"], -hue, hue) if hue else None,
    )
