"""Linear classification of frozen features, solved to convergence.

Source: the deterministic probe of DINOv2 (arXiv 2304.07193) and of ssl-transfer (arXiv 2011.13377), with
the penalty chosen on a held-out part of train, never on test.
"""

from __future__ import annotations

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
        if not l2_values or min(l2_values) <= 0:
            raise ConfigError(f"`l2_values` must be numbers > 0, got {list(l2_values)} (protocol linear).")
        self.l2_values = tuple(sorted(set(l2_values), reverse=True))

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `top1` and `top5`."""
        num_classes = context.dataset.num_classes
        train, validation = labelled(context, "train"), labelled(context, "validation")
        with flushed_denormals():
            accuracies = self._search(train, validation, context)
            best = accuracies.index(max(accuracies))
            l2 = self.l2_values[best]
            both = train.joined(validation)
            standardize, problem, classes = _problem(both, context)
            solution = problem.solve(l2, tolerance=FINAL_TOLERANCE)
            test = labelled(context, "test")
            scores = solution.scores(standardize(test.features.to(context.device)))
            ranking = rank_classes(classes.expand(scores)).cpu()
        self.save_predictions(context, test.labels, {"top1": ranking[:, 0]})
        return self.accuracy_rows(
            ranking,
            test.labels,
            num_classes,
            selected_on="validation",
            note="; ".join(filter(None, (both.note, test.note))),
            details={
                "l2": l2,
                "l2_values": list(self.l2_values[: len(accuracies)]),
                "validation_top1": accuracies,
                "l2_at_grid_edge": len(self.l2_values) > 1 and best in (0, len(self.l2_values) - 1),
                "objective": solution.objective,
                "iterations": solution.iterations,
                "converged": solution.converged,
                "n_train": len(both),
                "num_constant_features": standardize.num_constant,
                "classes_missing_in_train": missing_classes(both.labels, num_classes),
            },
        )

    def _search(self, train: FeatureSet, validation: FeatureSet, context: EvaluationContext) -> list[float]:
        """Validation accuracy of each l2, solved from the strongest to the weakest, each from the last."""
        standardize, problem, classes = _problem(train, context)
        features = standardize(validation.features.to(context.device))
        labels = validation.labels.to(context.device)
        solution = None
        accuracies: list[float] = []
        for l2 in self.l2_values:
            solution = problem.solve(l2, start=solution, tolerance=SEARCH_TOLERANCE)
            accuracies.append(self._accuracy(classes.expand(solution.scores(features)), labels))
            if len(accuracies) - 1 - accuracies.index(max(accuracies)) == PATIENCE:
                break
        return accuracies

    @staticmethod
    def _accuracy(scores: Tensor, labels: Tensor) -> float:
        return float((rank_classes(scores)[:, 0] == labels).double().mean())


def _problem(data: FeatureSet, context: EvaluationContext) -> tuple[Standardizer, SoftmaxRegression, ClassMap]:
    features = data.features.to(context.device)
    standardize = Standardizer.fit(features)
    classes = ClassMap(data.labels.to(context.device), context.dataset.num_classes)
    return standardize, SoftmaxRegression(standardize(features), classes.dense, len(classes.present)), classes
