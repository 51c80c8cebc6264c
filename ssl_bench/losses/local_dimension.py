"""Local intrinsic dimension of features, and the regularizer that raises it (LDReg).

Shapes: B queries, M references, D width of the features. The caller gathers; nothing here communicates.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ssl_bench.losses.common import full_precision

LARGEST = 1e6  # ratio of mean to remainder that all-equal distances are given
SMALLEST = 1e-6  # dimension below which the logarithm is cut off


@full_precision
def local_dimension(queries: Tensor, references: Tensor, *, k: int, exclude: Tensor) -> Tensor:
    """Moment estimate of the local intrinsic dimension at each query: mu / (w_k - mu), mu the mean of w_1..w_k.

    w_1 <= ... <= w_k are the Euclidean distances to the k nearest references. Source: Huang et al. 2024 (LDReg),
    arXiv 2401.10474. Their code takes mu over w_1..w_{k-1}; the paper's mean of all k is followed. The value
    does not change under translation, rotation or a common scale, nor do distances of 0 give a gradient.

    Args:
        queries: Rows with gradient, shape (B, D).
        references: Rows without gradient, shape (M, D), M >= 2.
        k: Neighbors; at most M - 1 are taken.
        exclude: Row of the references that is the query itself, shape (B,), int64: no neighbor of it.

    Returns:
        Dimensions, shape (B,), in [0, 1e6]; 0 where all neighbors are at distance 0.
    """
    references = references.detach()
    center = references.mean(0)  # leaves the distances as they are, and less to cancel in them
    queries, references = queries - center, references - center
    squared = queries.square().sum(1, keepdim=True) + references.square().sum(1) - 2 * queries @ references.T
    squared = squared.scatter(1, exclude[:, None], float("inf"))
    nearest = squared.topk(min(k, len(references) - 1), dim=1, largest=False, sorted=False).values
    distances = torch.where(nearest > 0, nearest, 1).sqrt() * (nearest > 0)  # the root has no gradient at 0
    furthest, mean = distances.amax(1), distances.mean(1)
    smallest = furthest / LARGEST + torch.finfo(furthest.dtype).tiny
    return mean / torch.maximum(furthest - mean, smallest)


@full_precision
def local_dimension_regularizer(rows: Tensor, *, k: int, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    """Minus the mean log local dimension of rows among themselves, to be minimized.

    "l1": -mean ln LID_i. "l2": -sqrt(mean (ln LID_i)^2). Source: as `local_dimension`. The paper's forms; the
    authors' code has |ln LID_i| in the first, which pushes dimensions below 1 further down, and its second equals
    its first. Neighbors are constants: a row moves, its neighbors do not give way.

    Args:
        rows: Features of every view over the global batch, shape (M, D), M >= 2, gathered with gradient.
        k: Neighbors of each row.
        norm: "l1" or "l2".

    Returns:
        Scalar; falls as the features spread over more dimensions.
    """
    own = torch.arange(len(rows), device=rows.device)
    logarithm = local_dimension(rows, rows, k=k, exclude=own).clamp(min=SMALLEST).log()
    return -logarithm.mean() if norm == "l1" else -logarithm.square().mean().sqrt()
