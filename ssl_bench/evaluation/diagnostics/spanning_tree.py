"""Spread of points by their Euclidean minimum spanning tree."""

from __future__ import annotations

from torch import Tensor

from ssl_bench.losses.spanning_tree import spanning_tree_entropy


def spanning_tree_length(x: Tensor) -> float:
    """Sum of the N - 1 edges of the minimum spanning tree of the rows, in float64.

    0 at complete collapse; large for points that keep apart. Grows with N, so that only equal N compare. Source:
    Mordacq et al. 2025 (T-REGS), arXiv 2510.23484, where N times the negative of its loss is this length.

    Args:
        x: (N, D), rows of norm 1 if the size of the features is to play no part; N^2 numbers are held.
    """
    return -len(x) * float(spanning_tree_entropy(x.double()))
