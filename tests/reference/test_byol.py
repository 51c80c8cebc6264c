"""BYOL against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

HEADS = {"hidden_dim": 12, "projection_dim": 5}


def regression(p, t):
    """Mean squared distance of the two unit vectors, coordinate by coordinate."""
    total = 0.0
    for p_i, t_i in zip(p.tolist(), t.tolist(), strict=True):
        p_norm, t_norm = math.sqrt(sum(x * x for x in p_i)), math.sqrt(sum(x * x for x in t_i))
        total += sum((x / p_norm - y / t_norm) ** 2 for x, y in zip(p_i, t_i, strict=True))
    return total / len(p)


class Fixed(nn.Module):
    """A target network that gives a set answer for each view."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, view):
        (answer,) = (t for v, t in self.answers if v is view)
        return answer


def loss_of(p_1, p_2, t_1, t_2):
    method = bare_method("byol", heads=("projector", "predictor"))
    method.target = Fixed([(p_1, t_1), (p_2, t_2)])
    return method.loss((p_1, p_2), empty_batch(len(p_1))).total


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("num", "width"), [(2, 2), (5, 3), (16, 33)])
def test_loss_equals_the_loop_oracle(num, width):
    p_1, p_2, t_1, t_2 = (randn(num, width, seed=seed) for seed in range(4))
    expected = regression(p_1, t_2) + regression(p_2, t_1)
    torch.testing.assert_close(loss_of(p_1, p_2, t_1, t_2).item(), expected, **EXACT)


def test_hand_computed_value_is_the_sum_of_both_directions():
    p_1, t_2 = tensor([[3.0, 4.0], [1.0, 0.0]]), tensor([[4.0, 3.0], [0.0, 2.0]])
    p_2, t_1 = tensor([[1.0, 1.0], [2.0, 0.0]]), tensor([[1.0, 0.0], [0.0, -3.0]])
    assert regression(p_1, t_2) == pytest.approx(1.04, abs=1e-12)
    assert regression(p_2, t_1) == pytest.approx(1.2928932188, abs=1e-9)
    assert loss_of(p_1, p_2, t_1, t_2).item() == pytest.approx(2.3328932188, abs=1e-9)


def test_views_are_crossed():
    p_1, p_2, t_1, t_2 = (randn(4, 3, seed=seed) for seed in range(4))
    uncrossed = regression(p_1, t_1) + regression(p_2, t_2)
    assert abs(loss_of(p_1, p_2, t_1, t_2).item() - uncrossed) > 1e-2


def test_range_scale_invariance_and_orthogonal_gradient():
    p_1, p_2 = randn(4, 3), randn(4, 3, seed=1)
    assert loss_of(p_1, p_2, p_2.detach(), p_1.detach()).item() == pytest.approx(0.0, abs=1e-12)
    assert loss_of(p_1, p_2, -p_2.detach(), -p_1.detach()).item() == pytest.approx(8.0, abs=1e-12)
    t_1, t_2 = randn(4, 3, seed=2).detach(), randn(4, 3, seed=3).detach()
    scaled = loss_of(p_1 * 7, p_2 / 3, t_1 * 0.2, t_2 * 5)
    torch.testing.assert_close(scaled, loss_of(p_1, p_2, t_1, t_2), **EXACT)
    loss_of(p_1, p_2, t_1, t_2).backward()
    assert p_1.grad.abs().max() > 1e-3
    torch.testing.assert_close((p_1.grad * p_1).sum(1), torch.zeros(4, dtype=torch.float64), **EXACT)


def test_method_predicts_the_targets_projection_of_the_other_view():
    method, batch = tiny_method("byol", **HEADS), tiny_batch(6)
    with torch.no_grad():
        for parameter in method.target.parameters():
            parameter.mul_(1.3)  # a target unlike the online network
    predictions, targets = record_outputs(method.predictor), record_outputs(method.target)
    total = method.loss(batch.views, batch).total
    by_view = [method.target(view) for view in batch.views]
    assert torch.equal(targets[0], by_view[1])
    expected = regression(predictions[0], by_view[1]) + regression(predictions[1], by_view[0])
    torch.testing.assert_close(total.item(), expected, **EXACT)
    swapped = method.loss(batch.views[::-1], batch).total
    torch.testing.assert_close(swapped, total, **EXACT)


def test_target_has_no_gradient_and_the_online_network_has():
    method, batch = tiny_method("byol", **HEADS), tiny_batch(6)
    method.loss(batch.views, batch).total.backward()
    for name, parameter in method.named_parameters():
        assert (parameter.grad is None) == name.startswith("target."), name
    declared = {name for group in method.parameter_groups() for name, _ in group.parameters}
    assert not any(name.startswith("target.") for name in declared)


def test_target_starts_as_a_copy_and_follows_with_the_scheduled_momentum():
    method = tiny_method("byol", target_momentum=0.996, **HEADS)
    online = nn.Sequential(method.backbone, method.projector)
    for t, o in zip(method.target.module.parameters(), online.parameters(), strict=True):
        assert torch.equal(t, o)
    before = [p.clone() for p in method.target.module.parameters()]
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(1.0)
    method.after_optimizer_step(1, 4)  # a quarter of training: momentum 0.9965857864
    for t, start, o in zip(method.target.module.parameters(), before, online.parameters(), strict=True):
        torch.testing.assert_close(t, 0.9965857864 * start + (1 - 0.9965857864) * o, rtol=0, atol=1e-9)
    method.after_optimizer_step(4, 4)  # momentum 1: the target stands still
    moved = [p.clone() for p in method.target.module.parameters()]
    method.after_optimizer_step(4, 4)
    assert all(torch.equal(a, b) for a, b in zip(moved, method.target.module.parameters(), strict=True))


def test_target_normalizes_with_its_own_batch_in_training_and_the_online_backbone_is_evaluated():
    method, batch = tiny_method("byol", **HEADS), tiny_batch(6)
    assert all(module.training for module in method.target.modules())
    before = method.target.module[0].blocks[1].running_mean.clone()
    method.loss(batch.views, batch)
    assert not torch.equal(before, method.target.module[0].blocks[1].running_mean)
    assert method.evaluation_backbone is method.backbone


def test_heads_have_hidden_bias_and_batch_norm_but_a_plain_output():
    method = tiny_method("byol", **HEADS)
    for head, width in ((method.projector, 64), (method.predictor, 5)):
        first, norm, activation, last = head
        assert first.weight.shape == (12, width)
        assert first.bias is not None
        assert isinstance(norm, nn.BatchNorm1d)
        assert isinstance(activation, nn.ReLU)
        assert last.weight.shape == (5, 12)
        assert last.bias is None
