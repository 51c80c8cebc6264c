"""Detection scores and measures against hand-computed values, loops, scikit-learn and numpy."""

import math

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import roc_auc_score

from ssl_bench.data.store import ImageStore
from ssl_bench.errors import ConfigError, DataError, RegistryError
from ssl_bench.evaluation import EvaluationContext, other_datasets
from ssl_bench.evaluation.protocols.linear import DEFAULT_L2_VALUES, fit_probe, top1
from ssl_bench.evaluation.protocols.ood import OOD, Mahalanobis, auroc, fpr95, neighbor_distance
from tests.unit.evaluation.fakes import FakeDataset, StubContext, clusters, splits, tiny_net

INSIDE = -torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5], dtype=torch.float64)  # minus confidence: strangeness
OUTSIDE = -torch.tensor([0.75, 0.5, 0.4, 0.3], dtype=torch.float64)


def test_hand_computed_measures():
    assert auroc(INSIDE, OUTSIDE) == pytest.approx(0.825, abs=1e-15)
    assert fpr95(INSIDE, OUTSIDE) == 0.5


def test_auroc_is_sklearns_and_the_count_of_pairs():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40) / 8, rng.integers(2, 12, 23) / 8  # many ties
    found = auroc(torch.tensor(inside), torch.tensor(outside))
    pairs = [(o > i) + 0.5 * (o == i) for i in inside for o in outside]
    assert found == pytest.approx(np.mean(pairs), abs=1e-14)
    truth = np.repeat([0, 1], [40, 23])
    assert found == pytest.approx(roc_auc_score(truth, np.concatenate([inside, outside])), abs=1e-14)


def test_auroc_under_transformations_of_the_scores():
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(50, generator=generator), torch.randn(30, generator=generator) + 0.5
    base = auroc(inside, outside)
    assert auroc(inside.exp(), outside.exp()) == base
    assert auroc(-outside, -inside) == pytest.approx(base, abs=1e-15)
    assert auroc(outside, inside) == pytest.approx(1 - base, abs=1e-15)
    assert auroc(inside.repeat(3), outside.repeat(2)) == pytest.approx(base, abs=1e-15)  # sizes and duplicates


@pytest.mark.parametrize("num", [1, 19, 20, 21, 100, 137])
def test_the_threshold_is_the_smallest_score_that_lets_95_percent_pass(num):
    inside = torch.randperm(num, generator=torch.Generator().manual_seed(0)).double()
    passing = min(t for t in range(num) if 100 * (t + 1) >= 95 * num)
    outside = torch.tensor([passing - 0.5, float(passing), passing + 0.5])
    assert fpr95(inside, outside) == pytest.approx(2 / 3)


def test_scores_without_difference_separate_nothing():
    assert auroc(torch.ones(5), torch.ones(3)) == 0.5
    assert fpr95(torch.ones(5), torch.ones(3)) == 1.0
    assert auroc(torch.zeros(5), torch.ones(3)) == 1.0
    assert fpr95(torch.zeros(5), torch.ones(3)) == 0.0


def test_hand_computed_neighbor_distances():
    bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    query = torch.tensor([[1.6, 1.2]], dtype=torch.float64)  # normalized: .8, .6
    found = [float(neighbor_distance(2 * bank, query, k)) for k in (1, 2, 3)]
    assert found == pytest.approx([0.08, 0.4, 0.8], abs=1e-14)


def test_neighbor_distances_equal_the_loops():
    bank, queries = clusters(60)[0].double(), clusters(11, seed=1, spread=2.0)[0].double()
    unit = torch.nn.functional.normalize
    every = (unit(queries)[:, None] - unit(bank)[None]).square().sum(dim=2).sort(dim=1).values
    for k in (1, 7, 60):
        torch.testing.assert_close(neighbor_distance(bank, queries, k), every[:, k - 1], rtol=0, atol=1e-13)


def test_hand_computed_mahalanobis_distance():
    train = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
    assert float(Mahalanobis.fit(train)(torch.tensor([[3.0, 2.0]]))) == pytest.approx(13.0, abs=1e-13)


def test_mahalanobis_distances_are_sklearns_and_affine_invariant():
    train, queries = clusters(80, dim=5)[0].double(), clusters(9, dim=5, seed=1)[0].double()
    found = Mahalanobis.fit(train)(queries)
    expected = EmpiricalCovariance().fit(train.numpy()).mahalanobis(queries.numpy())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    moved = Mahalanobis.fit(train @ matrix + 3)(queries @ matrix + 3)
    torch.testing.assert_close(moved, found, rtol=1e-8, atol=0)


def test_directions_without_variance_say_nothing():
    """Fewer samples than features, a constant and a repeated feature: numpy's pseudo-inverse."""
    generator = torch.Generator().manual_seed(3)
    train = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    train[:, 0] = 0.3
    train[:, 1] = train[:, 2]
    queries = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    fitted = Mahalanobis.fit(train)
    assert fitted.whitening.shape[1] == 5
    centered = queries.numpy() - train.numpy().mean(0)
    inverse = np.linalg.pinv(np.cov(train.numpy().T, bias=True), rcond=1e-10)
    np.testing.assert_allclose(fitted(queries).numpy(), ((centered @ inverse) * centered).sum(1), rtol=1e-8)
    constant = Mahalanobis.fit(torch.full((50, 4), 0.3))
    assert constant.whitening.shape[1] == 0
    assert constant(torch.randn(3, 4, generator=generator)).tolist() == [0.0] * 3


def test_logits_of_the_probe_sum_to_zero_so_that_energy_is_determined(tmp_path):
    sets = splits(num_classes=4, spread=1.5)
    context = StubContext(tmp_path, 5, **sets)  # one class has no sample
    probe = fit_probe(
        context.features("train"), context.features("validation"), context, l2_values=DEFAULT_L2_VALUES, measure=top1
    )
    scores = probe.scores(sets["test"][0])
    assert bool(scores[:, 4].isneginf().all())
    assert float(scores[:, :4].sum(dim=1).abs().max()) < 1e-4  # float32 logits near 10
    assert bool(scores.logsumexp(dim=1).isfinite().all())


class OtherDataset(FakeDataset):
    """Noise of three channels and 12 px, bright on the right."""

    name = "other"
    channels, image_size, mean, std = 3, 12, (0.5,) * 3, (0.25,) * 3

    def __init__(self, num=25, seed=0):
        super().__init__(sizes=(3, 3, num))
        self.fingerprint = f"other {num} {seed}"
        images = np.random.default_rng(seed).integers(0, 100, (num, 3, 12, 12)).astype(np.uint8)
        images[:, :, :, 6:] += 150
        self.stores["test"] = ImageStore(images, np.zeros(num, dtype=np.int64))


def run(monkeypatch, tmp_path, *others, own=None, **arguments):
    """OOD on a small network; `others` stand for svhn, cifar10, ..."""
    names = ("svhn", "cifar10")[: len(others)]
    monkeypatch.setattr(other_datasets, "load_dataset", lambda name, **_: dict(zip(names, others, strict=True))[name])
    own = own or FakeDataset(sizes=(60, 30, 40))
    context = EvaluationContext(tiny_net(), own, work_dir=tmp_path)
    return {row.metric: row for row in OOD(datasets=names, **arguments).run(context)}, context


def test_rows_equal_scores_computed_apart(monkeypatch, tmp_path):
    rows, context = run(monkeypatch, tmp_path, OtherDataset(), k=7)
    assert len(rows) == 6
    bank = torch.cat([context.features(s).features for s in ("train", "validation")]).double()
    queries = {"in": context.features("test").features.double()}
    matched = other_datasets.MatchedDataset(OtherDataset(), context.dataset)
    queries["out"] = context.on(matched).features("test").features.double()
    unit = torch.nn.functional.normalize
    scores = {"knn": {}, "mahalanobis": {}, "energy": {}}
    probe = fit_probe(
        context.features("train"), context.features("validation"), context, l2_values=DEFAULT_L2_VALUES, measure=top1
    )
    inverse = np.linalg.pinv(np.cov(unit(bank).numpy().T, bias=True), rcond=1e-10)
    for name, x in queries.items():
        scores["knn"][name] = torch.cdist(unit(x), unit(bank)).sort(dim=1).values[:, 6].numpy()
        centered = (unit(x) - unit(bank).mean(0)).numpy()
        scores["mahalanobis"][name] = ((centered @ inverse) * centered).sum(1)
        scores["energy"][name] = -np.log(np.exp(probe.scores(x.float()).double().numpy()).sum(1))
    truth = np.repeat([0, 1], [40, 25])
    for name, own in scores.items():
        row = rows[f"auroc_{name}_svhn"]
        # float32 features may order two near samples the other way: one of 1000 pairs
        assert row.value == pytest.approx(roc_auc_score(truth, np.concatenate([own["in"], own["out"]])), abs=2e-3)
        threshold = np.sort(own["in"])[37]  # 38 of 40 are 95 %
        assert rows[f"fpr95_{name}_svhn"].value == pytest.approx(np.mean(own["out"] <= threshold), abs=0.04)
        assert row.n_test == 65
        assert (row.details["n_in"], row.details["n_out"]) == (40, 25)
        assert row.selected_on == ("validation" if name == "energy" else "none")
        assert row.higher_is_better
    assert not rows["fpr95_knn_svhn"].higher_is_better
    assert rows["fpr95_knn_svhn"].details["positives"] == "in-distribution"
    assert rows["auroc_knn_svhn"].details["k"] == 7


def test_each_dataset_has_its_rows_and_does_not_change_the_others(monkeypatch, tmp_path):
    both, _ = run(monkeypatch, tmp_path / "both", OtherDataset(), OtherDataset(num=9, seed=1))
    assert len(both) == 12
    alone, _ = run(monkeypatch, tmp_path / "alone", OtherDataset())
    assert all(both[metric].value == row.value for metric, row in alone.items())
    assert both["auroc_knn_cifar10"].n_test == 49


def test_the_control_tells_own_images_from_themselves_after_the_trip(monkeypatch, tmp_path):
    rows, context = run(monkeypatch, tmp_path, OtherDataset(), k=7)
    details = rows["auroc_knn_svhn"].details
    assert details["own_format"] == [3, 12]
    assert details["seen_format"] == [1, 8]
    bank = torch.cat([context.features(s).features for s in ("train", "validation")])
    way = context.on(other_datasets.RoundTripDataset(context.dataset, 3, 12))
    here, back = (neighbor_distance(bank, some.features("test").features, 7) for some in (context, way))
    assert not torch.equal(here, back)
    assert details["control_auroc"] == auroc(here, back)
    rows, _ = run(monkeypatch, tmp_path, FakeDataset(seed=4))
    assert "control_auroc" not in rows["auroc_knn_svhn"].details


def test_images_of_the_same_kind_are_not_told_apart(monkeypatch, tmp_path):
    """Both are draws of one law: AUROC within 4 deviations, sqrt((n + m + 1) / 12 n m), of a half."""
    own, other = FakeDataset(sizes=(150, 60, 200)), FakeDataset(sizes=(3, 3, 200), seed=8)
    rows, _ = run(monkeypatch, tmp_path, other, own=own)
    for name in ("knn", "mahalanobis", "energy"):
        assert abs(rows[f"auroc_{name}_svhn"].value - 0.5) < 4 * math.sqrt(401 / (12 * 200 * 200))


def test_constant_features_separate_nothing(monkeypatch, tmp_path):
    net = tiny_net()
    with torch.no_grad():
        net.net[1].weight.zero_()
        net.net[1].bias.fill_(0.3)
    monkeypatch.setattr(other_datasets, "load_dataset", lambda name, **_: OtherDataset())
    rows = OOD(datasets=("svhn",)).run(EvaluationContext(net, FakeDataset(), work_dir=tmp_path))
    assert [row.value for row in rows] == [0.5, 1.0] * 3
    assert rows[2].details["num_directions"] == 0


def test_one_class_has_no_energy_and_one_missing_in_train_is_no_obstacle(monkeypatch, tmp_path):
    rows, _ = run(monkeypatch, tmp_path / "one", OtherDataset(), own=FakeDataset(sizes=(60, 30, 40), num_classes=1))
    assert rows["auroc_energy_svhn"].value == 0.5
    assert rows["auroc_knn_svhn"].value != 0.5
    labels = (np.arange(60) % 2, np.arange(30) % 2, np.arange(40) % 3)
    own = FakeDataset(sizes=(60, 30, 40), labels=labels)
    rows, _ = run(monkeypatch, tmp_path / "missing", OtherDataset(), own=own)
    assert all(0 <= row.value <= 1 for row in rows.values())


def test_k_above_the_bank_takes_the_farthest(monkeypatch, tmp_path):
    rows, _ = run(monkeypatch, tmp_path, OtherDataset(), k=1000)
    assert rows["auroc_knn_svhn"].details["k"] == 90
    assert rows["auroc_knn_svhn"].value == run(monkeypatch, tmp_path, OtherDataset(), k=90)[0]["auroc_knn_svhn"].value


def test_bad_input_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="at least one dataset"):
        OOD(datasets=())
    with pytest.raises(ConfigError, match="`k` must be >= 1"):
        OOD(datasets=("svhn",), k=0)
    with pytest.raises(RegistryError, match="Did you mean 'svhn'"):
        OOD(datasets=("svnh",))
    with pytest.raises(ConfigError, match="'svhn' has the same content"):
        run(monkeypatch, tmp_path, FakeDataset(sizes=(60, 30, 40)))
    with pytest.raises(DataError, match=r"got 40 of 'fake' and 0 of 'svhn'"):
        run(monkeypatch, tmp_path, OtherDataset(num=0))
    net = tiny_net()
    with torch.no_grad():
        net.net[0].bias.fill_(torch.nan)
    context = EvaluationContext(net, FakeDataset(), work_dir=tmp_path)
    with pytest.raises(DataError, match="NaN or infinity"):
        OOD(datasets=("svhn",)).run(context)
