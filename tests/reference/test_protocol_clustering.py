"""Clustering against hand-computed values, exhaustive matching and scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.protocols import clustering as module
from ssl_bench.evaluation.protocols.clustering import (
    Clustering,
    adjusted_rand_index,
    best_kmeans,
    contingency,
    kmeans,
    match,
    nearest_centroids,
    normalized_mutual_information,
    spread_centroids,
)
from tests.unit.evaluation.fakes import StubContext, clusters, splits


def table_of(found, labels, num_clusters=None, num_classes=None):
    found, labels = torch.as_tensor(found), torch.as_tensor(labels)
    return contingency(found, labels, num_clusters or int(found.max()) + 1, num_classes or int(labels.max()) + 1)


def accuracy(table):
    classes = match(table)
    return sum(row[c] for row, c in zip(table, classes, strict=True) if c >= 0) / table.sum()


LABELS = [0] * 4 + [1] * 4 + [2] * 4
FOUND = [0, 0, 0, 1, 1, 1, 2, 2, 0, 2, 2, 2]


def test_hand_computed_values():
    table = table_of(FOUND, LABELS)
    assert table.tolist() == [[3, 0, 1], [1, 2, 0], [0, 2, 3]]
    assert accuracy(table) == pytest.approx(2 / 3, abs=1e-15)
    assert normalized_mutual_information(table) == pytest.approx(0.433438077415, abs=1e-12)
    assert adjusted_rand_index(table) == pytest.approx(0.211604095563, abs=1e-12)


def test_matching_of_more_clusters_than_classes_counts_the_unmatched_as_errors():
    table = np.array([[4, 0], [0, 2], [0, 3]])
    assert match(table).tolist() == [0, -1, 1]
    assert accuracy(table) == pytest.approx(7 / 9, abs=1e-15)
    assert accuracy(table.T) == pytest.approx(7 / 9, abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_measures_equal_sklearns_and_every_matching_tried(seed):
    rng = np.random.default_rng(seed)
    labels, found = rng.integers(0, 4, 60), rng.integers(0, 5, 60)
    found[:30] = labels[:30]
    table = table_of(found, labels)
    # sums of 20 logarithms in float64
    assert normalized_mutual_information(table) == pytest.approx(normalized_mutual_info_score(labels, found), abs=1e-13)
    assert adjusted_rand_index(table) == pytest.approx(adjusted_rand_score(labels, found), abs=1e-13)
    best = max(sum(table[k, c] for c, k in enumerate(order)) for order in itertools.permutations(range(5), 4))
    assert accuracy(table) == best / 60


def test_measures_do_not_depend_on_names_or_order():
    rng = np.random.default_rng(0)
    order, names = rng.permutation(12), np.array([2, 0, 1])
    base = table_of(FOUND, LABELS)
    other = table_of(names[np.array(FOUND)][order], np.array(LABELS)[order])
    assert accuracy(other) == accuracy(base)
    assert adjusted_rand_index(other) == adjusted_rand_index(base)
    assert normalized_mutual_information(other) == pytest.approx(normalized_mutual_information(base), abs=1e-15)


def test_extreme_partitions():
    perfect = table_of([2, 2, 0, 1, 1], [0, 0, 1, 2, 2])
    one = table_of([0] * 5, [0, 0, 1, 2, 2])
    assert (accuracy(perfect), adjusted_rand_index(perfect)) == (1.0, 1.0)
    assert normalized_mutual_information(perfect) == pytest.approx(1.0, abs=1e-15)
    assert (accuracy(one), adjusted_rand_index(one), normalized_mutual_information(one)) == (0.4, 0.0, 0.0)
    for trivial in (np.array([[5]]), np.eye(4, dtype=np.int64)):  # 0 / 0, as scikit-learn has it
        assert adjusted_rand_index(trivial) == 1.0
        assert normalized_mutual_information(trivial) == pytest.approx(1.0, abs=1e-15)


def test_random_clusters_have_no_ari_but_some_nmi():
    """The standard deviation of ARI over random labelings of 2000 samples, 10 by 10, measured: 0.00067."""
    rng = np.random.default_rng(0)
    table = table_of(rng.integers(0, 10, 2000), rng.integers(0, 10, 2000))
    assert abs(adjusted_rand_index(table)) < 3 * 0.00067
    assert 0 < normalized_mutual_information(table) < 0.05


@pytest.mark.parametrize("num_clusters", [1, 3, 8])
def test_lloyd_equals_sklearns_from_the_same_centroids(num_clusters):
    x, _ = clusters(300, num_classes=4, dim=5, spread=1.5)
    x = (x - x.mean(0)).double()
    start = x[:num_clusters]
    ours = kmeans(x, start)
    theirs = SklearnKMeans(num_clusters, init=start.numpy(), n_init=1, tol=1e-4, algorithm="lloyd").fit(x.numpy())
    assert ours.converged
    assert ours.clusters.tolist() == theirs.labels_.tolist()
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-12)
    np.testing.assert_allclose(ours.centroids.numpy(), theirs.cluster_centers_, rtol=1e-10, atol=1e-12)


def test_inertia_does_not_rise_with_iterations(monkeypatch):
    x, _ = clusters(200, num_classes=6, dim=4, spread=2.0)
    x = x.double()
    monkeypatch.setattr(module, "TOLERANCE", 0.0)
    path = []
    for iterations in range(12):
        monkeypatch.setattr(module, "MAX_ITERATIONS", iterations)
        path.append(kmeans(x, x[:6]).inertia)
    assert all(after <= before * (1 + 1e-14) for before, after in itertools.pairwise(path))
    assert path[-1] < 0.9 * path[0]


def test_nearest_centroid_is_the_loops(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)
    x, _ = clusters(50, spread=2.0)
    centroids = x[:5].double()
    expected = [min(range(5), key=lambda k: sum((row - centroids[k]) ** 2)) for row in x.double()]
    assert nearest_centroids(x.double(), centroids).tolist() == expected


def test_an_empty_cluster_keeps_its_centroid():
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    found = kmeans(x, torch.tensor([[0.0], [10.0], [100.0]]))
    assert found.centroids.flatten().tolist() == [0.5, 10.5, 100.0]
    assert found.inertia == 1.0


def test_first_centroids_are_drawn_by_squared_distance():
    """From 0 the others lie at squared distances 1, 4, 16: shares 1/21, 4/21, 16/21."""
    x = torch.tensor([[0.0], [1.0], [2.0], [4.0]])

    def second(draw):
        return float(spread_centroids(x, torch.tensor([0.1, draw], dtype=torch.float64))[1])

    assert float(spread_centroids(x, torch.tensor([0.1], dtype=torch.float64))) == 0.0
    assert (second(0.0), second(0.99 / 21), second(1.01 / 21)) == (1.0, 1.0, 2.0)
    assert (second(4.99 / 21), second(5.01 / 21), second(1 - 1e-16)) == (2.0, 4.0, 4.0)
    # after 0 and 4 the nearest of them counts: 1 and 2 lie at squared distances 1 and 4
    for draw, third in ((0.99 / 5, 1.0), (1.01 / 5, 2.0), (1 - 1e-16, 2.0)):
        assert float(spread_centroids(x, torch.tensor([0.1, 0.99, draw], dtype=torch.float64))[2]) == third


def test_separated_groups_are_found_for_every_seed_and_runs_repeat():
    labels = torch.arange(60) % 2
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) + 20 * labels[:, None]
    for seed in range(10):
        best, inertias = best_kmeans(x, 2, num_restarts=1, seed=seed)
        assert accuracy(table_of(best.clusters, labels)) == 1.0
        assert inertias == [best.inertia]
    x, _ = clusters(100, num_classes=8, spread=2.0)
    best, inertias = best_kmeans(x, 8, num_restarts=6, seed=0)
    again, _ = best_kmeans(x, 8, num_restarts=6, seed=0)
    assert torch.equal(best.clusters, again.clusters)
    assert best.inertia == min(inertias)
    assert len(set(inertias)) > 1


def test_rows_and_predictions(tmp_path):
    context = StubContext(tmp_path, 3, **splits(spread=1.5))
    rows = {row.metric: row for row in Clustering().run(context)}
    assert set(rows) == {"nmi", "ari", "accuracy", "accuracy_transferred"}
    assert all(row.n_test == 30 and row.selected_on == "none" and row.higher_is_better for row in rows.values())
    assert rows["accuracy"].details["matched_on"] == "test"
    assert rows["accuracy_transferred"].details["matched_on"] == "train+validation"
    assert rows["accuracy_transferred"].value <= rows["accuracy"].value
    assert rows["nmi"].details["n_fitted"] == 90
    stored = load_file(tmp_path / "clustering_predictions.safetensors")
    for name in ("accuracy", "accuracy_transferred"):
        assert float((stored[name] == stored["labels"]).double().mean()) == rows[name].value


def test_transferred_matching_does_not_see_the_labels_of_test(tmp_path):
    sets = splits(spread=0.3)
    x, y = sets["test"]
    sets["test"] = (x, (y + 1) % 3)  # clusters found, every name wrong
    rows = {row.metric: row.value for row in Clustering().run(StubContext(tmp_path, 3, **sets))}
    assert rows["accuracy"] == 1.0
    assert rows["accuracy_transferred"] == 0.0


def test_length_of_features_has_no_effect(tmp_path):
    sets = splits(spread=1.5)
    base = [row.value for row in Clustering().run(StubContext(tmp_path, 3, **sets))]
    scaled = {name: (x * torch.linspace(0.5, 2, len(x))[:, None], y) for name, (x, y) in sets.items()}
    assert [row.value for row in Clustering().run(StubContext(tmp_path, 3, **scaled))] == base


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_constant_features_make_one_cluster(value, tmp_path):
    sets = {name: (torch.full_like(x, value), y) for name, (x, y) in splits().items()}
    rows = {row.metric: row for row in Clustering().run(StubContext(tmp_path, 3, **sets))}
    assert rows["nmi"].value == 0.0
    assert rows["ari"].value == 0.0
    assert rows["accuracy"].value == pytest.approx(1 / 3)
    assert "only 1 of 3 clusters" in rows["nmi"].note


def test_fewer_different_samples_than_clusters_leave_clusters_empty(tmp_path):
    sets = splits(num_classes=6, sizes=(3, 1, 30))
    row = Clustering().run(StubContext(tmp_path, 6, **sets))[0]
    assert row.details["num_filled_clusters"] == 4
    assert "only 4 of 6 clusters" in row.note
    x, y = sets["train"]
    sets["train"] = (x[:1].repeat(40, 1), y[:1].repeat(40))  # duplicates
    sets["validation"] = (x[1:2], y[1:2])
    assert Clustering().run(StubContext(tmp_path, 6, **sets))[0].details["num_filled_clusters"] == 2


def test_a_class_missing_in_train_or_test(tmp_path):
    sets = splits(num_classes=3)
    for split in ("train", "validation", "test"):
        x, y = splits(num_classes=3)[split]
        rows = Clustering().run(StubContext(tmp_path, 3, **{**sets, split: (x[y != 2], y[y != 2])}))
        assert all(0 <= row.value <= 1 for row in rows)


def test_one_class_in_test_has_no_nmi(tmp_path):
    sets = splits()
    sets["test"] = clusters(0, labels=torch.full((20,), 1))
    rows = {row.metric: row for row in Clustering().run(StubContext(tmp_path, 3, **sets))}
    assert rows["nmi"].value is None
    assert rows["ari"].value is None
    assert "one class" in rows["ari"].note
    assert rows["accuracy"].value > 0.5
    single = Clustering().run(StubContext(tmp_path, 1, **splits(num_classes=1)))
    assert [row.value for row in single] == [None, None, 1.0, 1.0]


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_restarts"):
        Clustering(num_restarts=0)
    sets = splits()
    sets["test"] = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(DataError, match="'test' split must hold samples"):
        Clustering().run(StubContext(tmp_path, 3, **sets))
    sets = splits()
    sets["train"][0][4, 2] = torch.nan
    with pytest.raises(DataError, match="NaN or infinity in 1 of 60"):
        Clustering().run(StubContext(tmp_path, 3, **sets))
