"""Spectra during training: what stands in the file, and that the run does not notice."""

import dataclasses

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ssl_bench.checking import points
from ssl_bench.data import PretrainDataModule
from ssl_bench.evaluation.diagnostics.stepwise import mode_figures
from ssl_bench.sweep.eigenmodes import Eigenmodes
from ssl_bench.training import pretrain

STEPS = 6


@pytest.fixture(scope="module")
def dataset():
    return points.small_dataset()


class Stop(Callback):
    """As a kill after step 4, a checkpoint of step 3 being the last."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 4:
            raise KeyboardInterrupt


def train(name, dataset, folder, *callbacks, accumulate=1, every=2):
    default, views = points.make_views(name, dataset)
    method = points.make_method(name, points.kinds_of(name)[0], dataset, views.num_views)
    recipe = dataclasses.replace(default, warmup_epochs=0.0, global_batch_size=32)
    data = PretrainDataModule(dataset, views, global_batch_size=32, seed=0, accumulate_grad_batches=accumulate)
    looks = [Eigenmodes(dataset, folder, every)] if every else []
    pretrain(
        method,
        data,
        folder=folder,
        recipe=recipe,
        epochs=2,
        max_steps=STEPS,
        checkpoint_every_steps=3,
        log_every_n_steps=1,
        callbacks=[*looks, *callbacks],
    )
    return method


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return train("simclr", dataset, folder), folder


def test_the_file_has_both_layers_before_training_and_every_few_steps(trained):
    _, folder = trained
    table = pd.read_csv(folder / "eigenmodes.csv")
    assert table["step"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert table["layer"].tolist() == ["embedding", "projection"] * 4
    curve = pd.read_csv(folder / "curve.csv").set_index("step")
    seen = table.drop_duplicates("step").set_index("step")
    for step in (2, 4, 6):
        assert seen["effective_time"][step] == pytest.approx(curve["lr"][:step].sum(), rel=1e-12)
        assert seen["loss"][step] == pytest.approx(curve["train/loss"][step], rel=1e-6)
    assert pd.isna(seen["loss"][0])
    assert seen["effective_time"][0] == 0


def test_figures_are_those_of_the_networks_outputs(trained, dataset):
    method, folder = trained
    last = pd.read_csv(folder / "eigenmodes.csv").iloc[-1]
    rows = Eigenmodes(dataset, folder, 1)._embed(method)
    assert last["num_rows"] == len(rows["projection"]) == 2 * min(1024, len(dataset.split("train")))
    for name, value in mode_figures(rows["projection"]).items():
        assert last[name] == pytest.approx(value, rel=1e-6)
    assert last["effective_rank"] > 1


def test_the_run_does_not_notice(trained, dataset, tmp_path):
    method, _ = trained
    plain = train("simclr", dataset, tmp_path, every=0)
    for (name, a), b in zip(method.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_resumed_run_writes_the_same_file(trained, dataset, tmp_path):
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train("simclr", dataset, tmp_path, Stop())
    train("simclr", dataset, tmp_path)
    assert (tmp_path / "eigenmodes.csv").read_text() == (trained[1] / "eigenmodes.csv").read_text()


def test_accumulated_steps_count_once_and_a_method_without_projector_has_one_layer(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("ssl_bench.sweep.eigenmodes.NUM_IMAGES", 64)
    train("mae", dataset, tmp_path, accumulate=2, every=3)
    table = pd.read_csv(tmp_path / "eigenmodes.csv")
    assert table["step"].tolist() == [0, 3, 6]
    assert set(table["layer"]) == {"embedding"}
    curve = pd.read_csv(tmp_path / "curve.csv").query("step > 0")
    assert table["effective_time"].iloc[-1] == pytest.approx(curve["lr"].sum(), rel=1e-12)
