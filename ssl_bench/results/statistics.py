"""Statistics of benchmark tables, in float64; every random draw comes from a generator with a fixed seed.

Names: R runs (pretraining seeds), D tasks (datasets), k methods. Source of the aggregates: Agarwal et al.
2021, arXiv 2108.13264; of the rank tests: Demsar 2006; of Wilson's and Holm's procedures: their papers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
Matrix = NDArray[np.float64]  # (R, D) scores

SEED = 20_240_601  # of every bootstrap, so that tables can be rebuilt byte for byte
_CHUNK = 2_000  # bootstrap replicates held in memory at once


@dataclasses.dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation (ddof 1) and interval of n values; None where n is too small."""

    n: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None


def summarize(values: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Mean with a Student t interval: mean +- t_{n-1} std / sqrt(n). No interval for n < 2.

    Independent of the order of `values` (exact summation).
    """
    n = len(values)
    if n == 0:
        return Summary(0, None, None, None, None)
    mean = values[0] if min(values) == max(values) else math.fsum(values) / n  # equal values: exactly no spread
    if n == 1:
        return Summary(1, mean, None, None, None)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson interval of a proportion: the sampling error of one test set of n images.

    Raises:
        ValueError: Unless 0 <= successes <= n and n >= 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"Need 0 <= successes <= n and n >= 1, got {successes} of {n}.")
    z = float(special.ndtri((1 + confidence) / 2))
    p = successes / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Paired difference a - b over n shared seeds; p is two-sided and None where n < 2."""

    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None


def paired(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Comparison:
    """Paired t comparison of two methods on the same seeds, in the same order.

    Equal differences give p = 0 unless they are all zero (p = 1): then seeds show no noise to judge by.

    Raises:
        ValueError: If the lengths differ or are 0.
    """
    if len(a) != len(b) or not len(a):
        raise ValueError(f"Paired values must share at least one seed, got {len(a)} and {len(b)} values.")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    s = summarize(differences, confidence=confidence)
    assert s.mean is not None
    if s.std is None:
        return Comparison(s.n, s.mean, None, None, None)
    if s.std == 0:
        p = 1.0 if s.mean == 0 else 0.0
    else:
        p = 2 * float(special.stdtr(s.n - 1, -abs(s.mean) / (s.std / math.sqrt(s.n))))
    return Comparison(s.n, s.mean, s.low, s.high, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the given order; controls the family-wise error."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar p value from the two counts of discordant test images.

    Judges two fixed models on one test set; it knows nothing of the variance between trainings.
    """
    n = only_a + only_b
    return min(1.0, 2 * float(special.bdtr(min(only_a, only_b), n, 0.5))) if n else 1.0


def paired_bootstrap(
    correct_a: Sequence[float], correct_b: Sequence[float], *, replicates: int = 10_000, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of mean(a - b) under resampling of test images, shape (M,) each.

    Like `mcnemar_exact` it ignores the variance between trainings.
    """
    differences = np.asarray(correct_a, dtype=np.float64) - np.asarray(correct_b, dtype=np.float64)
    generator = np.random.Generator(np.random.PCG64(SEED))
    means = [
        differences[generator.integers(0, len(differences), (len(differences),))].mean() for _ in range(replicates)
    ]
    return _percentile_interval(np.asarray(means), confidence)


def iqm(scores: Matrix) -> float:
    """Interquartile mean: the mean of the middle half of all R D scores."""
    return float(_iqm(np.asarray(scores, dtype=np.float64)[None])[0])


def optimality_gap(scores: Matrix, gamma: float = 1.0) -> float:
    """Distance to `gamma`: gamma - mean(min(score, gamma))."""
    return gamma - float(np.minimum(scores, gamma).mean())


def stratified_bootstrap(
    scores: Matrix,
    aggregate: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
    *,
    replicates: int = 50_000,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of an aggregate of (R, D) scores; the runs of each task are resampled alone.

    Args:
        scores: Shape (R, D).
        aggregate: Maps (n, R, D) replicates to (n,) figures; None is the interquartile mean.
        replicates: Number of resamples.
        confidence: Coverage of the interval.
    """
    scores = np.asarray(scores, dtype=np.float64)
    runs, tasks = scores.shape
    generator = np.random.Generator(np.random.PCG64(SEED))
    figures = []
    for start in range(0, replicates, _CHUNK):
        index = generator.integers(0, runs, (min(_CHUNK, replicates - start), runs, tasks))
        figures.append((aggregate or _iqm)(scores[index, np.arange(tasks)]))
    return _percentile_interval(np.concatenate(figures), confidence)


def probability_of_improvement(a: Matrix, b: Matrix) -> float:
    """Mean over tasks of P(a run of `a` beats a run of `b`), ties one half; shapes (R_a, D), (R_b, D)."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    difference = a[:, None, :] - b[None, :, :]
    return float(((np.sign(difference) + 1) / 2).mean())


def performance_profile(scores: Matrix, thresholds: Sequence[float]) -> list[float]:
    """Share of all runs and tasks whose score is above each threshold."""
    scores = np.asarray(scores, dtype=np.float64)
    return [float((scores > threshold).mean()) for threshold in thresholds]


def ranks(scores: ArrayLike) -> Array:
    """Ranks per dataset of (D, k) scores: the highest gets 1, ties the average of their places."""
    table = np.asarray(scores, dtype=np.float64)
    higher = (table[:, None, :] > table[:, :, None]).sum(axis=2)
    equal = (table[:, None, :] == table[:, :, None]).sum(axis=2)
    result: Array = higher + (equal + 1) / 2
    return result


@dataclasses.dataclass(frozen=True)
class RankTest:
    """Friedman's test and its Iman-Davenport form over D datasets and k methods."""

    mean_ranks: tuple[float, ...]
    chi2: float
    chi2_tie_corrected: float
    f: float
    p: float  # of f
    critical_difference: float  # Nemenyi, 0.05


def rank_test(scores: ArrayLike) -> RankTest:
    """Friedman and Iman-Davenport tests on (D, k) scores, with Nemenyi's critical difference.

    Methods whose mean ranks differ by less than the critical difference are not separable. The F
    form uses the chi-square without tie correction; perfect agreement gives f = inf, p = 0.

    Raises:
        ValueError: If there are fewer than two datasets or methods.
    """
    table = ranks(scores)
    d, k = table.shape
    if d < 2 or k < 2:
        raise ValueError(f"Rank tests need at least two datasets and two methods, got {d} and {k}.")
    mean = table.mean(axis=0)
    chi2 = 12 * d / (k * (k + 1)) * (float((mean**2).sum()) - k * (k + 1) ** 2 / 4)
    ties = sum(int(count**3 - count) for row in table for count in np.unique(row, return_counts=True)[1])
    correction = 1 - ties / (d * (k**3 - k))
    rest = d * (k - 1) - chi2
    f = (d - 1) * chi2 / rest if rest > 1e-12 else math.inf
    p = float(special.fdtrc(k - 1, (k - 1) * (d - 1), f)) if math.isfinite(f) else 0.0
    corrected = chi2 / correction if correction > 0 else 0.0
    return RankTest(tuple(map(float, mean)), chi2, corrected, f, p, nemenyi_critical_difference(k, d))


def nemenyi_critical_difference(num_methods: int, num_datasets: int, *, alpha: float = 0.05) -> float:
    """q_alpha sqrt(k (k + 1) / (6 D)), q from the studentized range with infinite degrees of freedom / sqrt 2."""
    from scipy.stats import studentized_range  # slow to import, and only tables over datasets need it

    q = float(studentized_range.ppf(1 - alpha, num_methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(num_methods * (num_methods + 1) / (6 * num_datasets))


def wilcoxon(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided signed-rank p value over D paired task means; below 0.05 only possible for D >= 6."""
    from scipy.stats import wilcoxon as signed_rank  # slow to import

    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    if not differences.any():
        return 1.0
    return float(signed_rank(differences).pvalue)


def pareto_front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Indices of the points that no other point beats in both cost (lower) and score (higher), by cost."""
    front: list[int] = []
    for index in sorted(range(len(costs)), key=lambda i: (costs[i], -scores[i], i)):
        if not front or scores[index] > scores[front[-1]]:
            front.append(index)
    return front


def place_ranges(num_methods: int, wins: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places each method may hold, given the pairs (winner, loser) that a test told apart.

    The best possible place is behind all that beat it, the worst ahead of all that it beats. If the
    pairs were tested at family-wise level alpha, all true places lie in their ranges together with
    probability 1 - alpha (Mogstad et al. 2024, Review of Economic Studies 91).
    """
    lost, won = [0] * num_methods, [0] * num_methods
    for winner, loser in wins:
        won[winner] += 1
        lost[loser] += 1
    return [(1 + lost[i], num_methods - won[i]) for i in range(num_methods)]


def _iqm(scores: NDArray[Any]) -> NDArray[np.float64]:
    flat = np.sort(scores.reshape(len(scores), -1), axis=1)
    cut = flat.shape[1] // 4
    result: NDArray[np.float64] = flat[:, cut : flat.shape[1] - cut].mean(axis=1)
    return result


def _percentile_interval(figures: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    low, high = np.percentile(figures, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)
