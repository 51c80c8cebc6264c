"""Linear transfer: the linear probe of the frozen backbone on other datasets, each with the metric that it is known by.

Source: Kornblith et al. 2019, arXiv 1805.08974; ssl-transfer (Ericsson et al. 2021, arXiv 2011.13377).
Shapes: n fitting samples, M samples, D features, C classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.other_datasets import DatasetChoice, MatchedDataset, chosen_datasets
from ssl_bench.evaluation.protocol import Protocol, labelled, rank_classes, register_protocol
from ssl_bench.evaluation.protocols.linear import DEFAULT_L2_VALUES, check_l2_values, fit_probe, top1
from ssl_bench.evaluation.softmax import SoftmaxRegression, SoftmaxSolution, flushed_denormals
from ssl_bench.records import MetricRow


def accuracy_per_class(scores: Tensor, labels: Tensor) -> float:
    """Mean over the classes among the labels of the share of their samples that is classified rightly."""
    right = (rank_classes(scores)[:, 0] == labels).double()
    return float(torch.stack([right[labels == label].mean() for label in labels.unique()]).mean())


def eleven_point_precision(scores: Tensor, positive: Tensor) -> float:
    """Mean over recalls 0, 0.1, ..., 1 of the best precision at that recall or above (Pascal VOC 2007).

    Samples of one score are retrieved together, so their order has no say.

    Args:
        scores: (M,).
        positive: (M,) bool, at least one.
    """
    order = scores.argsort(descending=True)
    ordered, found = scores[order], positive[order].cumsum(dim=0)
    ends = torch.cat([ordered[1:] != ordered[:-1], positive.new_ones(1)]).nonzero().flatten()
    found = found[ends]
    precision = found / (ends + 1).double()
    # in whole numbers: j of R found are a recall of i / 10 or more
    return sum(float(precision[10 * found >= i * found[-1]].max()) for i in range(11)) / 11


def map11(scores: Tensor, labels: Tensor) -> float:
    """Mean over the classes among the labels of the 11-point precision of ranking samples by the class's score."""
    classes = labels.unique().tolist()
    return sum(eleven_point_precision(scores[:, label], labels == label) for label in classes) / len(classes)


@dataclasses.dataclass(frozen=True)
class OneVsRestSolution:
    """One binary regression a class."""

    parts: tuple[SoftmaxSolution, ...]

    def scores(self, features: Tensor) -> Tensor:
        """Log odds of each class against the rest, (M, D) -> (M, C)."""
        logits = [part.scores(features) for part in self.parts]
        return torch.stack([own[:, 1] - own[:, 0] for own in logits], dim=1)

    @property
    def objective(self) -> float:
        """Mean objective of the classes."""
        return sum(part.objective for part in self.parts) / len(self.parts)

    @property
    def iterations(self) -> int:
        """Passes over the features, of all classes."""
        return sum(part.iterations for part in self.parts)

    @property
    def converged(self) -> bool:
        """Whether all are solved."""
        return all(part.converged for part in self.parts)


class OneVsRest:
    """Each class against all others, with one l2 for all; a stand-in for `SoftmaxRegression`.

    Args:
        features: (n, D).
        labels: (n,) int64 in [0, C), two different ones at least.
        num_classes: C.
    """

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        whole = SoftmaxRegression(features, labels, 2)
        self.problems = [copy.copy(whole) for _ in range(num_classes)]  # they share features and Gram matrix
        for label, problem in enumerate(self.problems):
            problem.labels = (labels == label).long()[None]

    def solve(self, l2: float, *, start: OneVsRestSolution | None = None, tolerance: float = 1e-7) -> OneVsRestSolution:
        """Minimize for one l2; see `SoftmaxRegression.solve`."""
        starts = start.parts if start else (None,) * len(self.problems)
        return OneVsRestSolution(
            tuple(
                problem.solve(l2, start=own, tolerance=tolerance)
                for problem, own in zip(self.problems, starts, strict=True)
            )
        )


METRICS: Mapping[str, tuple[Callable[[Tensor, Tensor], float], Callable[[Tensor, Tensor, int], Any]]] = {
    "top1": (top1, SoftmaxRegression),
    "accuracy_per_class": (accuracy_per_class, SoftmaxRegression),
    "map11": (map11, OneVsRest),
}


@register_protocol("transfer", version=1)
class Transfer(Protocol):
    """The linear protocol on each of several other datasets, with that dataset's own train, validation and test.

    l2 is chosen on validation by the metric that is reported, then train + validation are fitted and test is read
    once. Images take the channels, size and normalization of the dataset that the backbone was made for. Features
    are standardized, as in protocol `linear`; ssl-transfer leaves them as they are.

    A dataset's `metric` is one of

    - `top1`, the default: CIFAR-10 and -100, SVHN, STL-10, Fashion-MNIST; of others Cars, DTD, Food-101, SUN397;
    - `accuracy_per_class`, which weighs classes alike: Aircraft, Caltech-101, Flowers, Pets;
    - `map11`, the mean over classes of the 11-point average precision of one binary regression a class: VOC 2007.
      Images have one class here, as VOC's do not.

    Figures under different metrics must not be averaged.

    Args:
        datasets: Names, or mappings with `name`, `arguments` and `metric`. Rows of a folder of images are named by
            the folder.
        l2_values: The grid of penalties.
    """

    def __init__(
        self, *, datasets: tuple[str | Mapping[str, Any], ...], l2_values: tuple[float, ...] = DEFAULT_L2_VALUES
    ) -> None:
        self.datasets = chosen_datasets(datasets, protocol="transfer", options=("metric",))
        for choice in self.datasets:
            if (metric := choice.options.get("metric", "top1")) not in METRICS:
                raise ConfigError(
                    f"Unknown metric {metric!r} of {choice.label!r} (protocol transfer).{did_you_mean(metric, METRICS)}"
                )
        self.l2_values = check_l2_values(l2_values, "transfer")

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """A row `<metric>_<dataset>` for each dataset."""
        return [self._row(choice, context) for choice in self.datasets]

    def _row(self, choice: DatasetChoice, context: EvaluationContext) -> MetricRow:
        matched = MatchedDataset(choice.load(), context.dataset)
        other = context.on(matched)
        metric = choice.options.get("metric", "top1")
        measure, solver = METRICS[metric]
        train, validation = labelled(other, "train"), labelled(other, "validation")
        value, note, details = None, "", {}
        if solver is OneVsRest and len(train.labels.unique()) < 2:
            note = "a class against the rest needs two classes in train, there is one"
            test = labelled(other, "test")
        else:
            probe = fit_probe(train, validation, other, l2_values=self.l2_values, measure=measure, solver=solver)
            details = probe.details
            test = labelled(other, "test")
            with flushed_denormals():
                value = measure(probe.scores(test.features.to(context.device)).cpu(), test.labels)
        return self.row(
            f"{metric}_{choice.label}",
            value,
            n_test=len(test),
            selected_on="validation",
            note="; ".join(filter(None, (train.note, validation.note, test.note, note))),
            details={**matched.describe(), **details},
        )
