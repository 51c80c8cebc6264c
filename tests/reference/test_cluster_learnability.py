"""Cluster learnability against plain loops and scikit-learn, and CLID of a set of models."""

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import normalize

from ssl_bench.evaluation.diagnostics.cluster_learnability import ITERATIONS, clid, cluster_learnability
from ssl_bench.random import epoch_permutation
from tests.unit.evaluation.fakes import clusters


def loops(features, num_clusters, seed):
    """Spherical k-means sample by sample, then scikit-learn's nearest neighbor."""
    rows = normalize(features.double())
    order = epoch_permutation(seed, 0, len(rows)).tolist()
    centers = [rows[i] for i in order[:num_clusters]]
    for step in range(ITERATIONS + 1):
        assigned = [max(range(num_clusters), key=lambda c: float(row @ centers[c])) for row in rows]
        if step < ITERATIONS:
            for c in range(num_clusters):
                members = [row for row, a in zip(rows, assigned, strict=True) if a == c]
                if members:
                    mean = torch.stack(members).mean(0)
                    centers[c] = mean / mean.norm()
    half = len(rows) // 2
    knn = KNeighborsClassifier(1, metric="cosine")
    knn.fit(rows[order[half:]].numpy(), [assigned[i] for i in order[half:]])
    found = knn.predict(rows[order[:half]].numpy()).tolist()
    return sum(a == assigned[i] for a, i in zip(found, order[:half], strict=True)) / half


@pytest.mark.parametrize("seed", [0, 1])
def test_the_accuracy_equals_the_loops(seed):
    x = torch.randn(61, 4, generator=torch.Generator().manual_seed(seed))
    found, sizes = cluster_learnability(x, num_clusters=7, seed=seed)
    assert found == pytest.approx(loops(x, 7, seed), abs=1e-12)
    assert 0.3 < found < 1  # the data must be able to tell a wrong answer
    assert sizes.sum() == 61


def test_tight_clusters_are_learned_and_noise_is_not():
    tight, _ = clusters(200, num_classes=5, dim=10, spread=0.05)
    noise = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert cluster_learnability(tight, num_clusters=5, seed=0)[0] > 0.95
    assert cluster_learnability(noise, num_clusters=14, seed=0)[0] < 0.6


def test_scale_and_rotation_leave_the_accuracy_and_the_seed_chooses_the_halves():
    x = torch.randn(100, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    base = cluster_learnability(x, num_clusters=10, seed=0)[0]
    assert cluster_learnability(3 * x @ turn, num_clusters=10, seed=0)[0] == base
    assert len({cluster_learnability(x, num_clusters=10, seed=seed)[0] for seed in range(4)}) > 1


def test_collapsed_features_are_one_cluster():
    accuracy, sizes = cluster_learnability(torch.full((20, 3), 0.2), num_clusters=4, seed=0)
    assert accuracy == 1.0
    assert sorted(sizes.tolist()) == [0, 0, 0, 20]
    assert cluster_learnability(torch.zeros(20, 3), num_clusters=4, seed=0)[0] == 1.0


def test_clid_adds_standardized_figures():
    learnability, dimension = [0.5, 0.8, 0.7], [10.0, 12.0, 30.0]
    figures = torch.tensor([learnability, dimension], dtype=torch.float64).T.numpy()
    expected = StandardScaler().fit_transform(figures).sum(axis=1)
    assert clid(learnability, dimension) == pytest.approx(expected.tolist(), abs=1e-12)
    assert clid([0.1, 0.1, 0.1], dimension) == pytest.approx(
        StandardScaler().fit_transform(figures)[:, 1].tolist(), abs=1e-12
    )
    with pytest.raises(ValueError, match="at least 2 models"):
        clid([0.5], [10.0])
    with pytest.raises(ValueError, match="2 cluster learnabilities and 3"):
        clid([0.5, 0.6], dimension)
