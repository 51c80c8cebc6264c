import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation import EvaluationContext
from ssl_bench.evaluation.diagnostics.manifold_quality import manifold_quality
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocols import rmqm as module
from ssl_bench.evaluation.protocols.rmqm import RMQM
from ssl_bench.nn.backbone import Backbone
from ssl_bench.random import normal, sample_keys
from tests.unit.evaluation.fakes import FakeDataset, tiny_net

MEAN, STD = 0.5, 0.25  # of FakeDataset


class Head(Backbone):
    """The mean pixel through a function."""

    def __init__(self, function):
        super().__init__()
        self.embed_dim = 3
        self.function = function
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, images):
        return self.function(images.mean(dim=(1, 2, 3))[:, None] * self.weight)


def context(tmp_path, backbone=None, dataset=None, **arguments):
    net = tiny_net() if backbone is None else backbone
    return EvaluationContext(net, dataset or FakeDataset(), work_dir=tmp_path, **arguments)


def run(tmp_path, backbone=None, dataset=None, seed=0, batch_size=512, **arguments):
    rows = RMQM(**arguments).run(context(tmp_path, backbone, dataset, seed=seed, batch_size=batch_size))
    return {row.metric: row for row in rows}


def pixels(data, index):
    return data.split("test").take(index).float() / 255


def test_noise_is_one_field_scaled(tmp_path):
    net, data, index = tiny_net().eval(), FakeDataset(), torch.arange(14)
    field = normal(sample_keys(2, 0, index, "rmqm_noise"), 64, "field").view(14, 1, 8, 8)
    with torch.no_grad():
        levels = torch.stack(
            [net(((pixels(data, index) + sd * field).clamp(0, 1) - MEAN) / STD) for sd in (0, 0.25, 0.5, 0.75, 1)], 1
        )
    expected = manifold_quality(levels)
    row = run(tmp_path, net, data, seed=2, noise_levels=5, attack_levels=3)["rmqm_noise"]
    assert row.value == pytest.approx(expected.value, rel=1e-4)
    assert row.details["curve"] == pytest.approx(expected.curve, rel=1e-4)


def test_attack_equals_one_restarted_for_every_level(tmp_path):
    """Each level from the original image, the loss written out over the 2 B rows."""
    net, data, index = tiny_net().eval(), FakeDataset(), torch.arange(14)
    settings = context(tmp_path, net, data)

    def reference(step):
        views = view_batches(data.split("test"), settings.views("simclr"), [index], epoch=step // 2, seed=0)
        return F.normalize(net(next(views).views[step % 2]), dim=1).detach()

    def loss(z, ref):
        rows = torch.cat([ref, F.normalize(z, dim=1)])
        logits = rows @ rows.T / 0.07 - torch.diag(torch.full((28,), math.inf))
        partner = torch.arange(28).roll(14)
        return F.cross_entropy(logits, partner)

    levels = []
    for level in range(5):
        x = pixels(data, index)
        for step in range(level):
            x = x.detach().requires_grad_(True)
            value = loss(net((x - MEAN) / STD), reference(step))
            gradient = torch.autograd.grad(value, x)[0]
            x = (x.detach() + gradient.sign() / 255).clamp(0, 1)
            assert loss(net((x - MEAN) / STD), reference(step)) > value  # an ascent
        with torch.no_grad():
            levels.append(net((x - MEAN) / STD))
    expected = manifold_quality(torch.stack(levels, 1))
    row = run(tmp_path, net, data, noise_levels=3, attack_levels=5)["rmqm_attack"]
    assert row.value == pytest.approx(expected.value, rel=1e-3)
    assert row.details["curve"] == pytest.approx(expected.curve, rel=1e-3)


def test_rows_state_their_settings_and_read_test_alone(tmp_path):
    data = FakeDataset()
    rows = run(tmp_path, dataset=data, num_images=7, attack_levels=4)
    assert set(data.asked) == {"test"}
    assert set(rows) == {"rmqm_noise", "rmqm_attack"}
    assert all({"layer", "view", "centered", "embed_dim"} <= set(row.details) for row in rows.values())
    assert all(row.n_test == 7 and row.split == "test" and row.selected_on == "none" for row in rows.values())
    assert all(row.higher_is_better and not row.note for row in rows.values())
    assert rows["rmqm_noise"].details["levels"] == 20
    assert len(rows["rmqm_noise"].details["curve"]) == 19
    assert rows["rmqm_attack"].details["levels"] == 4
    assert run(tmp_path, noise_levels=3, attack_levels=3)["rmqm_noise"].n_test == 14


def test_labels_play_no_part(tmp_path):
    sets = [[0] * 33, [0] * 12, [0] * 14], [[2] * 33, [2] * 12, [-1] * 14]
    data, other = FakeDataset(), FakeDataset()
    for split, labels in zip(("train", "validation", "test"), sets[1], strict=True):
        other.stores[split].labels[:] = labels
    few = {"noise_levels": 4, "attack_levels": 4}
    first, second = run(tmp_path, dataset=data, **few), run(tmp_path, dataset=other, **few)
    assert {name: row.value for name, row in first.items()} == {name: row.value for name, row in second.items()}


def test_extraction_batches_do_not_change_the_rows_and_the_seed_does(tmp_path):
    few = {"noise_levels": 4, "attack_levels": 4}
    whole, parts, other = (
        run(tmp_path, **few),
        run(tmp_path, batch_size=3, **few),
        run(tmp_path, seed=1, **few),
    )
    for name, row in whole.items():
        assert parts[name].value == row.value
        assert other[name].value != row.value


def test_batches_are_equal_shares(tmp_path, monkeypatch):
    """14 images by at most 5 are 5, 5 and 4: never a single one without a negative."""
    sizes = []
    monkeypatch.setattr(module, "MAX_BATCH", 5)
    attack = module._Alterations.attack
    monkeypatch.setattr(module._Alterations, "attack", lambda self, i, n: sizes.append(len(i)) or attack(self, i, n))
    assert run(tmp_path, noise_levels=3, attack_levels=3)["rmqm_attack"].n_test == 14
    assert sizes == [5, 5, 4]


def test_collapsed_backbones_have_no_value_and_say_so(tmp_path):
    few = {"noise_levels": 4, "attack_levels": 4}
    for row in run(tmp_path, Head(lambda x: 0 * x + 1), **few).values():
        assert row.value is None
        assert row.note == "no image moves at all"
        assert row.details["change_to_original"] is None
    on_a_line = run(tmp_path, Head(lambda x: x), **few)  # two directions on the sphere: steps of 0 or 2
    assert on_a_line["rmqm_attack"].value is None


def test_the_callers_backbone_is_left_alone(tmp_path):
    net = tiny_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run(tmp_path, net, noise_levels=3, attack_levels=3)
    assert net.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_wrong_settings_and_data_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_images"):
        RMQM(num_images=1)
    with pytest.raises(ConfigError, match="noise_levels"):
        RMQM(noise_levels=2)
    with pytest.raises(ConfigError, match="attack_levels"):
        RMQM(attack_levels=2)
    with pytest.raises(DataError, match="at least 2"):
        run(tmp_path, dataset=FakeDataset(sizes=(9, 3, 1)))
    with pytest.raises(DataError, match="finite"):
        run(tmp_path, Head(lambda x: x * math.nan), noise_levels=3, attack_levels=3)
