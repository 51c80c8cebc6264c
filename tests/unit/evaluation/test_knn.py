import pytest
import torch
from safetensors.torch import load_file

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.protocols import knn as module
from ssl_bench.evaluation.protocols.knn import KNN, class_scores, knn_rankings, nearest
from tests.unit.evaluation.fakes import StubContext, clusters, splits


def at_angles(*cosines):
    c = torch.tensor(cosines, dtype=torch.float64)
    return torch.stack([c, (1 - c.square()).sqrt()], dim=1)


QUERY = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
BANK, BANK_LABELS = at_angles(0.9, 0.8, 0.75), torch.tensor([0, 1, 1])  # A, B, B


def predict(k, temperature, bank=BANK, labels=BANK_LABELS, queries=QUERY, num_classes=2):
    rankings = knn_rankings(bank, labels, queries, ks=(k,), temperature=temperature, num_classes=num_classes)
    return rankings[k][:, 0].tolist()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.07, [383518.3920860, 136904.6380992]),
        (0.1, [8103.083927575, 4789.000401498]),
        (0.5, [6.049647464413, 9.434721494733]),
    ],
)
def test_scores_are_the_hand_computed_ones_up_to_the_shift(temperature, expected):
    similarities, indices = nearest(QUERY, BANK, 3)
    scores = class_scores(similarities, BANK_LABELS[indices], num_classes=2, temperature=temperature)
    shift = torch.exp(torch.tensor(0.9 / temperature, dtype=torch.float64))
    torch.testing.assert_close(scores[0] * shift, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)


def test_votes_switch_with_temperature_and_k():
    assert predict(3, 0.07) == [0]
    assert predict(3, 0.1) == [0]
    assert predict(3, 0.5) == [1]
    switch = 0.177809657502
    assert predict(3, switch * (1 - 1e-9)) == [0]
    assert predict(3, switch * (1 + 1e-9)) == [1]
    assert predict(1, 0.5) == [0]
    assert predict(3, 1e9) == [1]  # unweighted majority


def test_temperature_to_zero_is_the_nearest_neighbor_without_overflow():
    x, y = clusters(50, seed=1)
    queries, _ = clusters(20, seed=2)
    scores = knn_rankings(x, y, queries, ks=(1, 50), temperature=1e-3, num_classes=3)
    assert torch.equal(scores[1][:, 0], scores[50][:, 0])


def test_class_ties_go_to_the_smaller_id_and_equal_similarities_to_the_smaller_index():
    bank = torch.tensor([[1.0, 0.0]] * 6 + [[0.0, 1.0]] * 2)
    labels = torch.tensor([4, 2, 2, 1, 1, 1, 0, 0])
    query = torch.tensor([[1.0, 0.0]])
    assert predict(1, 0.07, bank, labels, query, 5) == [4]
    assert predict(3, 0.07, bank, labels, query, 5) == [2]
    assert predict(5, 0.07, bank, labels, query, 5) == [1]  # two votes each for 1 and 2
    _, indices = nearest(query, bank, 4)
    assert indices.tolist() == [[0, 1, 2, 3]]
    _, indices = nearest(torch.tensor([[0.0, 1.0]]), bank, 4)
    assert indices.tolist() == [[6, 7, 0, 1]]


def test_order_of_neighbors_equals_a_stable_sort():
    """Few distinct similarities, so that nearly every border is a tie."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.randint(-1, 2, (300, 3), generator=generator).float()
    queries = torch.randint(-1, 2, (40, 3), generator=generator).float()
    for k in (1, 7, 100, 299, 300):
        values, indices = nearest(queries, bank, k)
        expected = (queries @ bank.T).argsort(dim=1, descending=True, stable=True)[:, :k]
        assert torch.equal(indices, expected)
        assert torch.equal(values, (queries @ bank.T).gather(1, expected))


def test_collapsed_features_give_the_majority_of_the_first_k():
    bank, queries = torch.ones(50, 4), torch.ones(3, 4)
    labels = torch.tensor([2, 2, 1, 0, 0, 0] + [3] * 44)
    assert predict(3, 0.07, bank, labels, queries, 4) == [2] * 3
    assert predict(6, 0.07, bank, labels, queries, 4) == [0] * 3


def test_zero_rows_tie_and_do_not_fail():
    assert predict(2, 0.07, torch.zeros(5, 3), torch.tensor([1, 1, 0, 0, 0]), torch.zeros(2, 3)) == [1, 1]


def test_rotation_scale_and_bank_order_leave_predictions():
    x, y = clusters(90, spread=1.5)
    queries, _ = clusters(40, seed=3, spread=1.5)
    base = predict(9, 0.07, x, y, queries, 3)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1))).Q
    assert predict(9, 0.07, x @ rotation, y, queries @ rotation, 3) == base
    scale = torch.rand(90, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    assert predict(9, 0.07, x * scale, y, 3 * queries, 3) == base
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))
    assert predict(9, 0.07, x[order], y[order], queries, 3) == base


def test_chunks_do_not_change_the_result(monkeypatch):
    x, y = clusters(90, spread=1.5)
    queries, _ = clusters(41, seed=3, spread=1.5)
    base = predict(9, 0.07, x, y, queries, 3)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)  # one query at a time
    assert predict(9, 0.07, x, y, queries, 3) == base


def test_self_match_is_perfect_and_duplicates_vote_twice():
    x, y = clusters(60, spread=3.0)
    assert predict(1, 0.07, x, y, x, 3) == y.tolist()
    bank, labels = at_angles(0.9, 0.8), torch.tensor([0, 1])
    assert predict(9, 0.5, bank, labels) == [0]
    twice = torch.tensor([0, 1, 1])
    assert predict(9, 0.5, bank[twice], labels[twice]) == [1]


def test_rows_and_predictions(tmp_path):
    context = StubContext(tmp_path, 3, **splits(spread=2.0))
    rows = KNN(ks=(5, 20)).run(context)
    assert [row.metric for row in rows] == ["top1_k5", "top5_k5", "top1_k20", "top5_k20"]
    assert rows[0].details["n_bank"] == 90
    assert rows[0].details["bank"] == "train+validation"
    assert rows[0].selected_on == "none"
    assert rows[0].n_test == 30
    assert rows[1].value is None
    assert "at least 6 classes" in rows[1].note
    stored = load_file(tmp_path / "knn_predictions.safetensors")
    for row in rows[::2]:
        assert float((stored[row.metric] == stored["labels"]).double().mean()) == row.value


def test_k_above_the_bank_uses_the_bank_and_says_so(tmp_path):
    context = StubContext(tmp_path, 3, **splits(sizes=(5, 2, 9)))
    row = KNN(ks=(200,)).run(context)[0]
    assert row.metric == "top1_k200"
    assert row.details["k"] == 7
    assert "bank of 7" in row.note


def test_top5_counts_the_five_best_classes(tmp_path):
    sets = splits(num_classes=10, sizes=(100, 50, 50), spread=2.0)
    top1, top5 = KNN(ks=(20,)).run(StubContext(tmp_path, 10, **sets))
    assert top1.value < top5.value <= 1.0


def test_gap_in_labels_uses_the_classes_of_the_dataset(tmp_path):
    sparse = torch.tensor([0, 1, 2, 9])
    values = []
    for names, num_classes in ((sparse, 10), (torch.arange(4), 4)):
        sets = {}
        for split, seed, dense in (("train", 0, torch.arange(80) % 4), ("validation", 1, torch.arange(8) % 4)):
            sets[split] = (clusters(0, labels=dense, spread=2.0, seed=seed)[0], names[dense])
        x, _ = clusters(0, labels=torch.full((40,), 3), spread=2.0, seed=2)
        sets["test"] = (x, names[torch.full((40,), 3)])
        values.append(KNN(ks=(5,)).run(StubContext(tmp_path, num_classes, **sets))[0].value)
    assert values[0] == values[1]
    assert 0.2 < values[0] < 1.0


def test_one_class_only(tmp_path):
    assert KNN(ks=(3,)).run(StubContext(tmp_path, 1, **splits(num_classes=1)))[0].value == 1.0


def test_bad_label_is_named(tmp_path):
    sets = splits()
    sets["test"][1][0] = 7
    with pytest.raises(DataError, match=r"'test' split must be in \[0, 3\), got 7"):
        KNN().run(StubContext(tmp_path, 3, **sets))


@pytest.mark.parametrize("arguments", [{"ks": ()}, {"ks": (0,)}, {"ks": (5, 5)}, {"temperature": 0.0}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        KNN(**arguments)
