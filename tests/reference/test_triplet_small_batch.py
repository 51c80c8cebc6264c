"""TriBYOL's chosen variant against its equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

HEADS = {"hidden_dim": 12, "projection_dim": 5}


def distance(p, t):
    """Mean over rows of 2 - 2 cos."""
    total = 0.0
    for a, b in zip(p.tolist(), t.tolist(), strict=True):
        norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
        total += 2 - 2 * sum(x * y for x, y in zip(a, b, strict=True)) / norms
    return total / len(p)


class Fixed(nn.Module):
    """A target network that gives a set answer for each view."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, view):
        (answer,) = (t for v, t in self.answers if v is view)
        return answer


def loss_of(predictions, first, second):
    """The loss where the views are the predictions, and the targets' projections are given."""
    method = bare_method("triplet_small_batch", heads=("projector", "predictor"))
    answers = [list(zip(predictions, projections, strict=True)) for projections in (first, second)]
    method.targets = nn.ModuleList(Fixed(answer) for answer in answers)
    return method.loss(predictions, empty_batch(len(predictions[0]))).total


@pytest.mark.parametrize(("num", "width"), [(2, 2), (7, 3), (16, 33)])
def test_loss_equals_the_loop_oracle(num, width):
    p, t, u = (tuple(randn(num, width, seed=10 * k + v) for v in range(3)) for k in range(3))
    expected = 0.0
    for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        expected += (distance(p[a], t[b]) + distance(p[a], u[c])) / 3
    torch.testing.assert_close(loss_of(p, t, u).item(), expected, **EXACT)


def test_hand_computed_value():
    p = torch.tensor([[1, 0], [0.6, 0.8]], dtype=torch.float64)
    t = torch.tensor([[0.8, 0.6], [1, 0]], dtype=torch.float64)
    u = torch.tensor([[0, 1], [0.6, 0.8]], dtype=torch.float64)
    assert distance(p, t) == pytest.approx(0.6, abs=1e-12)
    assert distance(p, u) == pytest.approx(1.0, abs=1e-12)
    # copies, so that the answers can be told apart; every assignment gives 1.6
    assert loss_of(tuple(p.clone() for _ in range(3)), (t,) * 3, (u,) * 3).item() == pytest.approx(1.6, abs=1e-12)


def test_range_and_scale():
    views = tuple(randn(4, 3, seed=v).detach() for v in range(3))
    row = randn(4, 3, seed=7).detach()
    same = tuple(row * (v + 1) for v in range(3))
    assert loss_of(same, same, same).item() == pytest.approx(0.0, abs=1e-12)
    opposite = tuple(-view for view in same)
    assert loss_of(same, opposite, opposite).item() == pytest.approx(8.0, abs=1e-12)
    scaled = tuple(3 * view for view in views)
    torch.testing.assert_close(loss_of(scaled, same, same), loss_of(views, same, same), **EXACT)


def test_method_is_the_formula_of_its_networks():
    method = tiny_method("triplet_small_batch", num_views=3, **HEADS)
    with torch.no_grad():
        for target in method.targets:
            for p in target.module.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    predictions = record_outputs(method.predictor)
    projections = [record_outputs(target) for target in method.targets]
    batch = tiny_batch(7, num_views=3)
    total = method.loss(batch.views, batch).total.item()
    expected = sum(
        distance(predictions[v], projections[0][(v + 1) % 3]) + distance(predictions[v], projections[1][(v + 2) % 3])
        for v in range(3)
    )
    torch.testing.assert_close(total, expected / 3, **EXACT)


def test_targets_have_no_gradient_and_follow_after_the_step():
    method = tiny_method("triplet_small_batch", num_views=3, target_momentum=0.9, second_target_momentum=0.75, **HEADS)
    online = nn.Sequential(method.backbone, method.projector)
    for target in method.targets:
        for copy, own in zip(target.module.parameters(), online.parameters(), strict=True):
            assert torch.equal(copy, own)
    batch = tiny_batch(6, num_views=3)
    method.loss(batch.views, batch).total.backward()
    assert all(p.grad is None for p in method.targets.parameters())
    before = [p.detach().clone() for p in online.parameters()]
    with torch.no_grad():
        for p in online.parameters():
            p.sub_(p.grad)
    method.after_optimizer_step(1, 10)
    for target, tau in zip(method.targets, (0.9, 0.75), strict=True):
        for moved, old, new in zip(target.module.parameters(), before, online.parameters(), strict=True):
            torch.testing.assert_close(moved, tau * old + (1 - tau) * new.detach(), **EXACT)


@pytest.mark.parametrize(("second", "equal"), [(0.9, True), (0.8, False)])
def test_targets_stay_equal_only_with_equal_momenta(second, equal):
    method = tiny_method(
        "triplet_small_batch", num_views=3, target_momentum=0.9, second_target_momentum=second, **HEADS
    )
    for step in range(3):
        with torch.no_grad():
            for p in method.backbone.parameters():
                p.add_(0.1)
        method.after_optimizer_step(step + 1, 3)
    pairs = zip(*(target.module.parameters() for target in method.targets), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == equal
