import pytest
import torch
from safetensors.torch import load_file

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation import PROTOCOLS
from ssl_bench.evaluation.protocols import linear as module
from ssl_bench.evaluation.protocols.linear import Linear
from ssl_bench.evaluation.protocols.linear_sgd import LinearSGD, train_heads
from ssl_bench.evaluation.softmax import SoftmaxRegression, Standardizer, flushed_denormals
from tests.unit.evaluation.fakes import StubContext, clusters, splits

PROBES = [Linear, LinearSGD]


def top1(protocol, context):
    return {row.metric: row for row in protocol.run(context)}["top1"]


@pytest.mark.parametrize("cls", PROBES)
def test_separates_clusters_and_says_how(tmp_path, cls):
    context = StubContext(tmp_path, 3, **splits(spread=0.3))
    rows = cls().run(context)
    first, second = rows
    assert (first.metric, second.metric) == ("top1", "top5")
    assert first.value >= 0.9
    assert first.n_test == 30
    assert first.selected_on == "validation"
    assert first.details["n_train"] == 90
    assert second.value is None  # three classes
    assert "at least 6 classes" in second.note
    assert context.asked == ["train", "validation", "test"]  # test last, once


@pytest.mark.parametrize("cls", PROBES)
def test_predictions_are_stored_and_agree_with_the_row(tmp_path, cls):
    context = StubContext(tmp_path, 3, **splits(spread=3.0))
    row = top1(cls(), context)
    name = row.protocol
    stored = load_file(tmp_path / f"{name}_predictions.safetensors")
    assert stored["top1"].dtype == torch.int64
    assert float((stored["top1"] == stored["labels"]).double().mean()) == row.value
    assert 0.3 < row.value < 1.0


def test_gap_in_labels_equals_relabelled(tmp_path):
    """Train labels {0, 1, 2, 9}, test only 9: ten classes, the same accuracy as with 0..3."""
    sparse = torch.tensor([0, 1, 2, 9])
    values = []
    for names in (sparse, torch.arange(4)):
        sets = {}
        for split, seed, dense in (
            ("train", 0, torch.arange(80) % 4),
            ("validation", 1, torch.arange(40) % 4),
            ("test", 2, torch.full((40,), 3)),
        ):
            x, _ = clusters(0, labels=dense, spread=2.0, seed=seed)
            sets[split] = (x, names[dense])
        for cls in PROBES:
            row = top1(cls(), StubContext(tmp_path, 10 if names is sparse else 4, **sets))
            values.append(row.value)
            if names is sparse:
                assert row.details["classes_missing_in_train"] == [3, 4, 5, 6, 7, 8]
    assert values[0] == values[2]
    assert 0.3 < values[0] < 1.0
    # the SGD head of class 9 starts from the same numbers as that of class 3, since absent classes have none
    assert values[1] == values[3]


@pytest.mark.parametrize("cls", PROBES)
def test_class_that_only_test_has_is_counted_wrong(tmp_path, cls):
    sets = splits()
    x, y = clusters(30, seed=5)
    y = y.clone()
    y[:3] = 5
    sets["test"] = (x, y)
    row = top1(cls(), StubContext(tmp_path, 6, **sets))
    assert row.value <= 27 / 30
    assert row.n_test == 30
    assert row.details["classes_missing_in_train"] == [3, 4, 5]


@pytest.mark.parametrize("cls", PROBES)
def test_class_that_test_lacks_stays_a_candidate(tmp_path, cls):
    sets = splits()
    x, y = sets["test"]
    sets["test"] = (x[y != 2], y[y != 2])
    assert top1(cls(), StubContext(tmp_path, 3, **sets)).value >= 0.9


@pytest.mark.parametrize("cls", PROBES)
def test_one_class_only(tmp_path, cls):
    sets = splits(num_classes=1)
    row = top1(cls(), StubContext(tmp_path, 3, **sets))
    assert row.value == 1.0  # the only known class is always predicted
    assert row.details["classes_missing_in_train"] == [1, 2]


@pytest.mark.parametrize("cls", PROBES)
def test_constant_features_give_the_majority_class(tmp_path, cls):
    labels = torch.tensor([0] * 10 + [1] * 30 + [2] * 20)
    test = torch.tensor([0] * 5 + [1] * 10 + [2] * 5)
    x = torch.full((60, 6), 5.3)
    context = StubContext(tmp_path, 3, train=(x, labels), validation=(x[:40], labels[:40]), test=(x[:20], test))
    row = top1(cls(), context)
    assert row.value == 0.5
    assert row.details["num_constant_features"] == 6


def test_duplicate_rows_and_features_do_not_break_the_solver(tmp_path):
    sets = {split: (torch.cat([x, x], 1).repeat(3, 1), y.repeat(3)) for split, (x, y) in splits().items()}
    row = top1(Linear(), StubContext(tmp_path, 3, **sets))
    assert row.value >= 0.9
    assert row.details["converged"]


def test_hundreds_of_dependent_features_at_a_tiny_penalty():
    x, y = clusters(500, dim=4)
    x = x @ torch.randn(4, 600, generator=torch.Generator().manual_seed(0)) + 50.0  # rank 4 in 600 dimensions
    x = Standardizer.fit(x)(x)
    assert SoftmaxRegression(x, y, 3).solve(1e-9, tolerance=1e-5).converged


@pytest.mark.parametrize("cls", PROBES)
@pytest.mark.parametrize("bad", [-1, 3])
def test_labels_out_of_range_are_named(tmp_path, cls, bad):
    sets = splits()
    sets["validation"][1][4] = bad
    with pytest.raises(DataError, match=rf"'validation' split must be in \[0, 3\), got {bad} at index 4"):
        cls().run(StubContext(tmp_path, 3, **sets))


def test_empty_validation_is_named(tmp_path):
    sets = splits()
    sets["validation"] = (torch.empty(0, 6), [])
    with pytest.raises(DataError, match="'validation' split must hold samples"):
        Linear().run(StubContext(tmp_path, 3, **sets))


@pytest.mark.parametrize("arguments", [{"l2_values": ()}, {"l2_values": (0.1, 0.0)}])
def test_linear_refuses_bad_grids(arguments):
    with pytest.raises(ConfigError, match="l2_values"):
        Linear(**arguments)


@pytest.mark.parametrize("arguments", [{"base_lrs": (0.1, -1.0)}, {"epochs": 0}, {"batch_size": 0}])
def test_linear_sgd_refuses_bad_arguments(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        LinearSGD(**arguments)


def test_choice_is_made_on_validation_not_on_test(tmp_path):
    """Random test labels: the chosen penalty and the search trace stay exactly the same."""
    sets = splits(spread=2.0)
    honest = top1(Linear(), StubContext(tmp_path, 3, **sets))
    sets["test"] = (sets["test"][0], sets["test"][1].flip(0))
    other = top1(Linear(), StubContext(tmp_path, 3, **sets))
    assert honest.value != other.value
    assert honest.details == other.details


def test_search_stops_after_three_values_without_gain_and_prefers_the_larger(tmp_path, monkeypatch):
    trace = iter([0.2, 0.9, 0.9, 0.3, 0.5, 1.0])

    context = StubContext(tmp_path, 3, **splits())
    protocol = Linear(l2_values=(1, 0.1, 0.01, 1e-3, 1e-4, 1e-5))

    def top1_of_trace(scores, labels):
        return next(trace)

    top1_of_trace.__name__ = "top1"
    monkeypatch.setattr(module, "top1", top1_of_trace)
    row = top1(protocol, context)
    assert row.details["l2"] == 0.1
    assert row.details["validation_top1"] == [0.2, 0.9, 0.9, 0.3, 0.5]


def test_permuting_rows_or_classes_leaves_accuracy(tmp_path):
    sets = splits(spread=2.0, sizes=(90, 45, 200))
    value = top1(Linear(), StubContext(tmp_path, 3, **sets)).value
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    shuffled = {**sets, "train": (sets["train"][0][order], sets["train"][1][order])}
    rename = torch.tensor([2, 0, 1])
    renamed = {split: (x, rename[y]) for split, (x, y) in sets.items()}
    # equal up to a sample on the boundary within the solver's tolerance
    assert top1(Linear(), StubContext(tmp_path, 3, **shuffled)).value == pytest.approx(value, abs=1 / 200)
    assert top1(Linear(), StubContext(tmp_path, 3, **renamed)).value == pytest.approx(value, abs=1 / 200)


@pytest.mark.parametrize("cls", PROBES)
def test_rescaled_features_leave_accuracy(tmp_path, cls):
    sets = splits(spread=2.0)
    value = top1(cls(), StubContext(tmp_path, 3, **sets)).value
    scaled = {split: (1000 * x + 7, y) for split, (x, y) in sets.items()}
    assert top1(cls(), StubContext(tmp_path, 3, **scaled)).value == pytest.approx(value, abs=1 / 30)


def test_random_labels_give_chance(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sets = {}
    for split, size in (("train", 300), ("validation", 100), ("test", 900)):
        sets[split] = (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
    value = top1(Linear(), StubContext(tmp_path, 3, **sets)).value
    error = (1 / 3 * 2 / 3 / 900) ** 0.5
    assert abs(value - 1 / 3) < 3 * error


def test_standardizer_uses_given_rows_only():
    x, _ = clusters(50)
    standardize = Standardizer.fit(x)
    z = standardize(x).double()
    torch.testing.assert_close(z.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(z.std(0, correction=0), torch.ones(6, dtype=torch.float64), atol=1e-6, rtol=0)
    shifted = standardize(x + 10.0).double()
    assert float(shifted.mean()) > 1


def test_standardizer_of_a_large_offset_keeps_the_variation():
    """Mean 1e4, deviation 1: E[x^2] - E[x]^2 in float32 would be noise; here it is exact to rounding of x."""
    x = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    z = Standardizer.fit(x + 1e4)(x + 1e4)
    # float32 near 1e4 has spacing 1e-3
    assert float((z[:, 0] - (x[:, 0] - x.mean()) / x.std(correction=0)).abs().max()) < 5e-3


def test_denormals_are_flushed_and_the_mode_restored():
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    before = float(tiny * 1.0)
    with flushed_denormals():
        assert float(tiny * 1.0) == 0.0
    assert float(tiny * 1.0) == before != 0.0


def test_one_rate_in_a_batch_of_rates_is_that_rate_alone():
    x, y = clusters(100)
    common = {"epochs": 3, "batch_size": 32, "seed": 1}
    lrs = torch.tensor([0.01, 0.1, 1e12])  # the last one diverges and must not reach the others
    together = train_heads(x, y, 3, lrs=lrs, **common)
    alone = train_heads(x, y, 3, lrs=lrs[1:2], **common)
    torch.testing.assert_close(together[1], alone[0], rtol=1e-5, atol=1e-6)  # other matrix shapes, other summation


def test_diverged_rate_is_not_chosen(tmp_path):
    context = StubContext(tmp_path, 3, **splits())
    row = top1(LinearSGD(base_lrs=(1e-2, 1e38)), context)
    assert row.details["base_lr"] == 1e-2
    assert row.value >= 0.9


def test_protocols_are_found_by_name():
    assert {"linear", "linear_sgd", "knn", "finetune", "spectrum"} <= set(PROTOCOLS.names())
    assert PROTOCOLS.get("linear") is Linear
