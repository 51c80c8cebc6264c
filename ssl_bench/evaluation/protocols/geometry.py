"""Label-free geometry of the training embeddings: decay of the spectrum, spread, intrinsic dimension, clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.diagnostics.cluster_learnability import cluster_learnability
from ssl_bench.evaluation.diagnostics.geometry import (
    covariance_eigenvalues,
    participation_ratio,
    stable_rank,
    uniformity,
)
from ssl_bench.evaluation.diagnostics.intrinsic_dimension import (
    geometric_mean,
    local_dimension_mle,
    local_dimension_moments,
    neighbor_distances,
    two_nn,
)
from ssl_bench.evaluation.diagnostics.power_law import alpha_req
from ssl_bench.evaluation.diagnostics.spanning_tree import spanning_tree_length
from ssl_bench.evaluation.features import evenly_spaced
from ssl_bench.evaluation.protocol import Protocol, register_protocol
from ssl_bench.records import MetricRow

Figure = tuple[float, Mapping[str, Any], str]  # value (not finite: could not be measured), details, note
FIRST_RANK, LAST_RANK = 4, 100  # of the fit of alpha
LOWER_IS_BETTER = ("alpha_req", "uniformity")


@register_protocol("geometry", version=1)
class Geometry(Protocol):
    """alpha-ReQ, participation ratio, uniformity, spanning tree, local dimension, TwoNN and cluster learnability.

    All of the embeddings of train, no labels used; "spectrum" has the ranks. Every figure depends on the number
    of samples (`n_test`) and on the embedding's width: compare like with like. Spread is no merit in itself: noise
    has most of it. alpha_req is best near 1, not at 0. CLID is `diagnostics.cluster_learnability.clid` of
    `cluster_learnability` and `two_nn` over the models compared, and exists for no single one.

    Args:
        num_samples: At most so many samples, evenly spaced by index.
        k: Neighbors of the local dimensions (64 in LDReg).
    """

    def __init__(self, *, num_samples: int = 5000, k: int = 64) -> None:
        if num_samples < 2:
            raise ConfigError(f"`num_samples` must be >= 2, got {num_samples} (protocol geometry).")
        if k < 2:
            raise ConfigError(f"`k` must be >= 2, got {k} (protocol geometry).")
        self.num_samples = num_samples
        self.k = k

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """A row a figure, split "train"."""
        train = context.features("train")
        features = train.features[evenly_spaced(self.num_samples, len(train))].to(context.device)
        if len(features) < 2:
            raise DataError(
                f"Geometry needs at least 2 training samples, got {len(features)}. Check the dataset's splits."
            )
        figures = {
            **self._spectrum(features),
            **self._spread(features),
            **self._dimensions(features),
            "cluster_learnability": self._clusters(features, context.seed),
        }
        common = {"layer": "embedding", "view": "eval", "precision": "float64", "embed_dim": train.dim}
        return [
            self.row(
                metric,
                value if math.isfinite(value) else None,
                n_test=int(details.get("n_tested", len(features))),
                split="train",
                higher_is_better=metric not in LOWER_IS_BETTER,
                note="; ".join(filter(None, (train.note, note))),
                details={**common, "n_samples": len(features), **details},
            )
            for metric, (value, details, note) in figures.items()
        ]

    def _spectrum(self, features: Tensor) -> dict[str, Figure]:
        eigenvalues = covariance_eigenvalues(features)
        last = min(LAST_RANK, int((eigenvalues > 0).sum()))
        few = f"the covariance has {last} nonzero eigenvalues, the fit from rank {FIRST_RANK} needs two more"
        details = {"centered": True, "of": "covariance eigenvalues"}
        return {
            "participation_ratio": (participation_ratio(eigenvalues), details, ""),
            "stable_rank": (stable_rank(eigenvalues), details, ""),
            "alpha_req": (
                alpha_req(eigenvalues, first=FIRST_RANK, last=LAST_RANK),
                {**details, "ranks": [FIRST_RANK, last], "weights": "1 / rank", "best": 1.0},
                few if last <= FIRST_RANK else "",
            ),
        }

    def _spread(self, features: Tensor) -> dict[str, Figure]:
        directions = normalize(features.double(), eps=1e-12)
        num_zero = int((directions == 0).all(dim=1).sum())
        details = {"centered": False, "normalized": "L2"}
        note = f"{num_zero} samples have a zero embedding and lie at the origin, not on the sphere" if num_zero else ""
        length = spanning_tree_length(directions)
        return {
            "uniformity": (float(uniformity(directions, t=2.0)), {**details, "t": 2.0}, note),
            "mst_mean_edge": (length / (len(features) - 1), {**details, "mst_length": length}, note),
        }

    def _dimensions(self, features: Tensor) -> dict[str, Figure]:
        distinct = features.unique(dim=0)  # the estimates divide by distances, which a continuous law makes nonzero
        details: dict[str, Any] = {"normalized": "none", "distance": "Euclidean", "n_distinct": len(distinct)}
        local = {**details, "k": min(self.k, len(distinct) - 1), "aggregate": "geometric mean"}
        if len(distinct) < 3:
            few = f"dimensions need 3 different embeddings, there are {len(distinct)}"
            blank: Figure = (math.nan, local, few)
            return {"lid_mle": blank, "lid_moments": blank, "two_nn": (math.nan, details, few)}
        distances = neighbor_distances(distinct, local["k"])
        found: dict[str, Figure] = {}
        for metric, value, settings in (
            ("lid_mle", geometric_mean(local_dimension_mle(distances)), local),
            ("lid_moments", geometric_mean(local_dimension_moments(distances)), local),
            ("two_nn", two_nn(distances), details),
        ):
            note = "" if math.isfinite(value) else "samples have all their neighbors at one distance"
            found[metric] = (value, settings, note)
        return found

    def _clusters(self, features: Tensor, seed: int) -> Figure:
        num_clusters = math.isqrt(len(features))
        value, sizes = cluster_learnability(features, num_clusters=num_clusters, seed=seed)
        filled = int((sizes > 0).sum())
        details = {
            "normalized": "L2",
            "num_clusters": num_clusters,
            "num_filled_clusters": filled,
            "largest_cluster": int(sizes.max()),
            "k": 1,
            "distance": "cosine",
            "n_tested": len(features) // 2,
        }
        return value, details, "all samples are in one cluster" if filled == 1 else ""
