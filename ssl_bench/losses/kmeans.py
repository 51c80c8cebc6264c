"""Spherical k-means on unit rows.

Shapes: N rows over all ranks, K centroids, P width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096


@torch.no_grad()
def nearest_centroid(rows: Tensor, centroids: Tensor) -> Tensor:
    """Index of the most similar centroid of each row, (N,); ties go to the lowest index."""
    return torch.cat([(part @ centroids.T).argmax(1) for part in rows.split(CHUNK)])


@torch.no_grad()
def spherical_kmeans(rows: Tensor, centroids: Tensor, *, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's iterations with centroids brought back to unit length; an empty cluster keeps its centroid.

    Source: Caron et al. 2020, arXiv 2006.09882 (official DeepCluster-v2 code).

    Args:
        rows: Unit rows, (N, P).
        centroids: Initial unit centroids, (K, P).
        iterations: Rounds of assignment and mean.

    Returns:
        Unit centroids, (K, P), and the assignment to them, (N,).
    """
    for _ in range(iterations):
        assignment = nearest_centroid(rows, centroids)
        counts = torch.bincount(assignment, minlength=len(centroids)).to(rows.dtype)[:, None]
        sums = torch.zeros_like(centroids).index_add_(0, assignment, rows)
        centroids = F.normalize(torch.where(counts > 0, sums / counts.clamp(min=1), centroids), dim=1)
    return centroids, nearest_centroid(rows, centroids)
