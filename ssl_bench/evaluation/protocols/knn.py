"""Weighted k-nearest-neighbor classification of frozen features: nothing is trained or tuned.

Source: Wu et al. 2018, arXiv 1805.01978, eq. 15; k and temperature of DINO, arXiv 2104.14294.
Shapes: N bank samples, M queries, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.distributed import gather, rank, uneven_batches, world_size
from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import Protocol, labelled, missing_classes, rank_classes, register_protocol
from ssl_bench.records import MetricRow

CHUNK_ELEMENTS = 50_000_000  # similarities held at once: 200 MB of float32
MAX_CHUNK = 1024  # larger chunks gain nothing


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most similar bank rows of each query, exact and in a defined order.

    Order: similarity (as computed in the inputs' precision) descending, then bank index ascending;
    this also decides which of several equal rows are among the k.

    Args:
        queries: (B, D).
        bank: (N, D).
        k: Number of neighbors, at most N.

    Returns:
        Similarities and bank indices, both (B, k).
    """
    similarities = queries @ bank.T
    values, indices = similarities.topk(min(k + 1, len(bank)), dim=1)
    if values.shape[1] > k:
        for row in (values[:, k - 1] == values[:, k]).nonzero().flatten().tolist():
            # topk chooses freely among equals at the border, so fill up with the first of them
            border = values[row, k - 1]
            above = (similarities[row] > border).nonzero().flatten()
            equal = (similarities[row] == border).nonzero().flatten()
            indices[row, :k] = torch.cat([above, equal])[:k]
        indices = indices[:, :k]
    indices = indices.sort(dim=1).values
    values = similarities.gather(1, indices)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, order)


def class_scores(similarities: Tensor, labels: Tensor, *, num_classes: int, temperature: float) -> Tensor:
    """Sum of exp((similarity - largest similarity) / temperature) by class, float64.

    The shift multiplies all scores of a query by one constant and keeps them in (0, k].

    Args:
        similarities: (B, k), largest first.
        labels: Classes of the neighbors, (B, k).
        num_classes: C.
        temperature: Scale of the similarities, > 0.

    Returns:
        (B, C).
    """
    weights = ((similarities - similarities[:, :1]).double() / temperature).exp()
    return weights.new_zeros(len(labels), num_classes).scatter_add_(1, labels, weights)


def knn_rankings(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    ks: Sequence[int],
    temperature: float,
    num_classes: int,
) -> Mapping[int, Tensor]:
    """Ranked classes of each query for every k, (M, min(5, C)) each; exact, in bounded memory.

    Args:
        bank: (N, D); rows are normalized here, all-zero rows stay zero.
        bank_labels: (N,).
        queries: (M, D).
        ks: Numbers of neighbors; one above N uses N.
        temperature: Scale of the similarities.
        num_classes: C, of the dataset.
    """
    bank, queries = normalize(bank, eps=1e-12), normalize(queries, eps=1e-12)
    largest = min(max(ks), len(bank))
    chunk = max(1, min(MAX_CHUNK, CHUNK_ELEMENTS // len(bank)))
    rankings: dict[int, list[Tensor]] = {k: [] for k in ks}
    for part in queries.split(chunk) if len(queries) else ():
        similarities, indices = nearest(part, bank, largest)
        labels = bank_labels[indices]
        for k in ks:
            scores = class_scores(similarities[:, :k], labels[:, :k], num_classes=num_classes, temperature=temperature)
            rankings[k].append(rank_classes(scores))
    empty = bank_labels.new_empty(0, min(5, num_classes))
    return {k: torch.cat([empty, *parts]) for k, parts in rankings.items()}


@register_protocol("knn", version=1)
class KNN(Protocol):
    """Weighted cosine k-NN on train + validation; every k is reported and none is chosen.

    Nothing is tuned, so validation joins the bank. Equal similarities are ordered by bank index, equal
    class scores by class id. On several ranks each one classifies a share of the queries.

    Args:
        ks: Numbers of neighbors, each reported under its own metric.
        temperature: A neighbor's vote is exp(cosine / temperature).
    """

    def __init__(self, *, ks: tuple[int, ...] = (20, 200), temperature: float = 0.07) -> None:
        if not ks or min(ks) < 1 or len(set(ks)) < len(ks):
            raise ConfigError(f"`ks` must be different whole numbers >= 1, got {list(ks)} (protocol knn).")
        if not temperature > 0:
            raise ConfigError(f"`temperature` must be > 0, got {temperature} (protocol knn).")
        self.ks = tuple(ks)
        self.temperature = temperature

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `top1_k<k>` and `top5_k<k>`."""
        num_classes = context.dataset.num_classes
        bank = labelled(context, "train").joined(labelled(context, "validation"))
        test = labelled(context, "test")
        share = torch.arange(len(test)).tensor_split(world_size())[rank()]
        device = context.device
        found = knn_rankings(
            bank.features.to(device),
            bank.labels.to(device),
            test.features[share].to(device),
            ks=self.ks,
            temperature=self.temperature,
            num_classes=num_classes,
        )
        with uneven_batches():
            rankings = {k: gather(ranking).cpu() for k, ranking in found.items()}
        rows = []
        for k in self.ks:
            used = min(k, len(bank))
            few = f"k = {k} is above the bank of {used} samples, all of them vote" if used < k else ""
            rows += self.accuracy_rows(
                rankings[k],
                test.labels,
                num_classes,
                suffix=f"_k{k}",
                note="; ".join(filter(None, (bank.note, test.note, few))),
                details={
                    "k": used,
                    "temperature": self.temperature,
                    "bank": "train+validation",
                    "n_bank": len(bank),
                    "classes_missing_in_bank": missing_classes(bank.labels, num_classes),
                },
            )
        self.save_predictions(context, test.labels, {f"top1_k{k}": rankings[k][:, 0] for k in self.ks})
        return rows
