"""Class structure without labels: k-means on frozen features, labels used to score only.

Source: the measures of SCAN (Van Gansbeke et al. 2020, arXiv 2005.12320); k-means++ of Arthur and
Vassilvitskii 2007. Shapes: N samples, D features, K clusters, C classes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import Protocol, labelled, register_protocol
from ssl_bench.random import sample_keys, uniform
from ssl_bench.records import MetricRow

CHUNK = 4096
MAX_ITERATIONS = 300
TOLERANCE = 1e-4  # of squared movement of all centroids, relative to the mean variance of a feature


@dataclasses.dataclass(frozen=True)
class KMeans:
    """One run: centroids (K, D), the cluster of each row (N,), the sum of squared distances, and its length."""

    centroids: Tensor
    clusters: Tensor
    inertia: float
    iterations: int
    converged: bool


def nearest_centroids(rows: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid at the smallest Euclidean distance of each row, (N,)."""
    half_squares = 0.5 * centroids.square().sum(dim=1)
    return torch.cat([(half_squares - part @ centroids.T).argmin(dim=1) for part in rows.split(CHUNK)])


def kmeans(rows: Tensor, centroids: Tensor) -> KMeans:
    """Lloyd's iterations from given centroids; an empty cluster keeps its centroid.

    They end when no row changes its cluster, when the centroids move less than `TOLERANCE`, or after
    `MAX_ITERATIONS`.

    Args:
        rows: (N, D), with a mean near 0 for precision.
        centroids: (K, D).
    """
    enough = TOLERANCE * float(rows.double().var(dim=0, correction=0).mean())
    clusters = nearest_centroids(rows, centroids)
    converged = False
    iterations = 0
    while not converged and iterations < MAX_ITERATIONS:
        iterations += 1
        counts = torch.bincount(clusters, minlength=len(centroids))[:, None]
        sums = torch.zeros_like(centroids, dtype=torch.float64)
        for part, near in zip(rows.split(CHUNK), clusters.split(CHUNK), strict=True):
            sums += one_hot(near, len(centroids)).T.to(rows.dtype) @ part  # ten times faster than adding row by row
        moved = torch.where(counts > 0, sums / counts.clamp(min=1), centroids.double())
        shift = float((moved - centroids).square().sum())
        centroids = moved.to(rows.dtype)
        before, clusters = clusters, nearest_centroids(rows, centroids)
        converged = shift <= enough or torch.equal(before, clusters)
    distances = (part - centroids[near] for part, near in zip(rows.split(CHUNK), clusters.split(CHUNK), strict=True))
    inertia = sum(float(part.double().square().sum()) for part in distances)
    return KMeans(centroids, clusters, inertia, iterations, converged)


def spread_centroids(rows: Tensor, draws: Tensor) -> Tensor:
    """First centroids by k-means++: each row is drawn in proportion to its squared distance to those before it.

    Args:
        rows: (N, D). If fewer than K differ, some are taken twice.
        draws: K numbers in [0, 1), float64.

    Returns:
        (K, D).
    """
    weights = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    chosen: list[Tensor] = []
    for draw in draws.to(rows.device):
        cumulative = (weights if bool(weights.any()) else torch.ones_like(weights)).cumsum(dim=0)
        place = torch.searchsorted(cumulative, draw * cumulative[-1], right=True).clamp(max=len(rows) - 1)
        chosen.append(rows[place])
        distances = (rows - rows[place]).square().sum(dim=1).double()
        weights = distances if len(chosen) == 1 else torch.minimum(weights, distances)
    return torch.stack(chosen)


def best_kmeans(rows: Tensor, num_clusters: int, *, num_restarts: int, seed: int) -> tuple[KMeans, list[float]]:
    """The run of smallest inertia among several, and the inertia of each; equal ones go to the first."""
    keys = sample_keys(seed, 0, torch.arange(num_restarts), "kmeans")
    draws = uniform(keys, num_clusters, "centroids", torch.float64)
    runs = [kmeans(rows, spread_centroids(rows, own)) for own in draws]
    return min(runs, key=lambda run: run.inertia), [run.inertia for run in runs]


def contingency(clusters: Tensor, labels: Tensor, num_clusters: int, num_classes: int) -> np.ndarray:
    """Samples of each class in each cluster, (K, C) int64."""
    counts = torch.bincount(clusters * num_classes + labels, minlength=num_clusters * num_classes)
    table: np.ndarray = counts.view(num_clusters, num_classes).numpy()
    return table


def normalized_mutual_information(table: np.ndarray) -> float:
    """2 I / (H_clusters + H_classes): the arithmetic mean, as in scikit-learn; older papers take the geometric one.

    One cluster and one class, where it is 0 / 0, agree: 1.
    """

    def entropy(counts: np.ndarray) -> float:
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    of_clusters, of_classes = entropy(table.sum(axis=1)), entropy(table.sum(axis=0))
    information = of_clusters + of_classes - entropy(table.ravel())
    total = of_clusters + of_classes
    return max(0.0, 2 * information / total) if total > 0 else 1.0


def adjusted_rand_index(table: np.ndarray) -> float:
    """Agreement of the pairs of samples, 0 at random and 1 at best (Hubert and Arabie 1985).

    Two partitions of one group, or of one sample a group, where it is 0 / 0, agree: 1.
    """

    def pairs(counts: np.ndarray) -> int:
        return sum(n * (n - 1) // 2 for n in counts.ravel().tolist())

    together, of_clusters, of_classes = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    every = pairs(table.sum())
    expected = of_clusters * of_classes / every if every else 0.0
    best = (of_clusters + of_classes) / 2
    return (together - expected) / (best - expected) if best != expected else 1.0


def match(table: np.ndarray) -> np.ndarray:
    """The class of each cluster in the one-to-one map that fits the most samples, (K,); -1 where none is left."""
    rows, columns = linear_sum_assignment(table, maximize=True)
    classes = np.full(len(table), -1)
    classes[rows] = columns
    return classes


@register_protocol("clustering", version=1)
class Clustering(Protocol):
    """k-means with as many clusters as classes: NMI, ARI and accuracy after one-to-one matching.

    Euclidean k-means on L2-normalized features of train + validation, the run of smallest inertia (no labels)
    among the restarts; test samples take the nearest centroid. SCAN clusters features as they are and DeepCluster
    whitens them first. `accuracy` is the usual figure, whose matching of clusters to classes knows the labels it
    is scored on; `accuracy_transferred` matches on train + validation. NMI grows with the number of clusters even
    at random, so it compares only at equal numbers of classes and samples; ARI does not. Another seed draws other
    first centroids.

    Args:
        num_restarts: Runs of k-means from different first centroids.
    """

    def __init__(self, *, num_restarts: int = 10) -> None:
        if num_restarts < 1:
            raise ConfigError(f"`num_restarts` must be >= 1, got {num_restarts} (protocol clustering).")
        self.num_restarts = num_restarts

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `nmi`, `ari`, `accuracy` and `accuracy_transferred`."""
        num_classes = context.dataset.num_classes
        bank = labelled(context, "train").joined(labelled(context, "validation"))
        test = labelled(context, "test")
        rows = normalize(bank.features.to(context.device), eps=1e-12)
        center = rows.mean(dim=0)
        best, inertias = best_kmeans(rows - center, num_classes, num_restarts=self.num_restarts, seed=context.seed)
        queries = normalize(test.features.to(context.device), eps=1e-12) - center
        clusters = nearest_centroids(queries, best.centroids).cpu()

        learned = contingency(best.clusters.cpu(), bank.labels, num_classes, num_classes)
        table = contingency(clusters, test.labels, num_classes, num_classes)
        predictions = {
            "accuracy": torch.from_numpy(match(table))[clusters],
            "accuracy_transferred": torch.from_numpy(match(learned))[clusters],
        }
        self.save_predictions(context, test.labels, predictions)
        filled = int((learned.sum(axis=1) > 0).sum())
        few = f"only {filled} of {num_classes} clusters hold samples" if filled < num_classes else ""
        one = "the test split has one class, which every clustering fits" if len(test.labels.unique()) < 2 else ""
        figures = {
            "nmi": normalized_mutual_information(table),
            "ari": adjusted_rand_index(table),
            **{name: float((found == test.labels).double().mean()) for name, found in predictions.items()},
        }
        matched = {"accuracy": "test", "accuracy_transferred": "train+validation"}
        details = {
            "num_clusters": num_classes,
            "num_filled_clusters": filled,
            "normalized": "L2",
            "fitted_on": "train+validation",
            "n_fitted": len(bank),
            "inertia": best.inertia,
            "inertia_of_restarts": inertias,
            "iterations": best.iterations,
            "converged": best.converged,
        }
        result = []
        for metric, value in figures.items():
            blank = one if metric in ("nmi", "ari") else ""
            result.append(
                self.row(
                    metric,
                    None if blank else value,
                    n_test=len(test),
                    note="; ".join(filter(None, (bank.note, test.note, few, blank))),
                    details={**details, "matched_on": matched[metric]} if metric in matched else details,
                )
            )
        return result
