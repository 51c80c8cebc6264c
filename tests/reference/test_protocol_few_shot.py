"""Few-shot episodes against hand-computed values, loops and scikit-learn."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.protocols.few_shot import (
    FewShot,
    draw_episodes,
    half_width,
    logistic_scores,
    prototype_scores,
)
from tests.unit.evaluation.fakes import StubContext, clusters, splits

SUPPORTS = torch.tensor([[[1.0, 0.0], [0.8, 0.2]], [[0.0, 1.0], [0.2, 0.6]]], dtype=torch.float64)
QUERY = torch.tensor([[0.5, 0.4]], dtype=torch.float64)


def values(rows):
    return {row.metric: row.value for row in rows}


def test_interval_divides_by_the_number_of_episodes():
    accuracies = torch.tensor([0.8, 0.6, 0.7, 0.9], dtype=torch.float64)
    assert half_width(accuracies) == pytest.approx(0.109567330897, abs=1e-12)


def test_prototype_scores_are_the_hand_computed_ones():
    scores = prototype_scores(SUPPORTS, QUERY)
    assert scores[0].tolist() == pytest.approx([-0.25, -0.32], abs=1e-15)
    assert float(scores.softmax(1)[0, 0]) == pytest.approx(0.51749286, abs=1e-8)
    assert float(-scores.log_softmax(1)[0, 0]) == pytest.approx(0.658759555548697, abs=1e-14)


def test_prototypes_of_normalized_supports_are_not_normalized_again():
    unit = torch.nn.functional.normalize
    prototypes = unit(SUPPORTS, dim=2).mean(dim=1)
    expected = [[0.98507125, 0.12126781], [0.15811388, 0.97434165]]
    torch.testing.assert_close(prototypes, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
    scores = prototype_scores(unit(SUPPORTS, dim=2), unit(QUERY, dim=1))
    loops = [-sum((q - p) ** 2 for q, p in zip(unit(QUERY)[0].tolist(), row, strict=True)) for row in expected]
    assert scores[0].tolist() == pytest.approx(loops, abs=1e-7)


@pytest.mark.parametrize(("shots", "dim"), [(1, 30), (5, 30), (5, 8)])  # 8: more supports than features
def test_logistic_scores_are_sklearns(shots, dim):
    """Both stop where J is right to about 1e-12, and a minimizer is right to the root of that."""
    generator = torch.Generator().manual_seed(0)
    supports = torch.randn(4, shots, dim, generator=generator, dtype=torch.float64)
    queries = torch.randn(20, dim, generator=generator, dtype=torch.float64)
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not ours
        reference.fit(supports.flatten(0, 1).numpy(), np.arange(4).repeat(shots))
    expected = torch.from_numpy(reference.decision_function(queries.numpy()))
    found = logistic_scores(supports, queries)
    centered = [scores - scores.mean(dim=1, keepdim=True) for scores in (found, expected)]
    torch.testing.assert_close(*centered, rtol=0, atol=1e-5)
    assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("scores", [prototype_scores, logistic_scores])
def test_rotation_of_the_features_and_order_of_the_classes_change_nothing(scores):
    generator = torch.Generator().manual_seed(1)
    supports = torch.randn(5, 3, 12, generator=generator, dtype=torch.float64)
    queries = torch.randn(9, 12, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q
    order = torch.tensor([3, 0, 4, 1, 2])
    base = scores(supports, queries)
    torch.testing.assert_close(scores(supports @ rotation, queries @ rotation), base, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores(supports[order], queries), base[:, order], rtol=0, atol=1e-5)


def test_episodes_hold_distinct_classes_and_distinct_images():
    labels = torch.tensor([0] * 9 + [3] * 7 + [1] * 8 + [5] * 7)[
        torch.randperm(31, generator=torch.Generator().manual_seed(0))
    ]
    images = draw_episodes(labels, torch.tensor([0, 1, 3, 5]), ways=3, per_class=6, episodes=200, seed=0)
    assert images.shape == (200, 3, 6)
    for episode in images:
        assert len(episode.unique()) == 18
        own = labels[episode]
        assert bool((own == own[:, :1]).all())
        assert len(own[:, 0].unique()) == 3
    assert labels[images[:, :, 0]].unique().tolist() == [0, 1, 3, 5]
    assert len(images.unique()) == 31


def test_classes_and_images_are_drawn_evenly():
    """Of 3000 draws of a class (image) each of 6 (8) is expected 1500 (375) times; 4.5 binomial deviations."""
    labels = torch.arange(48) % 6
    images = draw_episodes(labels, torch.arange(6), ways=3, per_class=2, episodes=3000, seed=0)
    per_class = torch.bincount(labels[images[:, :, 0]].flatten())
    assert float((per_class - 1500).abs().max()) < 4.5 * (3000 * 0.5 * 0.5) ** 0.5
    per_image = torch.bincount(images.flatten(), minlength=48)
    assert float((per_image - 375).abs().max()) < 4.5 * (3000 * 0.125 * 0.875) ** 0.5


def test_the_seed_decides_the_episodes_and_more_continue_the_list():
    labels, classes = torch.arange(60) % 6, torch.arange(6)
    base = draw_episodes(labels, classes, ways=4, per_class=5, episodes=20, seed=3)
    more = draw_episodes(labels, classes, ways=4, per_class=5, episodes=50, seed=3)
    assert torch.equal(more[:20], base)
    assert not torch.equal(draw_episodes(labels, classes, ways=4, per_class=5, episodes=20, seed=4), base)


def test_rows_equal_loops_over_the_episodes(tmp_path):
    sets = splits(num_classes=6, sizes=(12, 12, 90), spread=2.0)
    context = StubContext(tmp_path, 6, **sets, seed=2)
    protocol = FewShot(ways=4, shots=(1, 3), queries=5, episodes=15)
    rows = {row.metric: row for row in protocol.run(context)}
    assert context.asked == ["test"]
    names = ("prototype_4way_1shot", "prototype_4way_3shot", "logistic_4way_1shot", "logistic_4way_3shot")
    assert set(rows) == {f"accuracy_{name}" for name in names}
    x, y = sets["test"]
    x = torch.nn.functional.normalize(x.double()).numpy()
    images = draw_episodes(y, torch.arange(6), ways=4, per_class=8, episodes=15, seed=2)
    for shots in (1, 3):
        accuracies = {"prototype": [], "logistic": []}
        for episode in images.tolist():
            centers = [np.mean([x[i] for i in own[:shots]], axis=0) for own in episode]
            reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10000)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reference.fit([x[i] for own in episode for i in own[:shots]], np.arange(4).repeat(shots))
            right = {"prototype": 0, "logistic": 0}
            for place, own in enumerate(episode):
                for i in own[3:]:
                    right["prototype"] += int(np.argmin([((x[i] - c) ** 2).sum() for c in centers]) == place)
                    right["logistic"] += int(reference.predict(x[i : i + 1])[0] == place)
            for name, count in right.items():
                accuracies[name].append(count / 20)
        for name, found in accuracies.items():
            row = rows[f"accuracy_{name}_4way_{shots}shot"]
            assert row.value == pytest.approx(np.mean(found), abs=1e-12)
            assert row.details["ci95"] == pytest.approx(1.96 * np.std(found) / 15**0.5, abs=1e-12)
            assert row.n_test == 90
            assert row.selected_on == "none"


def test_features_that_name_the_class_are_perfect_and_random_ones_at_chance(tmp_path):
    sets = splits(num_classes=8, sizes=(8, 8, 320))
    y = sets["test"][1]
    sets["test"] = (torch.eye(8)[y], y)
    assert set(values(FewShot(episodes=30).run(StubContext(tmp_path, 8, **sets))).values()) == {1.0}
    # 320 images give new episodes their own errors, but all use one draw of features: allow 5 of its deviations
    sets["test"] = (torch.randn(320, 16, generator=torch.Generator().manual_seed(0)), y)
    for row in FewShot(episodes=200).run(StubContext(tmp_path, 8, **sets)):
        assert row.value == pytest.approx(0.2, abs=5 * (0.2 * 0.8 / 320) ** 0.5)


@pytest.mark.parametrize("value", [0.0, 0.7])
def test_constant_features_are_exactly_at_chance(value, tmp_path):
    sets = splits(num_classes=5, sizes=(5, 5, 150))
    sets["test"] = (torch.full((150, 6), value), sets["test"][1])
    found = values(FewShot(episodes=20).run(StubContext(tmp_path, 5, **sets)))
    assert list(found.values()) == pytest.approx([0.2] * 4, abs=1e-15)


def test_duplicate_rows_are_drawn_as_images_of_their_own(tmp_path):
    x, y = clusters(5, num_classes=5, spread=0.1)
    sets = {**splits(num_classes=5), "test": (x.repeat(20, 1), y.repeat(20))}
    assert set(values(FewShot(episodes=10).run(StubContext(tmp_path, 5, **sets))).values()) == {1.0}


def test_classes_with_too_few_images_are_not_drawn(tmp_path):
    labels = torch.cat([torch.arange(6).repeat(20), torch.full((19,), 6)])  # class 7 of 8 is missing
    sets = {**splits(num_classes=8), "test": clusters(0, labels=labels, spread=2.0)}
    row = FewShot(episodes=10).run(StubContext(tmp_path, 8, **sets))[0]
    assert row.details["num_classes_drawn_from"] == 6
    assert row.n_test == 120


def test_too_few_classes_or_images_leave_the_rows_blank(tmp_path):
    for arguments, sizes in (({}, (60, 30, 300)), ({"ways": 3}, (60, 30, 30))):
        rows = FewShot(**arguments).run(StubContext(tmp_path, 3, **splits(sizes=sizes)))
        assert len(rows) == 4
        assert all(row.value is None and "test images, there are" in row.note for row in rows)
    one = FewShot(ways=2).run(StubContext(tmp_path, 1, **splits(num_classes=1, sizes=(9, 9, 90))))
    assert one[0].value is None
    assert "need 2 classes of 20 test images, there are 1" in one[0].note


def test_bad_input_is_refused(tmp_path):
    for arguments in ({"ways": 1}, {"queries": 0}, {"episodes": 1}, {"shots": ()}, {"shots": (0,)}, {"shots": (1, 1)}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            FewShot(**arguments)
    sets = splits()
    sets["test"][0][4, 2] = torch.nan
    with pytest.raises(DataError, match="NaN or infinity in 1 of 30"):
        FewShot().run(StubContext(tmp_path, 3, **sets))
