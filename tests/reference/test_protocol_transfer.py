"""Transfer's metrics against hand-computed values, loops and scikit-learn; its rows against the linear protocol's."""

import types
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from ssl_bench.errors import ConfigError, DataError, RegistryError
from ssl_bench.evaluation import EvaluationContext, other_datasets
from ssl_bench.evaluation.protocols.linear import DEFAULT_L2_VALUES, SEARCH_TOLERANCE, Linear, fit_probe
from ssl_bench.evaluation.protocols.transfer import (
    METRICS,
    OneVsRest,
    Transfer,
    accuracy_per_class,
    eleven_point_precision,
    map11,
)
from ssl_bench.evaluation.softmax import Standardizer
from tests.unit.evaluation.fakes import FakeDataset, StubContext, clusters, splits, tiny_net


def loop_eleven_points(scores, positive):
    """From the definition: every threshold, then the best precision at each recall or above."""
    points = []
    for threshold in set(scores):
        taken = [p for s, p in zip(scores, positive, strict=True) if s >= threshold]
        points.append((sum(taken) / sum(positive), sum(taken) / len(taken)))
    return sum(max(p for r, p in points if r >= i / 10 - 1e-12) for i in range(11)) / 11


def test_hand_computed_eleven_point_precision():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    positive = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    assert eleven_point_precision(scores, positive) == pytest.approx(10 / 11, abs=1e-15)
    order = torch.tensor([4, 0, 3, 5, 1, 2])
    assert eleven_point_precision(scores[order], positive[order]) == pytest.approx(10 / 11, abs=1e-15)


def test_eleven_point_precision_at_the_extremes():
    positive = torch.tensor([1, 0, 0, 0]).bool()
    assert eleven_point_precision(torch.tensor([4.0, 3, 2, 1]), positive) == 1.0
    assert eleven_point_precision(torch.tensor([1.0, 2, 3, 4]), positive) == pytest.approx(0.25, abs=1e-15)
    for value in (0.0, -torch.inf):  # without differences, also of a class that was never fitted: the class's share
        assert eleven_point_precision(torch.full((4,), value), positive) == pytest.approx(0.25, abs=1e-15)
    assert eleven_point_precision(torch.zeros(3), torch.ones(3).bool()) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_the_loops_and_sklearns(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 60)
    scores = rng.integers(0, 12, (60, 5)) / 4  # ties; class 4 has no sample
    scores[np.arange(60), labels] += 0.5
    found = map11(torch.tensor(scores), torch.tensor(labels))
    expected = [loop_eleven_points(scores[:, c].tolist(), (labels == c).tolist()) for c in range(4)]
    assert found == pytest.approx(np.mean(expected), abs=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it notes that class 4 is only predicted
        balanced = balanced_accuracy_score(labels, scores.argmax(1))
    assert accuracy_per_class(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(balanced, abs=1e-13)


def test_hand_computed_accuracy_per_class():
    """Confusion [[90, 10], [2, 8]]."""
    labels = torch.tensor([0] * 100 + [1] * 10)
    predicted = torch.tensor([0] * 90 + [1] * 10 + [0] * 2 + [1] * 8)
    scores = torch.nn.functional.one_hot(predicted).float()
    assert accuracy_per_class(scores, labels) == pytest.approx(0.85, abs=1e-15)
    assert METRICS["top1"][0](scores, labels) == pytest.approx(98 / 110, abs=1e-15)


def test_one_vs_rest_is_sklearns_binary_regression_of_each_class():
    """Our two rows +-w/2 have half the penalty of sklearn's one row w, so its C is 2 / (n l2)."""
    x, y = clusters(120, num_classes=4, spread=1.5)
    x = Standardizer.fit(x)(x).double()
    l2 = 1e-2
    solution = OneVsRest(x, y, 4).solve(l2, tolerance=1e-12)
    assert solution.converged
    found = solution.scores(x)
    for label in range(4):
        reference = LogisticRegression(C=2 / (120 * l2), tol=1e-10, max_iter=10000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecations are not ours
            reference.fit(x.numpy(), (y == label).numpy())
        # objectives right to 1e-12, minimizers to about its root over the curvature
        np.testing.assert_allclose(found[:, label].numpy(), reference.decision_function(x.numpy()), atol=1e-4)


class Kept(FakeDataset):
    """A dataset whose three splits hold given labels."""

    def __init__(self, labels, num_classes=3):
        super().__init__(sizes=tuple(map(len, labels)), num_classes=num_classes, labels=labels)
        self.fingerprint = f"kept {[len(part) for part in labels]} {num_classes}"


def sizes_to_labels(*sizes, num_classes=3):
    return [np.arange(size) % num_classes for size in sizes]


def run(monkeypatch, tmp_path, others, *, own=None, metric="top1", **arguments):
    """Transfer to datasets given by registered names."""
    monkeypatch.setattr(other_datasets, "load_dataset", lambda name, **_: others[name])
    context = EvaluationContext(tiny_net(), own or FakeDataset(), work_dir=tmp_path)
    datasets = tuple({"name": name, "metric": metric} for name in others)
    return Transfer(datasets=datasets, **arguments).run(context), context


def test_a_row_is_the_linear_protocols_on_that_dataset(monkeypatch, tmp_path):
    others = {"svhn": Kept(sizes_to_labels(50, 20, 33)), "cifar10": Kept(sizes_to_labels(40, 20, 21))}
    rows, context = run(monkeypatch, tmp_path / "transfer", others)
    assert [row.metric for row in rows] == ["top1_svhn", "top1_cifar10"]
    for row, other in zip(rows, others.values(), strict=True):
        expected = Linear().run(EvaluationContext(tiny_net(), other, work_dir=tmp_path / "linear"))[0]
        assert row.value == expected.value
        assert row.n_test == expected.n_test == len(other.stores["test"])
        assert row.selected_on == "validation"
        assert {key: row.details[key] for key in expected.details} == expected.details
        assert row.details["own_format"] == [1, 8]
    assert context.dataset.asked == []  # nothing of its own dataset is read


def test_test_is_read_after_the_choice_and_does_not_change_it(monkeypatch, tmp_path):
    base = Kept(sizes_to_labels(50, 20, 33))
    rows, _ = run(monkeypatch, tmp_path / "a", {"svhn": base})
    assert base.asked == ["train", "validation", "test"]
    labels = sizes_to_labels(50, 20, 33)
    labels[2] = labels[2][::-1].copy()
    changed = Kept(labels)
    changed.stores = {**base.stores, "test": type(base.stores["test"])(base.stores["test"].images, labels[2])}
    other, _ = run(monkeypatch, tmp_path / "b", {"svhn": changed})
    assert other[0].details == rows[0].details
    assert other[0].value != rows[0].value


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_the_reported_metric_chooses_the_penalty(metric, tmp_path, monkeypatch):
    sets = splits(sizes=(60, 45, 45), spread=2.5)
    context = StubContext(tmp_path, 3, **sets)
    monkeypatch.setattr(StubContext, "on", lambda self, dataset: self, raising=False)
    context.dataset = types.SimpleNamespace(num_classes=3, channels=1, image_size=8, mean=(0.5,), std=(0.25,))
    monkeypatch.setattr(other_datasets, "load_dataset", lambda name, **_: FakeDataset())
    (row,) = Transfer(datasets=({"name": "svhn", "metric": metric},)).run(context)
    assert row.metric == f"{metric}_svhn"
    measure, solver = METRICS[metric]
    x, y = sets["train"]
    standardize = Standardizer.fit(x)
    problem, solution, figures = solver(standardize(x), y, 3), None, []
    for l2 in row.details["l2_values"]:
        solution = problem.solve(l2, start=solution, tolerance=SEARCH_TOLERANCE)
        figures.append(measure(solution.scores(standardize(sets["validation"][0])), sets["validation"][1]))
    assert row.details[f"validation_{metric}"] == pytest.approx(figures, abs=1e-12)
    assert row.details["l2"] == row.details["l2_values"][int(np.argmax(row.details[f"validation_{metric}"]))]
    x, y = torch.cat([sets["train"][0], sets["validation"][0]]), torch.cat([sets["train"][1], sets["validation"][1]])
    standardize = Standardizer.fit(x)
    final = solver(standardize(x), y, 3).solve(row.details["l2"])
    assert row.value == pytest.approx(measure(final.scores(standardize(sets["test"][0])), sets["test"][1]), abs=1e-9)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_features_that_name_the_class_are_perfect_and_constant_ones_at_chance(metric, tmp_path):
    labels = torch.arange(60) % 3
    measure, solver = METRICS[metric]
    for x, expected in ((torch.eye(3)[labels], 1.0), (torch.ones(60, 4), 1 / 3)):
        context = StubContext(tmp_path, 3, train=(x, labels), validation=(x, labels), test=(x, labels))
        probe = fit_probe(
            context.features("train"), context.features("validation"), context,
            l2_values=DEFAULT_L2_VALUES, measure=measure, solver=solver,
        )  # fmt: skip
        assert measure(probe.scores(x), labels) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", sorted(METRICS))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_class_missing_in_a_split(metric, place, monkeypatch, tmp_path):
    labels = sizes_to_labels(48, 24, 24)
    labels[place] = labels[place] % 2
    rows, _ = run(monkeypatch, tmp_path, {"svhn": Kept(labels)}, metric=metric)
    assert 0 <= rows[0].value <= 1
    assert rows[0].details["classes_missing_in_train"] == []  # validation joins it
    labels = [part % 2 for part in sizes_to_labels(48, 24)] + [np.arange(24) % 3]
    rows, _ = run(monkeypatch, tmp_path / "both", {"svhn": Kept(labels)}, metric=metric)
    assert rows[0].details["classes_missing_in_train"] == [2]
    assert 0 <= rows[0].value < 1


def test_one_class_only(monkeypatch, tmp_path):
    one = Kept(sizes_to_labels(20, 10, 12, num_classes=1), num_classes=1)
    for metric in ("top1", "accuracy_per_class"):
        assert run(monkeypatch, tmp_path, {"svhn": one}, metric=metric)[0][0].value == 1.0
    (row,), _ = run(monkeypatch, tmp_path, {"svhn": one}, metric="map11")
    assert row.value is None
    assert "two classes" in row.note
    assert row.n_test == 12


def test_bad_input_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="at least one dataset"):
        Transfer(datasets=())
    with pytest.raises(RegistryError, match="Did you mean 'svhn'"):
        Transfer(datasets=("svnh",))
    with pytest.raises(ConfigError, match=r"Unknown metric 'top' of 'svhn'.*Did you mean 'top1'"):
        Transfer(datasets=({"name": "svhn", "metric": "top"},))
    with pytest.raises(ConfigError, match="l2_values"):
        Transfer(datasets=("svhn",), l2_values=(0.0,))
    with pytest.raises(DataError, match="'validation' split must hold samples"):
        run(monkeypatch, tmp_path, {"svhn": Kept(sizes_to_labels(20, 0, 12))})
    net = tiny_net()
    with torch.no_grad():
        net.net[0].bias.fill_(torch.nan)
    monkeypatch.setattr(other_datasets, "load_dataset", lambda name, **_: FakeDataset())
    with pytest.raises(DataError, match="NaN or infinity"):
        Transfer(datasets=("svhn",)).run(EvaluationContext(net, FakeDataset(), work_dir=tmp_path / "nan"))
