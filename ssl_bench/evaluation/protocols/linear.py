"""Linear classification of frozen features, solved to convergence.

Source: the deterministic probe of DINOv2 (arXiv 2304.07193) and of ssl-transfer (arXiv 2011.13377), with
the penalty chosen on a held-out part of train, never on test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.features import FeatureSet
from ssl_bench.evaluation.protocol import Protocol, labelled, missing_classes, rank_classes, register_protocol
from ssl_bench.evaluation.softmax import ClassMap, SoftmaxRegression, Standardizer, flushed_denormals
from ssl_bench.records import MetricRow

SEARCH_TOLERANCE = 1e-5  # relative; accuracy on validation does not move below it
FINAL_TOLERANCE = 1e-7
PATIENCE = 3  # the search ends when so many successive penalties did not beat the best one
DEFAULT_L2_VALUES = tuple(10 ** (-half / 2) for half in range(13))  # 1 to 1e-6 in half decades


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """A probe fitted on train + validation with the l2 that validation chose.

    Attributes:
        details: What was chosen from what, and how the fit went; JSON types.
    """

    standardize: Standardizer
    classes: ClassMap
    solution: Any
    details: dict[str, Any]

    def scores(self, features: Tensor) -> Tensor:
        """Scores of the dataset's classes, (M, D) -> (M, C); minus infinity for those without a fitting sample."""
        return self.classes.expand(self.solution.scores(self.standardize(features)))


def fit_probe(
    train: FeatureSet,
    validation: FeatureSet,
    context: EvaluationContext,
    *,
    l2_values: tuple[float, ...],
    measure: Callable[[Tensor, Tensor], float],
    solver: Callable[[Tensor, Tensor, int], Any] = SoftmaxRegression,
) -> LinearProbe:
    """Choose l2 on validation, then fit train + validation.

    Args:
        train: Fits the probes of the search.
        validation: Chooses.
        context: Its device computes, its dataset says how many classes there are.
        l2_values: Penalties, the strongest first.
        measure: Figure of merit of (M, C) scores with (M,) labels; the larger l2 wins a tie.
        solver: Makes a problem of features, labels and a number of classes; see `SoftmaxRegression`.
    """

    def problem(data: FeatureSet) -> tuple[Standardizer, ClassMap, Any]:
        features = data.features.to(context.device)
        standardize = Standardizer.fit(features)
        classes = ClassMap(data.labels.to(context.device), context.dataset.num_classes)
        return standardize, classes, solver(standardize(features), classes.dense, len(classes.present))

    with flushed_denormals():
        standardize, classes, searched = problem(train)
        features = standardize(validation.features.to(context.device))
        labels = validation.labels.to(context.device)
        solution = None
        figures: list[float] = []
        for l2 in l2_values:  # from the strongest to the weakest, each from the last
            solution = searched.solve(l2, start=solution, tolerance=SEARCH_TOLERANCE)
            figures.append(measure(classes.expand(solution.scores(features)), labels))
            if len(figures) - 1 - figures.index(max(figures)) == PATIENCE:
                break
        best = figures.index(max(figures))
        both = train.joined(validation)
        standardize, classes, final = problem(both)
        solution = final.solve(l2_values[best], tolerance=FINAL_TOLERANCE)
    details = {
        "l2": l2_values[best],
        "l2_values": list(l2_values[: len(figures)]),
        f"validation_{measure.__name__}": figures,
        "l2_at_grid_edge": len(l2_values) > 1 and best in (0, len(l2_values) - 1),
        "objective": solution.objective,
        "iterations": solution.iterations,
        "converged": solution.converged,
        "n_train": len(both),
        "num_constant_features": standardize.num_constant,
        "classes_missing_in_train": missing_classes(both.labels, context.dataset.num_classes),
    }
    return LinearProbe(standardize, classes, solution, details)


def top1(scores: Tensor, labels: Tensor) -> float:
    """Share of the samples whose class has the best score; equal scores go to the smaller class."""
    return float((rank_classes(scores)[:, 0] == labels).double().mean())


def check_l2_values(l2_values: tuple[float, ...], protocol: str) -> tuple[float, ...]:
    """The penalties in the order of the search; raises ConfigError unless all are above 0."""
    if not l2_values or min(l2_values) <= 0:
        raise ConfigError(f"`l2_values` must be numbers > 0, got {list(l2_values)} (protocol {protocol}).")
    return tuple(sorted(set(l2_values), reverse=True))


@register_protocol("linear", version=1)
class Linear(Protocol):
    """Softmax regression on standardized features; l2 chosen on validation, refit on train + validation.

    Objective: mean cross-entropy + (l2 / 2) ||W||^2, the weights of all classes penalized, the bias free
    (scikit-learn's C is 1 / (n l2)). Standardization uses the fitting samples' statistics. The grid is
    walked from the strongest penalty, each solved from the one before, until three successive values
    are no better than the best; equal accuracies go to the larger l2. The test split is read once,
    after the choice.

    Args:
        l2_values: The grid of penalties.
    """

    def __init__(self, *, l2_values: tuple[float, ...] = DEFAULT_L2_VALUES) -> None:
        self.l2_values = check_l2_values(l2_values, "linear")

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `top1` and `top5`."""
        train, validation = labelled(context, "train"), labelled(context, "validation")
        probe = fit_probe(train, validation, context, l2_values=self.l2_values, measure=top1)
        test = labelled(context, "test")
        with flushed_denormals():
            ranking = rank_classes(probe.scores(test.features.to(context.device))).cpu()
        self.save_predictions(context, test.labels, {"top1": ranking[:, 0]})
        return self.accuracy_rows(
            ranking,
            test.labels,
            context.dataset.num_classes,
            selected_on="validation",
            note="; ".join(filter(None, (train.note, validation.note, test.note))),
            details=probe.details,
        )
