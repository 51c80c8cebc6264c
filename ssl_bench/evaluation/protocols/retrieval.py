"""Retrieval of images of the same class by similarity of frozen features: nothing is trained or tuned.

Shapes: N gallery samples, M queries, B queries of a chunk, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.distributed import gather, rank, uneven_batches, world_size
from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import Protocol, labelled, missing_classes, register_protocol
from ssl_bench.random import derive_seed, epoch_permutation
from ssl_bench.records import MetricRow

CHUNK_ELEMENTS = 5_000_000  # similarities ranked at once; a ranking takes some 50 bytes of each


def average_precision(relevant: Tensor) -> Tensor:
    """Mean of j / r_j over the R relevant items, the j-th at rank r_j from 1; NaN where R is 0, (B,) float64.

    Not the trapezoid under the precision-recall curve, which the Oxford and Paris benchmarks (and DINO) use.

    Args:
        relevant: Whether each item of the whole ranking, best first, is relevant, (B, N) bool.
    """
    ranks = torch.arange(1, relevant.shape[1] + 1, device=relevant.device)
    precision = relevant.cumsum(dim=1) / ranks.double()
    return (precision * relevant).sum(dim=1) / relevant.sum(dim=1)


def found_within(relevant: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Whether one of the first k items is relevant, and the share of the relevant items among them, (B,) float64.

    Both are NaN where nothing is relevant.
    """
    total = relevant.sum(dim=1)
    found = relevant[:, :k].sum(dim=1)
    hit = torch.where(total > 0, (found > 0).double(), torch.nan)
    return hit, found / total.double()


def retrieval_figures(
    gallery: Tensor, gallery_labels: Tensor, queries: Tensor, query_labels: Tensor, *, ks: Sequence[int]
) -> Tensor:
    """Average precision, then hit and recall at each k, of every query, (M, 1 + 2 |ks|) float64; exact.

    Items are ranked by cosine similarity, equal ones by their place in the gallery. Queries are ranked in
    chunks of bounded memory.

    Args:
        gallery: (N, D); rows are normalized here, all-zero rows stay zero.
        gallery_labels: (N,).
        queries: (M, D).
        query_labels: (M,).
        ks: Numbers of first items; one above N takes all.
    """
    gallery, queries = normalize(gallery, eps=1e-12), normalize(queries, eps=1e-12)
    chunk = max(1, CHUNK_ELEMENTS // len(gallery))
    parts = [torch.empty(0, 1 + 2 * len(ks), dtype=torch.float64, device=gallery.device)]
    if len(queries):
        for own, labels in zip(queries.split(chunk), query_labels.split(chunk), strict=True):
            order = (own @ gallery.T).argsort(dim=1, descending=True, stable=True)
            relevant = gallery_labels[order] == labels[:, None]
            figures = [average_precision(relevant)]
            for k in ks:
                figures += found_within(relevant, k)
            parts.append(torch.stack(figures, dim=1))
    return torch.cat(parts)


@register_protocol("retrieval", version=1)
class Retrieval(Protocol):
    """Each test image ranks train + validation by cosine similarity; those of its class are relevant.

    `map` is the mean over queries of the average precision of the whole ranking, `map_per_class` the mean over
    classes of their means. Recall at k has two meanings, and both are here: `hit_k<k>` is that of metric learning, the
    share of queries with a relevant image among the first k; `recall_k<k>` is the share of a query's relevant images
    among the first k, at most k / R. Queries without a relevant image in the gallery are left out and counted
    in the note. The gallery is shuffled by the seed, so that equal similarities, as of collapsed features, are in
    no order that knows the classes. On several ranks each one ranks for a share of the queries.

    Args:
        ks: Numbers of first images, each reported under its own metrics.
    """

    def __init__(self, *, ks: tuple[int, ...] = (1, 5, 10)) -> None:
        if not ks or min(ks) < 1 or len(set(ks)) < len(ks):
            raise ConfigError(f"`ks` must be different whole numbers >= 1, got {list(ks)} (protocol retrieval).")
        self.ks = tuple(ks)

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `map`, `map_per_class`, `hit_k<k>` and `recall_k<k>`."""
        gallery = labelled(context, "train").joined(labelled(context, "validation"))
        test = labelled(context, "test")
        order = epoch_permutation(derive_seed(context.seed, "gallery"), 0, len(gallery))
        share = torch.arange(len(test)).tensor_split(world_size())[rank()]
        device = context.device
        found = retrieval_figures(
            gallery.features[order].to(device),
            gallery.labels[order].to(device),
            test.features[share].to(device),
            test.labels[share].to(device),
            ks=self.ks,
        )
        with uneven_batches():
            figures = gather(found).cpu()
        counted = ~figures[:, 0].isnan()
        figures, labels = figures[counted], test.labels[counted]
        num = len(labels)
        skipped = len(test) - num
        note = f"{skipped} queries have no image of their class in the gallery and are left out" if skipped else ""
        details = {
            "similarity": "cosine",
            "gallery": "train+validation",
            "n_gallery": len(gallery),
            "classes_missing_in_gallery": missing_classes(gallery.labels, context.dataset.num_classes),
        }

        def row(metric: str, values: Tensor, k: int | None = None) -> MetricRow:
            used = {} if k is None else {"k": min(k, len(gallery))}
            few = f"k = {k} is above the gallery of {len(gallery)} samples" if k and k > len(gallery) else ""
            return self.row(
                metric,
                float(values.mean()) if num else None,
                n_test=num,
                note="; ".join(filter(None, (gallery.note, test.note, note, few))),
                details={**details, **used},
            )

        per_class = [figures[labels == label, 0].mean() for label in labels.unique()]
        rows = [
            row("map", figures[:, 0]),
            row("map_per_class", torch.stack(per_class) if per_class else figures[:, 0]),
        ]
        for i, k in enumerate(self.ks):
            rows += [row(f"hit_k{k}", figures[:, 1 + 2 * i], k), row(f"recall_k{k}", figures[:, 2 + 2 * i], k)]
        return rows
