"""Out-of-distribution detection by frozen features: which of two test sets is the one that was trained on.

Source: scores of SSD (Sehwag et al. 2021, arXiv 2103.12051), of deep nearest neighbors (Sun et al. 2022, arXiv
2204.06507) and of energy (Liu et al. 2020, arXiv 2010.03759). Every score grows with strangeness.
Shapes: N bank samples, M queries, D features, C classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.features import FeatureSet
from ssl_bench.evaluation.other_datasets import MatchedDataset, chosen_datasets, round_trip
from ssl_bench.evaluation.protocol import Protocol, labelled, register_protocol
from ssl_bench.evaluation.protocols.knn import nearest
from ssl_bench.evaluation.protocols.linear import DEFAULT_L2_VALUES, fit_probe, top1
from ssl_bench.evaluation.softmax import flushed_denormals
from ssl_bench.records import MetricRow

CHUNK = 512
# Relative to the largest variance. Directions with less carry the float32 rounding of a forward pass (1e-5 of the
# largest deviation), which dividing by their variance would amplify.
MIN_VARIANCE = 1e-10


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that a strange sample has the larger score, equal scores counting half."""
    ordered = inside.double().sort().values
    outside = outside.double()
    below = torch.searchsorted(ordered, outside)
    at_most = torch.searchsorted(ordered, outside, right=True)
    return float((below + at_most).double().mean()) / (2 * len(ordered))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of strange samples that pass where at least 95 % of the others do, equal scores passing.

    The positives are in-distribution, and the threshold is one of their scores. Other conventions give other numbers:
    SSD interpolates the threshold, OpenOOD counts in-distribution samples among 95 % of the strange ones.
    """
    passing = math.ceil(95 * len(inside) / 100)
    threshold = inside.double().sort().values[passing - 1]
    return float((outside.double() <= threshold).double().mean())


def neighbor_distance(bank: Tensor, queries: Tensor, k: int) -> Tensor:
    """Squared Euclidean distance of unit rows to the k-th nearest of the bank, 2 - 2 cos, (M,)."""
    bank, queries = normalize(bank, eps=1e-12), normalize(queries, eps=1e-12)
    return torch.cat([2 - 2 * nearest(part, bank, k)[0][:, -1] for part in queries.split(CHUNK)])


@dataclasses.dataclass(frozen=True)
class Mahalanobis:
    """Squared Mahalanobis distance to the mean, with the covariance that divides by N, in float64.

    Directions without variance in the fitting samples are left out (a pseudo-inverse): leaving them says nothing.
    """

    mean: Tensor
    whitening: Tensor

    @classmethod
    def fit(cls, features: Tensor) -> Mahalanobis:
        """Mean and covariance of (N, D) features."""
        rows = features.double()
        mean = rows.mean(dim=0)
        variances, directions = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
        # a variance of equal rows is their rounding
        size = float(rows.square().mean(dim=0).max())
        kept = variances > max(MIN_VARIANCE * float(variances[-1]), 1e-12 * size)
        return cls(mean, directions[:, kept] / variances[kept].sqrt())

    def __call__(self, features: Tensor) -> Tensor:
        """Distances of (M, D) features, (M,)."""
        return ((features.double() - self.mean) @ self.whitening).square().sum(dim=1)


@register_protocol("ood", version=1)
class OOD(Protocol):
    """AUROC and FPR95 of telling this dataset's test images from those of other datasets, by three scores.

    All are fitted on train + validation of this dataset alone; no image of the others chooses anything.

    - `knn`: distance to the k-th nearest neighbor, L2-normalized features, no labels.
    - `mahalanobis`: distance to the mean of all L2-normalized features, no labels (SSD with one cluster; the score
      of Lee et al. 2018 is the distance to the nearest class's mean).
    - `energy`: -log sum exp of the logits of the linear probe, as protocol `linear` fits it, with labels. Logits of
      a sample are determined up to a constant only; the penalty makes weights, and the solver biases, of all
      classes sum to zero.

    Other images take this dataset's channels, size and normalization: small ones are resized whole. That leaves
    traces which give them away without any understanding of their content. Where channels or size differ,
    `control_auroc` in the details tells this dataset's own test images from themselves after a trip to the other
    format and back: far from 0.5, the rows say more of the format than of the content. A difference of native
    resolution that the trip cannot show remains.

    Args:
        datasets: Names of other datasets, or mappings with `name` and `arguments` as in a study; the test split is
            used. Rows of a folder of images are named by the folder.
        k: Which neighbor; above the number of samples, the farthest (50 in OpenOOD).
    """

    def __init__(self, *, datasets: tuple[str | Mapping[str, Any], ...], k: int = 50) -> None:
        self.datasets = chosen_datasets(datasets, protocol="ood")
        if k < 1:
            raise ConfigError(f"`k` must be >= 1, got {k} (protocol ood).")
        self.k = k

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `auroc_<score>_<dataset>` and `fpr95_<score>_<dataset>`."""
        device = context.device
        train, validation = labelled(context, "train"), labelled(context, "validation")
        scores, settings = self._scores(train, validation, context)

        def of_test(some: EvaluationContext) -> tuple[FeatureSet, dict[str, Tensor]]:
            found = some.features("test")
            with flushed_denormals():
                return found, {name: score(found.features.to(device)).cpu() for name, score in scores.items()}

        test, inside = of_test(context)
        rows = []
        for choice in self.datasets:
            matched = MatchedDataset(choice.load(), context.dataset)
            if matched.dataset.fingerprint == context.dataset.fingerprint:
                raise ConfigError(
                    f"`datasets` must be others than the one judged, but {choice.label!r} has the same content "
                    "(protocol ood)."
                )
            other, outside = of_test(context.on(matched))
            if not len(other) or not len(test):
                raise DataError(
                    f"Both test splits must hold images, got {len(test)} of {context.dataset.name!r} and {len(other)} "
                    f"of {choice.label!r}."
                )
            facts = {**matched.describe(), "fitted_on": "train+validation", "n_in": len(test), "n_out": len(other)}
            way = round_trip(context.dataset, matched.dataset)
            again = of_test(context.on(way))[1] if way else {}
            for name, own in settings.items():
                details = {**facts, **own}
                if name in again:
                    details["control_auroc"] = auroc(inside[name], again[name])
                common: dict[str, Any] = {
                    "n_test": len(test) + len(other),
                    "selected_on": "validation" if name == "energy" else "none",
                    "note": "; ".join(filter(None, (train.note, validation.note, test.note, other.note))),
                }
                passed = {**details, "positives": "in-distribution", "threshold": "order statistic"}
                rows += [
                    self.row(
                        f"auroc_{name}_{choice.label}", auroc(inside[name], outside[name]), details=details, **common
                    ),
                    self.row(
                        f"fpr95_{name}_{choice.label}",
                        fpr95(inside[name], outside[name]),
                        higher_is_better=False,
                        details=passed,
                        **common,
                    ),
                ]
        return rows

    def _scores(
        self, train: FeatureSet, validation: FeatureSet, context: EvaluationContext
    ) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, dict[str, Any]]]:
        """The scores as functions of features, and what to say of each."""
        bank = train.joined(validation).features.to(context.device)
        unit = normalize(bank, eps=1e-12)
        k = min(self.k, len(bank))
        mahalanobis = Mahalanobis.fit(unit)
        probe = fit_probe(train, validation, context, l2_values=DEFAULT_L2_VALUES, measure=top1)
        scores: dict[str, Callable[[Tensor], Tensor]] = {
            "knn": lambda features: neighbor_distance(bank, features, k),
            "mahalanobis": lambda features: mahalanobis(normalize(features, eps=1e-12)),
            "energy": lambda features: -probe.scores(features).double().logsumexp(dim=1),
        }
        settings = {
            "knn": {"k": k, "normalized": "L2"},
            "mahalanobis": {"normalized": "L2", "num_directions": mahalanobis.whitening.shape[1]},
            "energy": {"l2": probe.details["l2"], "l2_at_grid_edge": probe.details["l2_at_grid_edge"]},
        }
        return scores, settings
