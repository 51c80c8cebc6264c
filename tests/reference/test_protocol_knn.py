"""k-NN against loops written from the definition, and scikit-learn."""

import math

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from ssl_bench.evaluation.protocols.knn import knn_rankings
from tests.unit.evaluation.fakes import clusters


def loop_ranking(bank, labels, query, k, temperature, num_classes):
    """Float64 loops: order by (similarity desc, index asc), vote, order by (score desc, class asc)."""

    def unit(v):
        norm = math.sqrt(sum(a * a for a in v))
        return [a / max(norm, 1e-12) for a in v]

    q = unit(query)
    similarities = [sum(a * b for a, b in zip(q, unit(row), strict=True)) for row in bank]
    nearest = sorted(range(len(bank)), key=lambda i: (-similarities[i], i))[:k]
    scores = [0.0] * num_classes
    for i in nearest:
        scores[labels[i]] += math.exp(similarities[i] / temperature)
    return sorted(range(num_classes), key=lambda c: (-scores[c], c))[:5]


@pytest.mark.parametrize("k", [1, 5, 20, 80, 500])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_rankings_equal_the_loops(k, temperature):
    bank, labels = clusters(80, num_classes=7, dim=5, spread=2.0)
    queries, _ = clusters(25, num_classes=7, dim=5, spread=2.0, seed=1)
    found = knn_rankings(bank.double(), labels, queries.double(), ks=(k,), temperature=temperature, num_classes=7)[k]
    expected = [
        loop_ranking(bank.double().tolist(), labels.tolist(), query, k, temperature, 7)
        for query in queries.double().tolist()
    ]
    assert found.tolist() == expected


def test_predictions_equal_sklearns():
    bank, labels = clusters(200, num_classes=4, dim=8, spread=2.0)
    queries, _ = clusters(100, num_classes=4, dim=8, spread=2.0, seed=1)
    reference = KNeighborsClassifier(
        20, metric="cosine", weights=lambda d: torch.exp((1 - torch.tensor(d)) / 0.1).numpy()
    )
    expected = reference.fit(bank.double().numpy(), labels.numpy()).predict(queries.double().numpy())
    found = knn_rankings(bank.double(), labels, queries.double(), ks=(20,), temperature=0.1, num_classes=4)[20]
    assert found[:, 0].tolist() == expected.tolist()


def test_random_features_give_chance():
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(500, 16, generator=generator), torch.randn(1000, 16, generator=generator)
    labels, truth = torch.randint(5, (500,), generator=generator), torch.randint(5, (1000,), generator=generator)
    found = knn_rankings(bank, labels, queries, ks=(20,), temperature=0.07, num_classes=5)[20]
    accuracy = float((found[:, 0] == truth).double().mean())
    assert abs(accuracy - 0.2) < 3 * (0.2 * 0.8 / 1000) ** 0.5
