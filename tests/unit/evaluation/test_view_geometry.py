import itertools

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation import EvaluationContext
from ssl_bench.evaluation.diagnostics.lidar import lidar
from ssl_bench.evaluation.loading import view_batches
from ssl_bench.evaluation.protocols.view_geometry import ViewGeometry
from ssl_bench.nn.backbone import Backbone
from tests.unit.evaluation.fakes import FakeDataset, tiny_net


class Constant(Backbone):
    """The same embedding for every image."""

    def __init__(self, value):
        super().__init__()
        self.embed_dim = 3
        self.value = nn.Parameter(torch.full((3,), value))

    def forward(self, images):
        return self.value.expand(len(images), 3)


def run(tmp_path, backbone=None, dataset=None, batch_size=512, seed=0, **arguments):
    net = tiny_net() if backbone is None else backbone
    context = EvaluationContext(net, dataset or FakeDataset(), work_dir=tmp_path, batch_size=batch_size, seed=seed)
    return {row.metric: row for row in ViewGeometry(**arguments).run(context)}


def test_rows_equal_a_run_of_the_network_by_hand(tmp_path):
    net, data = tiny_net().eval(), FakeDataset()
    context = EvaluationContext(net, data, work_dir=tmp_path, seed=3)
    embedded = []
    with torch.no_grad():
        for epoch in (0, 1):
            batch = next(
                iter(
                    view_batches(data.split("train"), context.views("simclr"), [torch.arange(33)], epoch=epoch, seed=3)
                )
            )
            embedded += [net(view) for view in batch.views]
    views = torch.stack(embedded, dim=1).double()
    unit = views / views.norm(dim=2, keepdim=True)
    distances = [
        float((unit[i, a] - unit[i, b]).square().sum())
        for i in range(33)
        for a, b in itertools.combinations(range(4), 2)
    ]
    rows = run(tmp_path, net, data, seed=3, num_views=4)
    assert rows["alignment"].value == pytest.approx(sum(distances) / len(distances), rel=1e-6)
    assert rows["lidar"].value == pytest.approx(lidar(views), rel=1e-6)
    assert rows["alignment"].details["num_pairs"] == len(distances)


def test_rows_state_their_settings_and_read_train_alone(tmp_path):
    data = FakeDataset()
    rows = run(tmp_path, dataset=data, num_images=11)
    assert set(data.asked) == {"train"}
    assert set(rows) == {"alignment", "lidar"}
    assert all({"layer", "views", "centered", "embed_dim"} <= set(row.details) for row in rows.values())
    assert all(row.n_test == 11 and row.split == "train" and row.selected_on == "none" for row in rows.values())
    assert not rows["alignment"].higher_is_better
    assert rows["lidar"].details["num_views"] == 10
    assert rows["lidar"].details["embed_dim"] == 16
    assert run(tmp_path, num_images=1000)["lidar"].n_test == 33


def test_batches_do_not_change_the_rows_and_the_seed_does(tmp_path):
    """Other batch sizes sum convolutions in another order: float32 roundings."""
    whole, parts, other = run(tmp_path), run(tmp_path, batch_size=5), run(tmp_path, seed=1)
    for name, row in whole.items():
        assert parts[name].value == pytest.approx(row.value, rel=1e-4)
        assert other[name].value != pytest.approx(row.value, rel=1e-4)


def test_a_collapsed_backbone_is_reported(tmp_path):
    for value in (0.5, 0.0):
        rows = run(tmp_path, Constant(value))
        assert rows["alignment"].value == 0.0
        assert rows["lidar"].value == 0.0


def test_the_callers_backbone_is_left_alone(tmp_path):
    net = tiny_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run(tmp_path, net, num_views=2)
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_wrong_settings_and_data_are_refused(tmp_path):
    for num_views in (0, 3):
        with pytest.raises(ConfigError, match="num_views"):
            ViewGeometry(num_views=num_views)
    with pytest.raises(ConfigError, match="num_images"):
        ViewGeometry(num_images=1)
    with pytest.raises(DataError, match="at least 2"):
        run(tmp_path, dataset=FakeDataset(sizes=(1, 3, 3)))
    with pytest.raises(DataError, match="finite"):
        run(tmp_path, Constant(float("nan")))
