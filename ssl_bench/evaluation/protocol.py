"""The contract of an evaluation protocol: a frozen backbone in, metric rows out.

Rules: hyper-parameters are chosen on the validation split; the test split is read once, after the
choice; a row says how many test samples were counted and which split chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor

from ssl_bench.errors import DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.features import FeatureSet
from ssl_bench.records import MetricRow
from ssl_bench.registry import Entry, Registry
from ssl_bench.results.store import replacing

PROTOCOLS: Registry[type[Protocol]] = Registry("protocol", "ssl_bench.evaluation.protocols")
register_protocol = PROTOCOLS.register

TOP = 5  # classes ranked for top-5


class Protocol:
    """One way to measure a backbone. Keyword-only constructor arguments are its configuration.

    Attributes:
        needs: "features" if the frozen features suffice, "backbone" if the network is run or trained.
    """

    registry_entry: ClassVar[Entry]
    needs: ClassVar[str] = "features"

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Measure; the only place where the test split may be read."""
        raise NotImplementedError

    def row(self, metric: str, value: float | None, **fields: Any) -> MetricRow:
        """A row of this protocol; `fields` as in `MetricRow`."""
        entry = self.registry_entry
        fields.setdefault("higher_is_better", True)
        return MetricRow(protocol=entry.name, protocol_version=entry.version, metric=metric, value=value, **fields)

    def accuracy_rows(
        self,
        ranking: Tensor,
        labels: Tensor,
        num_classes: int,
        *,
        suffix: str = "",
        selected_on: str = "none",
        note: str = "",
        details: Mapping[str, Any],
    ) -> list[MetricRow]:
        """Top-1 and top-5 rows on the test split.

        Args:
            ranking: The best classes of each sample, best first, (M, min(5, C)), as `rank_classes` gives.
            labels: True classes, (M,).
            num_classes: Classes of the dataset; with fewer than six, top-5 says nothing and is blank.
            suffix: Appended to the metric names.
            selected_on: Split that chose the hyper-parameters.
            note: Note of both rows.
            details: Details of both rows.
        """
        from torchmetrics.functional.classification import multiclass_stat_scores

        common = {"n_test": len(labels), "selected_on": selected_on, "details": details}
        counts = multiclass_stat_scores(ranking[:, 0], labels, max(num_classes, 2), average="micro")
        top1 = int(counts[0]) / len(labels)  # from counts: the library's own ratio is rounded to float32
        top5: float | None = int((ranking == labels[:, None]).any(dim=1).sum()) / len(labels)
        top5_note = note
        if num_classes <= TOP:
            top5, reason = None, f"top-5 needs at least 6 classes, the dataset has {num_classes}"
            top5_note = "; ".join(filter(None, (note, reason)))
        return [
            self.row(f"top1{suffix}", top1, note=note, **common),
            self.row(f"top5{suffix}", top5, note=top5_note, **common),
        ]

    def save_predictions(self, context: EvaluationContext, labels: Tensor, predictions: Mapping[str, Tensor]) -> None:
        """Store each test sample's predicted class under its metric's name, for paired tests."""
        if context.writes:
            tensors = {name: value.to(torch.int64).cpu().contiguous() for name, value in predictions.items()}
            with replacing(context.work_dir / f"{self.registry_entry.name}_predictions.safetensors") as temporary:
                safetensors.torch.save_file({**tensors, "labels": labels}, temporary)


def rank_classes(scores: Tensor) -> Tensor:
    """The min(5, C) best classes of each sample, best first, (M, C) -> (M, min(5, C)); ties to the smaller id."""
    return scores.argsort(dim=1, descending=True, stable=True)[:, :TOP]


def labelled(context: EvaluationContext, split: str) -> FeatureSet:
    """Features of a split whose every label is a class of the dataset.

    Raises:
        DataError: If the split is empty or a label is not in [0, C).
    """
    features = context.features(split)
    check_labels(features.labels, context.dataset.num_classes, split)
    return features


def check_labels(labels: Tensor, num_classes: int, split: str) -> None:
    """Raise DataError unless there are labels and all are classes of the dataset."""
    if not len(labels):
        raise DataError(f"The {split!r} split must hold samples, got none. Check the dataset's splits.")
    bad = (labels < 0) | (labels >= num_classes)
    if bad.any():
        raise DataError(
            f"Labels of the {split!r} split must be in [0, {num_classes}), got {int(labels[bad][0])} at index "
            f"{int(bad.nonzero()[0])} ({int(bad.sum())} such). Fix the dataset's labels or its num_classes."
        )


def missing_classes(labels: Tensor, num_classes: int) -> list[int]:
    """Classes of the dataset without a sample."""
    return (torch.bincount(labels, minlength=num_classes) == 0).nonzero().flatten().tolist()
