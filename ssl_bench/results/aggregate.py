"""From rows to cells (the seeds of one leaderboard row), comparisons of cells, and figures over datasets.

The replication unit is the pretraining run. A diverged or collapsed run is never averaged and never
forgotten: it is counted in its cell, and figures over datasets give it `FAILED_SCORE`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ssl_bench.results import statistics
from ssl_bench.results.rows import Row
from ssl_bench.results.statistics import Summary
from ssl_bench.results.trial import BROKEN, STATUSES, VOID

FAILED_SCORE = 0.0  # of a broken run in figures over datasets: the worst an accuracy can be
SIGNIFICANCE = 0.05
_PROTOCOL_ORDER = ("linear", "knn", "finetune")
_REFERENCE_FAMILIES = ("baseline", "supervised")
_ACCURACY = re.compile(r"top\d|accuracy")
_REPLICATES = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """All trials of one (dataset, method, regularizers, variant, backbone, epochs).

    `rows` are every row of its trials in their fixed order.
    """

    dataset: str
    method: str
    regularizers: str
    variant: str
    backbone: str
    epochs: float
    rows: tuple[Row, ...]

    @cached_property
    def trials(self) -> tuple[Row, ...]:
        """The first row of each trial: identity, status and cost."""
        first: dict[str, Row] = {}
        for row in self.rows:
            first.setdefault(row.trial, row)
        return tuple(first.values())

    @property
    def name(self) -> str:
        """The method, and the terms added to its loss."""
        return f"{self.method} + {self.regularizers}" if self.regularizers else self.method

    @property
    def family(self) -> str:
        """The method's family."""
        return self.rows[0].family

    @property
    def is_reference(self) -> bool:
        """Whether the method is a baseline or sees labels, so is no competitor."""
        return self.family in _REFERENCE_FAMILIES or bool(self.rows[0].uses_labels)

    @property
    def num_failed(self) -> int:
        """Trials that failed, diverged, collapsed or cannot be read."""
        return sum(row.trial_status in BROKEN for row in self.trials)

    @property
    def status(self) -> str:
        """The one status of all trials ("done"), or counts: "2 done, 1 diverged"."""
        counts = Counter(row.trial_status for row in self.trials)
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])

    def by_seed(self, column: str) -> dict[int, float]:
        """Figure of each seed that has one; void trials are left out."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if row.metric and row.column == column and row.value is not None and row.trial_status not in VOID:
                found.setdefault(-1 if row.seed is None else row.seed, []).append(row.value)
        return {seed: math.fsum(values) / len(values) for seed, values in sorted(found.items())}

    def summary(self, column: str) -> Summary:
        """Mean, standard deviation and interval of a column over seeds."""
        return statistics.summarize(list(self.by_seed(column).values()))

    def cost(self, name: str) -> float | None:
        """Mean of a cost field (`seconds`, `images_per_second`, ...) over trials that are not void."""
        values = [getattr(row, name) for row in self.trials if row.trial_status not in VOID]
        return statistics.summarize([float(value) for value in values if value is not None]).mean

    def distinct(self, name: str) -> list[str]:
        """The different non-blank texts of a row field, sorted."""
        return sorted({str(value) for row in self.rows if (value := getattr(row, name)) not in ("", None)})


def make_cells(rows: Sequence[Row]) -> list[Cell]:
    """Cells in a fixed order that does not depend on the order of `rows`; unreadable trials are in none."""
    grouped: dict[tuple[str, str, str, str, str, float], list[Row]] = {}
    for row in rows:
        if row.method:
            grouped.setdefault(row.cell, []).append(row)
    return [Cell(*key, tuple(sorted(grouped[key], key=_row_order))) for key in sorted(grouped)]


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every `protocol/metric` column: linear, knn and finetune first, then by name; numbers in order.

    A protocol whose version or arguments differ between trials has one column for each, named apart.
    """
    return sorted({row.column for row in rows if row.metric}, key=_column_order)


def is_accuracy(column: str) -> bool:
    """Whether a column holds fractions to be shown as percent."""
    return bool(_ACCURACY.search(column.split("/", 1)[1]))


def headline_columns(columns: Sequence[str]) -> list[str]:
    """The columns of the main table: top-1 on the test split, else any accuracy, else all."""
    test = [column for column in columns if "@" not in column]
    return (
        [column for column in test if "top1" in column.split("/", 1)[1]]
        or [column for column in test if is_accuracy(column)]
        or test
    )


def ranking_column(columns: Sequence[str]) -> str | None:
    """The column that sorts the table: linear top-1 where there is one, else the first headline."""
    headline = headline_columns(columns)
    return headline[0] if headline else None


def higher_is_better(rows: Sequence[Row], column: str) -> bool:
    """Direction of a column, as its rows say."""
    return next((bool(row.higher_is_better) for row in rows if row.metric and row.column == column), True)


def sorted_cells(cells: Sequence[Cell], column: str | None) -> dict[str, list[Cell]]:
    """Cells of each dataset, best mean first; those without a figure last."""
    tables: dict[str, list[Cell]] = {}
    for cell in cells:
        tables.setdefault(cell.dataset, []).append(cell)
    sign = _sign(cells, column)

    def order(cell: Cell) -> tuple[Any, ...]:
        mean = cell.summary(column).mean if column else None
        return (mean is None, -sign * (mean or 0.0), cell.name, cell.variant, cell.backbone, cell.epochs)

    return {dataset: sorted(table, key=order) for dataset, table in sorted(tables.items())}


def labels(cells: Sequence[Cell]) -> dict[Cell, str]:
    """A short unique name for each cell of one dataset: what is equal everywhere is left out."""
    backbones = {cell.backbone for cell in cells}
    budgets: dict[tuple[str, str, str], set[float]] = {}
    for cell in cells:
        budgets.setdefault((cell.name, cell.variant, cell.backbone), set()).add(cell.epochs)
    # references may have a budget of their own (0 epochs) without the names needing it
    several_budgets = (
        len({cell.epochs for cell in cells if not cell.is_reference}) > 1
        or max(map(len, budgets.values()), default=0) > 1
    )
    names = {}
    for cell in cells:
        extra = [cell.variant] if cell.variant else []
        extra += [cell.backbone] if len(backbones) > 1 else []
        extra += [f"{cell.epochs:g} epochs"] if several_budgets else []
        names[cell] = f"{cell.name} ({', '.join(extra)})" if extra else cell.name
    return names


@dataclasses.dataclass(frozen=True)
class PairResult:
    """Two rows of the table compared; `p_holm` is corrected over all pairs of the same dataset."""

    dataset: str
    column: str
    a: str
    b: str
    test: str
    n: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    probability_of_improvement: float | None

    @property
    def separable(self) -> bool:
        """Whether the corrected test tells a from b."""
        return self.p_holm is not None and self.p_holm < SIGNIFICANCE


def compare_cells(table: Sequence[Cell], column: str) -> list[PairResult]:
    """Every pair of one dataset's rows over their shared seeds: paired t, Holm-corrected.

    The p value tells training noise from a difference; the sampling error of the test set is not in it.
    """
    return _compare(list(itertools.combinations(table, 2)), labels(table), column)


def _compare(pairs: Sequence[tuple[Cell, Cell]], names: Mapping[Cell, str], column: str) -> list[PairResult]:
    values = {cell: cell.by_seed(column) for pair in pairs for cell in pair}
    found = []
    for a, b in pairs:
        values_a, values_b = values[a], values[b]
        shared = sorted(values_a.keys() & values_b.keys())
        if shared:
            found.append((a, b, [values_a[seed] for seed in shared], [values_b[seed] for seed in shared]))
    results = [statistics.paired(x, y) for _, _, x, y in found]
    corrected = _holm([result.p for result in results])
    return [
        PairResult(
            a.dataset, column, names[a], names[b], "paired t over seeds", r.n, r.difference, r.low, r.high, r.p, p_holm,
            statistics.probability_of_improvement(np.asarray(x)[:, None], np.asarray(y)[:, None]),
        )
        for (a, b, x, y), r, p_holm in zip(found, results, corrected, strict=True)
    ]  # fmt: skip


def compare_regularized(table: Sequence[Cell], column: str) -> list[PairResult]:
    """Each row with added terms against the same row without: paired t over shared seeds, Holm-corrected over these."""
    names = labels(table)
    plain = {(c.method, c.variant, c.backbone, c.epochs): c for c in table if not c.regularizers}
    pairs = [(c, plain.get((c.method, c.variant, c.backbone, c.epochs))) for c in table if c.regularizers]
    return _compare([(a, b) for a, b in pairs if b is not None], names, column)


def places(table: Sequence[Cell], comparisons: Sequence[PairResult]) -> dict[Cell, tuple[int, int]]:
    """Range of places of each competitor of one dataset that simultaneous 95 % confidence allows.

    Two competitors that the corrected test cannot tell apart do not push each other down.
    """
    names = labels(table)
    compared = {name for pair in comparisons for name in (pair.a, pair.b)}
    ranked = [cell for cell in table if not cell.is_reference and names[cell] in compared]
    index = {names[cell]: position for position, cell in enumerate(ranked)}
    sign = _sign(table, comparisons[0].column) if comparisons else 1.0
    wins = [
        (index[pair.a], index[pair.b]) if sign * pair.difference > 0 else (index[pair.b], index[pair.a])
        for pair in comparisons
        if pair.separable and pair.a in index and pair.b in index
    ]
    return dict(zip(ranked, statistics.place_ranges(len(ranked), wins), strict=True))


def not_separable_from_best(table: Sequence[Cell], comparisons: Sequence[PairResult]) -> tuple[str, list[str]] | None:
    """The first competitor of a table, and the competitors the corrected test cannot tell from it."""
    names = labels(table)
    ranked = [names[cell] for cell in table if not cell.is_reference]
    rivals = [
        other
        for other in ranked[1:]
        if any({pair.a, pair.b} == {ranked[0], other} and not pair.separable for pair in comparisons)
    ]
    return (ranked[0], rivals) if ranked and any(ranked[0] in (pair.a, pair.b) for pair in comparisons) else None


@dataclasses.dataclass(frozen=True)
class Overall:
    """One method over all datasets of a study."""

    name: str
    n_datasets: int
    n_seeds: int
    n_failed: int
    mean_rank: float
    iqm: float
    low: float
    high: float
    optimality_gap: float


@dataclasses.dataclass(frozen=True)
class OverallTable:
    """Methods that ran on every dataset with the same seeds, best mean rank first."""

    column: str
    datasets: tuple[str, ...]
    methods: tuple[Overall, ...]
    friedman_p: float
    critical_difference: float
    comparisons: tuple[PairResult, ...]


def over_datasets(cells: Sequence[Cell], column: str) -> OverallTable | None:
    """Ranks, interquartile means and Wilcoxon-Holm comparisons over datasets; None with fewer than two.

    Only methods with a figure or a broken run on every dataset take part, on the seeds shared by all
    datasets. A broken run scores FAILED_SCORE. Methods of references are included.
    """
    datasets = sorted({cell.dataset for cell in cells})
    if len(datasets) < 2 or not is_accuracy(column):
        return None
    scores: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    by_key: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.name, cell.variant, cell.backbone, cell.epochs)
        broken = {row.seed or 0: FAILED_SCORE for row in cell.trials if row.trial_status in BROKEN}
        scores.setdefault(key, {})[cell.dataset] = {**broken, **cell.by_seed(column)}
        by_key.setdefault(key, []).append(cell)
    names = labels([members[0] for members in by_key.values()])
    matrices = {}
    for key, table in scores.items():
        shared = sorted(set.intersection(*(set(table.get(dataset, {})) for dataset in datasets)))
        if shared:
            matrices[key] = np.array([[table[dataset][seed] for dataset in datasets] for seed in shared])
    if len(matrices) < 2:
        return None
    keys = list(matrices)
    means = np.stack([matrices[key].mean(axis=0) for key in keys], axis=1)  # (D, k)
    test = statistics.rank_test(means)
    overall = []
    for key, rank in zip(keys, test.mean_ranks, strict=True):
        low, high = statistics.stratified_bootstrap(matrices[key], replicates=_REPLICATES)
        overall.append(
            Overall(
                names[by_key[key][0]], len(datasets), len(matrices[key]), sum(c.num_failed for c in by_key[key]), rank,
                statistics.iqm(matrices[key]), low, high, statistics.optimality_gap(matrices[key]),
            )
        )  # fmt: skip
    pairs = list(itertools.combinations(range(len(keys)), 2))
    p_values = [statistics.wilcoxon(means[:, i], means[:, j]) for i, j in pairs]
    comparisons = [
        PairResult(
            "all", column, overall[i].name, overall[j].name, "Wilcoxon over datasets", len(datasets),
            float((means[:, i] - means[:, j]).mean()), None, None, p, p_holm,
            statistics.probability_of_improvement(matrices[keys[i]], matrices[keys[j]]),
        )
        for (i, j), p, p_holm in zip(pairs, p_values, statistics.holm(p_values), strict=True)
    ]  # fmt: skip
    return OverallTable(
        column,
        tuple(datasets),
        tuple(sorted(overall, key=lambda method: (method.mean_rank, method.name))),
        test.p,
        test.critical_difference,
        tuple(comparisons),
    )


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    known = [p for p in p_values if p is not None]
    corrected = iter(statistics.holm(known))
    return [None if p is None else next(corrected) for p in p_values]


def _sign(cells: Sequence[Cell], column: str | None) -> float:
    rows = [row for cell in cells for row in cell.rows]
    return 1.0 if column is None or higher_is_better(rows, column) else -1.0


def _row_order(row: Row) -> tuple[Any, ...]:
    return (-1 if row.seed is None else row.seed, row.trial, row.protocol, row.protocol_variant, row.metric, row.split)


def _column_order(column: str) -> tuple[Any, ...]:
    protocol = re.split(r"[\[/]", column)[0]
    place = _PROTOCOL_ORDER.index(protocol) if protocol in _PROTOCOL_ORDER else len(_PROTOCOL_ORDER)
    numbers_in_order = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", column)]
    return ("@" in column, place, numbers_in_order)
