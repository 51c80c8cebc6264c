"""LFR against the paper's equations in plain loops, and the card's values."""

import contextlib
import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from ssl_bench.data import PretrainDataModule
from ssl_bench.data.dataset import Dataset
from ssl_bench.data.store import ImageStore
from ssl_bench.methods.lfr import RandomProjector, batch_correlation_loss
from ssl_bench.optim import apply_schedule, build_optimizer
from ssl_bench.training import pretrain
from ssl_bench.views import build_views
from tests.reference.tiny import EXACT, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"num_projectors": 2, "target_dim": 5, "predictor_hidden_dim": 4}


def unit(row):
    norm = math.sqrt(sum(x * x for x in row))
    return [x / norm for x in row]


def oracle(prediction, target, weight=0.01):
    p, z = [unit(row) for row in prediction.tolist()], [unit(row) for row in target.tolist()]
    total = 0.0
    for i in range(len(p)):
        for j in range(len(p)):
            c = sum(a * b for a, b in zip(p[i], z[j], strict=True))
            total += (c - 1) ** 2 if i == j else weight * c * c
    return total


class Answer(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer


def test_hand_computed_values():
    p = torch.tensor([[1, 0], [0.6, 0.8], [0, 1]], dtype=torch.float64)
    z = torch.tensor([[0.8, 0.6], [0, 2], [-1, 0]], dtype=torch.float64)
    assert batch_correlation_loss(p, z, off_diagonal_weight=0.01).item() == pytest.approx(1.1164160000, abs=1e-9)
    assert batch_correlation_loss(p, z, off_diagonal_weight=0.0).item() == pytest.approx(1.08, abs=1e-12)
    assert batch_correlation_loss(p, z, off_diagonal_weight=1.0).item() == pytest.approx(1.08 + 3.6416, abs=1e-12)


@pytest.mark.parametrize(("num", "width"), [(1, 2), (6, 4)])
def test_loss_equals_the_loop_oracle(num, width):
    p, z = randn(num, width), randn(num, width, seed=1).detach()
    got = batch_correlation_loss(p, z, off_diagonal_weight=0.3)
    torch.testing.assert_close(got.item(), oracle(p, z, 0.3), **EXACT)


def test_perfect_prediction_of_orthogonal_targets_is_zero():
    z = 3 * torch.eye(4, dtype=torch.float64)
    assert batch_correlation_loss(z / 7, z, off_diagonal_weight=0.01).item() == pytest.approx(0, abs=1e-15)
    for same in (torch.ones(3, 2), -torch.ones(3, 2)):  # |c| = 1 is allowed
        assert torch.isfinite(batch_correlation_loss(same, torch.ones(3, 2), off_diagonal_weight=0.01))


def test_scale_of_rows_and_order_of_the_batch_do_not_matter():
    p, z = randn(5, 3).detach(), randn(5, 3, seed=1).detach()
    loss = batch_correlation_loss(p, z, off_diagonal_weight=0.01)
    scales = torch.tensor([[0.1], [2.0], [3.0], [1.0], [9.0]], dtype=torch.float64)
    torch.testing.assert_close(batch_correlation_loss(p * scales, z / scales, off_diagonal_weight=0.01), loss, **EXACT)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(batch_correlation_loss(p[order], z[order], off_diagonal_weight=0.01), loss, **EXACT)


def test_method_averages_over_projectors_and_gives_targets_no_gradient():
    method = tiny_method("lfr", **SMALL)
    predictions = [randn(4, 5, seed=seed) for seed in range(2)]
    targets = [randn(4, 5, seed=seed) for seed in (2, 3)]
    method.backbone = nn.Identity()
    method.predictors, method.projectors = (nn.ModuleList(map(Answer, rows)) for rows in (predictions, targets))
    total = method.loss((targets[0],), empty_batch(4)).total
    expected = sum(oracle(p, z) for p, z in zip(predictions, targets, strict=True)) / 2
    torch.testing.assert_close(total.item(), expected, **EXACT)
    total.backward()
    assert targets[0].grad is None
    assert predictions[1].grad is not None


def test_method_is_the_formula_of_its_networks():
    method, batch = tiny_method("lfr", **SMALL), tiny_batch(6, num_views=1)
    total = method.loss(batch.views, batch).total
    embedding = method.backbone(batch.views[0])
    pairs = zip(method.predictors, method.projectors, strict=True)
    expected = sum(oracle(h(embedding), g(batch.views[0])) for h, g in pairs) / 2
    torch.testing.assert_close(total.item(), expected, **EXACT)


def test_projectors_are_the_networks_of_the_code():
    torch.manual_seed(0)
    projector = RandomProjector(3, 32, 7)
    convolutions = [layer for layer in projector.layers if isinstance(layer, nn.Conv2d)]
    assert [tuple(c.weight.shape[:2]) for c in convolutions] == [
        (8, 3),
        (16, 8),
        (32, 16),
        (32, 32),
        (32, 32),
        (32, 32),
    ]
    weights = torch.cat([c.weight.flatten() for c in convolutions])
    # Beta(1/2, 1/2) on [-1, 1]: a third of the mass beyond cos(pi / 6); 34,000 weights, five standard deviations
    assert abs((weights.abs() > math.cos(math.pi / 6)).double().mean().item() - 1 / 3) < 5 * 0.48 / len(weights) ** 0.5
    linear = projector.layers[-1]
    assert linear.in_features == 32 * 4 * 4
    assert (linear.weight == 0).sum().item() == round(0.4 * linear.weight.numel())
    assert not any(p.requires_grad for p in projector.parameters())
    assert projector(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_projectors_differ_and_travel_in_the_state():
    method = tiny_method("lfr", **SMALL)
    first, second = (projector.layers[0].weight for projector in method.projectors)
    assert not torch.equal(first, second)
    other = tiny_method("lfr", seed=1, **SMALL)
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.projectors[1].layers[-1].weight, method.projectors[1].layers[-1].weight)


def moved_by_a_step(method, epoch):
    """Names of the tensors that one training step in an epoch changes."""
    recipe = dataclasses.replace(method.default_recipe("small"), weight_decay=0.1)
    optimizer = build_optimizer(method.parameter_groups(), recipe)
    before = copy.deepcopy(method.state_dict())
    method._trainer = type("Epoch", (), {"current_epoch": epoch})()
    batch = dataclasses.replace(tiny_batch(6, num_views=1), epoch=epoch)
    method.loss(batch.views, batch).total.backward()
    method.on_before_optimizer_step(optimizer)
    optimizer.step()
    return {key for key, value in method.state_dict().items() if not torch.equal(value, before[key])}


@pytest.mark.parametrize("predictor_epochs", [1, 5])
def test_each_epoch_moves_one_side_alone(predictor_epochs):
    for epoch in range(2 * predictor_epochs + 3):
        method = tiny_method("lfr", predictor_epochs=predictor_epochs, **SMALL)
        moved = moved_by_a_step(method, epoch)
        parameters = {name for name, _ in method.trainable_parameters()} & moved
        if epoch % (predictor_epochs + 1) == 0:
            assert {name.split(".")[0] for name in parameters} == {"backbone"}
            # as in the code, the predictors' batch norms stay in training mode
            assert any(name.startswith("predictors.") and "running" in name for name in moved)
        else:
            assert {name.split(".")[0] for name in moved} == {"predictors"}
        assert method.backbone.training
        assert not any(name.startswith("projectors.") for name in moved)


def test_both_sides_move_at_once_without_predictor_epochs():
    for epoch in (0, 1):
        method = tiny_method("lfr", predictor_epochs=0, **SMALL)
        assert {name.split(".")[0] for name in moved_by_a_step(method, epoch)} == {"backbone", "predictors"}


def test_every_parameter_has_a_gradient_in_every_epoch():
    """Training on several devices waits for all of them."""
    for epoch in (0, 1):
        method = tiny_method("lfr", **SMALL)
        batch = dataclasses.replace(tiny_batch(6, num_views=1), epoch=epoch)
        method.loss(batch.views, batch).total.backward()
        assert all(p.grad is not None for _, p in method.trainable_parameters())


def test_the_predictors_rate_stays_constant():
    method = tiny_method("lfr", **SMALL)
    recipe = dataclasses.replace(method.default_recipe("cifar"), base_lr=0.1)
    optimizer = build_optimizer(method.parameter_groups(), recipe)
    apply_schedule(optimizer, recipe, 50, 100, 10)
    predictors = {id(p) for p in method.predictors.parameters()}
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.1 if id(group["params"][0]) in predictors else 0.05)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(method.trainable_parameters())


class Stopped(Exception):
    pass


class Stop(Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 6:
            raise Stopped


class Few(Dataset):
    """64 random images of 16 px."""

    def load_split(self, name):
        images = np.random.default_rng(0).integers(0, 256, (64, 1, 16, 16), dtype=np.uint8)
        return ImageStore(images, np.zeros(64, dtype=np.int64))


def test_a_resume_in_a_predictor_epoch_continues_bitwise(tmp_path):
    views = build_views("eval", image_size=16, channels=1, mean=(0.5,), std=(0.3,))

    def run(folder, callbacks=()):
        method = tiny_method("lfr", predictor_epochs=1, **SMALL).float()
        recipe = dataclasses.replace(method.default_recipe("small"), global_batch_size=16, warmup_epochs=0)
        data = PretrainDataModule(Few(root=tmp_path), views, global_batch_size=16, seed=0)
        with contextlib.suppress(Stopped):
            pretrain(
                method, data, folder=folder, recipe=recipe, epochs=2, checkpoint_every_steps=5, callbacks=callbacks
            )  # fmt: skip
        return method

    whole = run(tmp_path / "whole")
    assert whole.steps_per_epoch == 4  # the checkpoint at step 5 lies in the second epoch
    run(tmp_path / "parts", [Stop()])
    resumed = run(tmp_path / "parts").state_dict()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed[key]), key
