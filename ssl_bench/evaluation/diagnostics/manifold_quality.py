"""How far and how evenly a representation moves when its input is altered more and more.

Shapes: N images, A levels of alteration (level 0 the image itself), D features.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

SMALLEST_DISTANCE = 1e-7  # the resolution of float32 directions: what is below counts as not moved
SMALLEST_CHANGE = 1e-6  # mean relative change below which its inverse is cut off


@dataclasses.dataclass(frozen=True)
class ManifoldQuality:
    """RMQM and what it is made of; NaN where nothing was left to average.

    Attributes:
        value: ln(1 + D_o + D_p + 1 / S_o + 1 / S_p).
        to_original: D_o, mean distance of an altered image's representation to the original's.
        to_previous: D_p, mean distance to that of the level before.
        change_to_original: S_o, mean absolute relative change of the distance to the original from level to level.
        change_to_previous: S_p, the same of the distance to the level before.
        num_dropped: Images left out of S_o and of S_p, as one of their distances before the last is 0.
        is_clipped: Whether S_o or S_p was below 1e-6 and taken as that.
        curve: Mean distance to the original at each level from 1.
    """

    value: float
    to_original: float
    to_previous: float
    change_to_original: float
    change_to_previous: float
    num_dropped: tuple[int, int]
    is_clipped: bool
    curve: list[float]


def manifold_quality(levels: Tensor) -> ManifoldQuality:
    """RMQM: large where steps in representation are large and regular.

    Rows are brought to unit length; o_ia = ||z_ia - z_i0||, p_ia = ||z_ia - z_i,a-1||, relative changes
    (o_ia - o_i,a-1) / o_i,a-1 for a >= 2. Source: Botha et al. 2022, arXiv 2205.07477, from the authors' notebook and
    code (ByteFuse/representation-manifold-quality-metric). Differs: distances up to 1e-7 count as 0, S of at least 1e-6
    instead of an unbounded inverse, and counted instead of silent dropping. With small S the inverse outweighs D, which
    is at most 4.

    Args:
        levels: Representations, (N, A, D), A >= 3, levels in order.

    Returns:
        The value and its parts; the value is NaN when no image moves, as at complete collapse.

    Raises:
        ValueError: If there are fewer than three levels.
    """
    if levels.ndim != 3 or levels.shape[1] < 3:
        raise ValueError(
            f"RMQM needs (N, A, D) representations with at least 3 levels, since 2 have no relative change, got "
            f"{tuple(levels.shape)}. Give the original and at least two alterations."
        )
    z = normalize(levels.double(), dim=2, eps=1e-12)
    to_original, to_previous = _distances(z[:, 1:], z[:, :1]), _distances(z[:, 1:], z[:, :-1])
    change_o, dropped_o = _mean_change(to_original)
    change_p, dropped_p = _mean_change(to_previous)
    d_o, d_p = float(to_original.mean()), float(to_previous.mean())
    value = math.nan
    if not math.isnan(change_o + change_p):
        value = math.log(1 + d_o + d_p + 1 / max(change_o, SMALLEST_CHANGE) + 1 / max(change_p, SMALLEST_CHANGE))
    return ManifoldQuality(
        value=value,
        to_original=d_o,
        to_previous=d_p,
        change_to_original=change_o,
        change_to_previous=change_p,
        num_dropped=(dropped_o, dropped_p),
        is_clipped=min(change_o, change_p) < SMALLEST_CHANGE,
        curve=to_original.mean(dim=0).tolist(),
    )


def _distances(a: Tensor, b: Tensor) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(a - b, dim=2)
    return distances.where(distances > SMALLEST_DISTANCE, 0.0)


def _mean_change(distances: Tensor) -> tuple[float, int]:
    """Mean absolute relative change along the levels over images where all are defined, and the number of others."""
    defined = (distances[:, :-1] > 0).all(dim=1)
    kept = distances[defined]
    changes = (kept[:, 1:] / kept[:, :-1] - 1).abs()
    return float(changes.mean()), int((~defined).sum())
