"""CLID: how well clusters of the features can be learned from half of them, and how many dimensions they fill.

Source: Lu et al. 2023, arXiv 2206.01251. Shapes: N samples, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.losses.kmeans import nearest_centroid, spherical_kmeans
from ssl_bench.random import epoch_permutation

ITERATIONS = 20


def cluster_learnability(features: Tensor, *, num_clusters: int, seed: int) -> tuple[float, Tensor]:
    """Accuracy of a nearest-neighbor classifier that learns k-means clusters of the features.

    Spherical k-means on all samples from `num_clusters` random ones; then each sample of a random half takes the
    cluster of its most cosine-similar sample of the other half. The paper's published form has a held-out half, its
    first had an online one. Its code is not public; half, cosine and one neighbor are those of a re-implementation.
    Clusters are as the features have them, so collapsed features are learned without error.

    Args:
        features: (N, D), N >= 2.
        num_clusters: K, at most N; the paper's is the root of N.
        seed: Of the first centroids and of the halves.

    Returns:
        Accuracy in [0, 1] on floor(N / 2) samples, and the samples in each cluster, (K,).
    """
    rows = normalize(features.double(), eps=1e-12)
    order = epoch_permutation(seed, 0, len(rows)).to(rows.device)
    _, clusters = spherical_kmeans(rows, rows[order[:num_clusters]], iterations=ITERATIONS)
    tested, learned = order.tensor_split([len(rows) // 2])
    found = clusters[learned][nearest_centroid(rows[tested], rows[learned])]
    return float((found == clusters[tested]).double().mean()), torch.bincount(clusters, minlength=num_clusters)


def clid(learnability: Sequence[float], dimension: Sequence[float]) -> list[float]:
    """CLID of each of several models: standardized cluster learnability plus standardized intrinsic dimension.

    It is defined only within the set of models compared; a figure without spread in the set counts 0.

    Args:
        learnability: Cluster learnability of each model.
        dimension: TwoNN dimension of each model.

    Raises:
        ValueError: If there are not two models, or one of the figures is missing for some.
    """
    if len(learnability) != len(dimension) or len(learnability) < 2:
        raise ValueError(
            f"CLID needs both figures of at least 2 models, got {len(learnability)} cluster learnabilities and "
            f"{len(dimension)} dimensions. Give both for every model of the comparison."
        )
    figures = torch.tensor([list(learnability), list(dimension)], dtype=torch.float64)
    centered = figures - figures.mean(dim=1, keepdim=True)
    deviation = centered.square().mean(dim=1, keepdim=True).sqrt()
    varies = deviation > 1e-12 * figures.abs().amax(dim=1, keepdim=True)
    scores: list[float] = torch.where(varies, centered / deviation, 0.0).sum(dim=0).tolist()
    return scores
