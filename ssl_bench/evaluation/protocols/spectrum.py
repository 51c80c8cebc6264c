"""Label-free spread of the training embeddings: says whether and how far they have collapsed."""

from __future__ import annotations

from typing import Any

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.diagnostics.geometry import collapse_std, effective_rank, rankme
from ssl_bench.evaluation.features import evenly_spaced
from ssl_bench.evaluation.protocol import Protocol, register_protocol
from ssl_bench.records import MetricRow


@register_protocol("spectrum", version=1)
class Spectrum(Protocol):
    """RankMe, effective rank and directional spread of the embeddings of train, no labels used.

    Higher means less collapsed, not necessarily better: compare like with like. The figures are
    bounded by the sample count and by the embedding's width, `n_test` and `embed_dim` here.

    Args:
        num_samples: At most so many samples, evenly spaced by index (25,600 in the RankMe paper).
    """

    def __init__(self, *, num_samples: int = 25_600) -> None:
        if num_samples < 2:
            raise ConfigError(f"`num_samples` must be >= 2, got {num_samples} (protocol spectrum).")
        self.num_samples = num_samples

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `rankme`, `effective_rank` and `collapse_std`, split "train"."""
        train = context.features("train")
        features = train.features[evenly_spaced(self.num_samples, len(train))].to(context.device)
        used = len(features)
        if used < 2:
            raise DataError(f"A spectrum needs at least 2 training samples, got {used}. Check the dataset's splits.")
        details = {"layer": "embedding", "view": "eval", "precision": "float64", "embed_dim": train.dim}
        figures: list[tuple[str, float, dict[str, Any]]] = [
            ("rankme", rankme(features), {"centered": False, "eps": 1e-7}),
            ("effective_rank", effective_rank(features), {"centered": True, "of": "covariance eigenvalues"}),
            ("collapse_std", collapse_std(features), {"normalized": "L2", "isotropic": train.dim**-0.5}),
        ]
        return [
            self.row(metric, value, n_test=used, split="train", note=train.note, details={**details, **settings})
            for metric, value, settings in figures
        ]
