"""Pretraining: accumulation, guards, checkpoints, the online probe, the schedule's end."""

import dataclasses

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ssl_bench.checking import points
from ssl_bench.data import PretrainDataModule
from ssl_bench.errors import ConfigError, DivergedError, StoreError
from ssl_bench.sweep.online_probe import OnlineKNN
from ssl_bench.training import pretrain
from ssl_bench.training.callbacks import latest_checkpoint
from ssl_bench.views import build_views


@pytest.fixture(scope="module")
def dataset():
    return points.small_dataset()


def train(name, dataset, folder, *, steps=6, accumulate=1, batch=32, recipe=None, **arguments):
    default, views = points.make_views(name, dataset)
    changes = {"warmup_epochs": 0.0, "global_batch_size": batch, **(recipe or {})}
    method = points.make_method(name, points.kinds_of(name)[0], dataset, views.num_views)
    data = PretrainDataModule(
        dataset, views, global_batch_size=batch, seed=0, with_labels=method.uses_labels,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    summary = pretrain(
        method,
        data,
        folder=folder,
        recipe=dataclasses.replace(default, **changes),
        epochs=1,
        max_steps=steps,
        **arguments,
    )
    return method, summary


def test_accumulation_equals_a_larger_batch(dataset, tmp_path):
    """MAE: a mean over samples and no batch norm. float32: only the order of sums differs."""
    sgd = {"optimizer": "sgd", "base_lr": 0.05}
    whole, _ = train("mae", dataset, tmp_path / "a", recipe=sgd)
    parts, summary = train("mae", dataset, tmp_path / "b", accumulate=4, recipe=sgd)
    assert summary.steps == 6
    for (name, a), b in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        # six steps, each adding a relative rounding of some 2^-24 * sqrt(terms) to weights of order 1
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_accumulation_is_refused_where_the_loss_couples_samples(dataset, tmp_path):
    with pytest.raises(ConfigError, match="couples the samples"):
        train("simclr", dataset, tmp_path, accumulate=2)


def test_accumulation_is_refused_where_views_take_the_style_of_the_batch(dataset, tmp_path):
    facts = {"channels": 1, "mean": dataset.mean, "std": dataset.std}
    views = build_views("mae", image_size=dataset.image_size, overrides={"style_area": [0.1, 0.5]}, **facts)
    data = PretrainDataModule(dataset, views, global_batch_size=32, seed=0, accumulate_grad_batches=2)
    method = points.make_method("mae", "vit", dataset, 1)
    with pytest.raises(ConfigError, match="style_area"):
        pretrain(method, data, folder=tmp_path, recipe=method.default_recipe("small"), epochs=1)


def test_momentum_encoders_step_once_an_optimizer_step(dataset, tmp_path):
    calls = []

    class Count(Callback):
        def on_train_start(self, trainer, pl_module):
            own = pl_module.after_optimizer_step
            pl_module.after_optimizer_step = lambda step, total: (calls.append((step, total)), own(step, total))

    train("byol", dataset, tmp_path, accumulate=2, steps=3, callbacks=[Count()])
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_too_small_a_batch_is_refused(dataset, tmp_path):
    with pytest.raises(ConfigError, match="global batch of at least 2"):
        train("simclr", dataset, tmp_path, batch=1)


def test_the_schedule_ends_with_the_last_step(dataset, tmp_path):
    train("supervised", dataset, tmp_path, steps=10, log_every_n_steps=1)
    curve = pd.read_csv(tmp_path / "curve.csv")
    assert curve["step"].tolist() == list(range(1, 11))
    peak = curve["lr"].iloc[0]
    # the rate of the tenth step, nine tenths along the cosine; after it the schedule is at zero
    assert curve["lr"].iloc[-1] == pytest.approx(
        peak * 0.5 * (1 + torch.cos(torch.tensor(0.9 * torch.pi)).item()), rel=1e-5
    )


def test_a_nan_loss_stops_before_it_reaches_the_weights(dataset, tmp_path):
    seen = {}

    class Poison(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                seen.update({name: p.clone() for name, p in pl_module.named_parameters()}, module=pl_module)
                batch.views[0].fill_(float("nan"))

    with pytest.raises(DivergedError, match="at step 3") as caught:
        train("simclr", dataset, tmp_path, callbacks=[Poison()])
    assert caught.value.step == 3
    module = seen.pop("module")
    assert all(torch.equal(p, seen[name]) for name, p in module.named_parameters())


def test_the_online_probe_changes_no_bit_of_the_run(dataset, tmp_path):
    plain, _ = train("byol", dataset, tmp_path / "a", batch=256, steps=-1)
    probed, _ = train("byol", dataset, tmp_path / "b", batch=256, steps=-1, callbacks=[OnlineKNN(dataset, 1, bank=500)])
    for (name, a), b in zip(plain.state_dict().items(), probed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    curve = pd.read_csv(tmp_path / "b" / "curve.csv")
    assert curve["probe/knn_top1"].dropna().between(0.2, 1).all()
    assert curve["probe/knn_top1"].count() == 1


def test_a_torn_checkpoint_gives_way_to_the_one_before(dataset, tmp_path):
    train("simclr", dataset, tmp_path, checkpoint_every_steps=2)
    last, previous = (tmp_path / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt"))
    assert latest_checkpoint(tmp_path) == (last, [])
    last.write_bytes(last.read_bytes()[:1000])
    path, notes = latest_checkpoint(tmp_path)
    assert path == previous
    assert "last.ckpt was unreadable" in notes[0]
    previous.write_bytes(b"")
    assert latest_checkpoint(tmp_path)[0] is None


def test_a_full_disk_says_so_and_keeps_the_checkpoint_before(dataset, tmp_path, monkeypatch):
    import os

    train("simclr", dataset, tmp_path, steps=2, checkpoint_every_steps=2)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()

    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        train("simclr", dataset, tmp_path, steps=6, checkpoint_every_steps=2)
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before
