"""Retrieval against hand-computed values, loops written from the definition, and scikit-learn."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.protocols import retrieval as module
from ssl_bench.evaluation.protocols.retrieval import Retrieval, average_precision, found_within, retrieval_figures
from tests.unit.evaluation.fakes import StubContext, clusters, splits


def ranking(*relevant):
    return torch.tensor([relevant], dtype=torch.bool)


def loop_figures(gallery, gallery_labels, query, label, ks):
    """Float64 loops: order by (cosine desc, index asc); AP, then hit and recall at each k; None where R is 0."""

    def unit(v):
        norm = math.sqrt(sum(a * a for a in v))
        return [a / max(norm, 1e-12) for a in v]

    q = unit(query)
    similarities = [sum(a * b for a, b in zip(q, unit(row), strict=True)) for row in gallery]
    order = sorted(range(len(gallery)), key=lambda i: (-similarities[i], i))
    ranks = [place + 1 for place, i in enumerate(order) if gallery_labels[i] == label]
    if not ranks:
        return None
    figures = [sum((j + 1) / r for j, r in enumerate(ranks)) / len(ranks)]
    for k in ks:
        found = sum(r <= k for r in ranks)
        figures += [float(found > 0), found / len(ranks)]
    return figures


def test_hand_computed_values():
    relevant = ranking(1, 0, 1, 0, 0, 1)
    assert float(average_precision(relevant)) == pytest.approx(0.722222222222, abs=1e-12)
    hit, recall = found_within(relevant, 2)
    assert (float(hit), float(recall)) == (1.0, pytest.approx(1 / 3))
    assert float(found_within(relevant, 5)[1]) == pytest.approx(0.666666666667, abs=1e-12)
    assert float(average_precision(ranking(1, 0, 1))) == pytest.approx(0.833333333333, abs=1e-12)


def test_perfect_and_worst_rankings():
    assert float(average_precision(ranking(1, 1, 1, 0, 0))) == 1.0
    assert float(average_precision(ranking(0, 0, 0, 0, 1))) == 0.2
    assert [float(v) for v in found_within(ranking(0, 0, 1), 2)] == [0.0, 0.0]
    assert [float(v) for v in found_within(ranking(0, 0, 1), 9)] == [1.0, 1.0]


def test_nothing_relevant_has_no_figures():
    assert bool(average_precision(ranking(0, 0)).isnan())
    assert all(bool(v.isnan()) for v in found_within(ranking(0, 0), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_figures_equal_the_loops(dtype):
    gallery, gallery_labels = clusters(70, num_classes=5, spread=2.0)
    queries, labels = clusters(25, num_classes=5, spread=2.0, seed=1)
    labels[3] = 9  # not in the gallery
    ks = (1, 4, 70, 500)
    found = retrieval_figures(gallery.to(dtype), gallery_labels, queries.to(dtype), labels, ks=ks)
    for figures, query, label in zip(found, queries.double().tolist(), labels.tolist(), strict=True):
        expected = loop_figures(gallery.double().tolist(), gallery_labels.tolist(), query, label, ks)
        if expected is None:
            assert bool(figures.isnan().all())
        else:  # float64 sums of 14 terms; no two of these similarities are within a float32 rounding
            assert figures.tolist() == pytest.approx(expected, abs=1e-13)


def test_average_precision_is_sklearns():
    """Without ties both are the same step-wise area."""
    gallery, gallery_labels = clusters(70, num_classes=5, spread=2.0)
    queries, labels = clusters(10, num_classes=5, spread=2.0, seed=1)
    gallery, queries = gallery.double(), queries.double()
    found = retrieval_figures(gallery, gallery_labels, queries, labels, ks=(1,))[:, 0]
    cosine = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(gallery).T
    expected = [
        average_precision_score((gallery_labels == label).numpy(), row.numpy())
        for label, row in zip(labels, cosine, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-13)


def test_rotation_scale_order_and_chunks_leave_the_figures(monkeypatch):
    gallery, gallery_labels = clusters(60, spread=1.5)
    queries, labels = clusters(21, seed=1, spread=1.5)
    gallery, queries = gallery.double(), queries.double()
    base = retrieval_figures(gallery, gallery_labels, queries, labels, ks=(1, 5))
    generator = torch.Generator().manual_seed(2)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    order = torch.randperm(60, generator=generator)
    scale = torch.rand(60, 1, generator=generator, dtype=torch.float64) + 0.1
    for changed in (
        retrieval_figures(gallery @ rotation, gallery_labels, queries @ rotation, labels, ks=(1, 5)),
        retrieval_figures(gallery * scale, gallery_labels, 3 * queries, labels, ks=(1, 5)),
        retrieval_figures(gallery[order], gallery_labels[order], queries, labels, ks=(1, 5)),
    ):
        assert torch.equal(changed, base)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)  # one query at a time
    assert torch.equal(retrieval_figures(gallery, gallery_labels, queries, labels, ks=(1, 5)), base)


def test_equal_similarities_keep_the_order_of_the_gallery():
    gallery = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # duplicates, in direction
    labels = torch.tensor([1, 0, 0, 0])
    found = retrieval_figures(gallery, labels, torch.tensor([[3.0, 0.0]]), torch.tensor([0]), ks=(1,))
    assert float(found[0, 0]) == pytest.approx((1 / 2 + 2 / 3 + 3 / 4) / 3, abs=1e-15)
    zero = retrieval_figures(torch.zeros(4, 2), labels, torch.zeros(1, 2), torch.tensor([1]), ks=(1,))
    assert zero.tolist() == [[1.0, 1.0, 1.0]]


def test_random_features_find_the_share_of_the_class():
    """Precision at 1 is a coin of the class's share, 0.2: 3 standard errors of 1000 queries."""
    generator = torch.Generator().manual_seed(0)
    gallery, queries = torch.randn(500, 16, generator=generator), torch.randn(1000, 16, generator=generator)
    found = retrieval_figures(gallery, torch.arange(500) % 5, queries, torch.arange(1000) % 5, ks=(1,))
    assert abs(float(found[:, 1].mean()) - 0.2) < 3 * (0.2 * 0.8 / 1000) ** 0.5


def test_rows_state_their_settings(tmp_path):
    context = StubContext(tmp_path, 3, **splits(spread=2.0))
    rows = {row.metric: row for row in Retrieval(ks=(1, 10)).run(context)}
    assert set(rows) == {"map", "map_per_class", "hit_k1", "recall_k1", "hit_k10", "recall_k10"}
    assert all(row.n_test == 30 and row.selected_on == "none" and not row.note for row in rows.values())
    assert context.asked == ["train", "validation", "test"]
    assert rows["map"].details["n_gallery"] == 90
    assert rows["hit_k1"].value < rows["hit_k10"].value
    assert rows["recall_k1"].value == pytest.approx(rows["hit_k1"].value / 30, abs=1e-15)  # R = 30
    assert rows["recall_k10"].details["k"] == 10


def test_rows_are_means_over_the_queries_whatever_the_seed(tmp_path):
    sets = splits(spread=2.0)
    gallery, labels = (torch.cat([sets["train"][i], sets["validation"][i]]) for i in (0, 1))
    expected = retrieval_figures(gallery, labels, *sets["test"], ks=(1, 5, 10)).mean(dim=0).tolist()
    for seed in (0, 1):  # without ties the order of the gallery has no effect
        rows = {row.metric: row.value for row in Retrieval().run(StubContext(tmp_path, 3, **sets, seed=seed))}
        names = ("map", "hit_k1", "recall_k1", "hit_k5", "recall_k5", "hit_k10", "recall_k10")
        assert [rows[name] for name in names] == pytest.approx(expected, abs=1e-13)
    assert rows["map"] > 0.5


def test_map_per_class_weighs_classes_alike(tmp_path):
    sets = splits(spread=2.0)
    x, y = sets["test"]
    keep = torch.cat([(y == 0).nonzero().flatten(), (y == 1).nonzero().flatten()[:2]])
    rows = {}
    for name, test in (("all", (x[keep], y[keep])), ("0", (x[y == 0], y[y == 0])), ("1", (x[keep[10:]], y[keep[10:]]))):
        found = Retrieval().run(StubContext(tmp_path, 3, **{**sets, "test": test}))
        rows[name] = {row.metric: row.value for row in found}
    assert rows["all"]["map_per_class"] == pytest.approx((rows["0"]["map"] + rows["1"]["map"]) / 2, abs=1e-14)
    assert rows["all"]["map"] == pytest.approx((10 * rows["0"]["map"] + 2 * rows["1"]["map"]) / 12, abs=1e-14)
    assert rows["all"]["map"] != pytest.approx(rows["all"]["map_per_class"], abs=1e-3)


def test_a_class_missing_in_the_gallery_is_left_out_of_the_mean(tmp_path):
    sets = splits(spread=2.0)
    for split in ("train", "validation"):
        x, y = sets[split]
        sets[split] = (x[y != 2], y[y != 2])
    row = Retrieval().run(StubContext(tmp_path, 3, **sets))[0]
    assert row.n_test == 20
    assert "10 queries have no image" in row.note
    assert row.details["classes_missing_in_gallery"] == [2]
    x, y = sets["test"]
    others = {
        row.metric: row.value
        for row in Retrieval().run(StubContext(tmp_path, 3, **{**sets, "test": (x[y == 2], y[y == 2])}))
    }
    assert set(others.values()) == {None}
    x, y = splits()["test"]
    kept = Retrieval().run(StubContext(tmp_path, 3, **{**splits(), "test": (x[y != 0], y[y != 0])}))  # missing in test
    assert kept[0].n_test == 20


def test_k_above_the_gallery_takes_all_and_says_so(tmp_path):
    rows = {row.metric: row for row in Retrieval(ks=(50,)).run(StubContext(tmp_path, 3, **splits(sizes=(6, 3, 9))))}
    assert (rows["hit_k50"].value, rows["recall_k50"].value) == (1.0, 1.0)
    assert rows["hit_k50"].details["k"] == 9
    assert "gallery of 9" in rows["hit_k50"].note
    assert not rows["map"].note


def test_constant_features_are_at_chance_whatever_the_order_of_the_files(tmp_path):
    """Without the shuffle, files sorted by class would give the classes average precisions near 1 and 0.31.

    Over random orders of N items with R relevant, an item at rank i is relevant with probability R / N, and then
    1 + (i - 1) (R - 1) / (N - 1) are among the first i: the mean of AP is the mean over i of that, divided by i.
    """
    labels = torch.arange(400) // 200
    ones = torch.ones(400, 4)
    sets = {"train": (ones[:399], labels[:399]), "validation": (ones[399:], labels[399:]), "test": (ones, labels)}
    expected = sum(1 / i + (i - 1) / i * 199 / 399 for i in range(1, 401)) / 400
    orders = torch.rand(2000, 400, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    sampled = average_precision(labels[orders] == 0)
    deviation = float(sampled.std())
    assert float(sampled.mean()) == pytest.approx(expected, abs=4 * deviation / 2000**0.5)
    values = {}
    for seed in range(3):
        rows = Retrieval().run(StubContext(tmp_path, 2, **sets, seed=seed))
        values[seed] = rows[0].value
        # the mean of the two classes' figures varies less than one of them
        assert abs(values[seed] - expected) < 4 * deviation
    assert len(set(values.values())) == 3
    in_order = average_precision(torch.stack([labels == 0, labels == 1]))
    assert in_order.tolist() == pytest.approx([1.0, 0.31], abs=5e-3)


def test_one_class_only(tmp_path):
    rows = Retrieval().run(StubContext(tmp_path, 1, **splits(num_classes=1)))
    assert rows[0].value == 1.0
    assert rows[1].value == 1.0


def test_bad_input_is_refused(tmp_path):
    for ks in ((), (0,), (5, 5)):
        with pytest.raises(ConfigError, match="ks"):
            Retrieval(ks=ks)
    sets = splits()
    sets["train"][0][4, 2] = torch.nan
    with pytest.raises(DataError, match="NaN or infinity in 1 of 60"):
        Retrieval().run(StubContext(tmp_path, 3, **sets))
    sets = splits()
    sets["test"] = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(DataError, match="'test' split must hold samples"):
        Retrieval().run(StubContext(tmp_path, 3, **sets))
