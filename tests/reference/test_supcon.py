"""SupCon against the paper's L_out in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.errors import DataError
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

VIEW_1 = torch.tensor([[1, 0], [0.6, 0.8], [0, 1]]).double()
VIEW_2 = torch.tensor([[0.8, 0.6], [0, 1], [-0.6, 0.8]]).double()


def oracle(views, labels, t):
    z = [row / row.norm() for view in views for row in view.detach()]
    y = list(labels) * len(views)
    total = 0.0
    for i in range(len(z)):
        s = [float(z[i] @ z_a) / t for z_a in z]
        others = [a for a in range(len(z)) if a != i]
        positives = [p for p in others if y[p] == y[i]]
        log_sum = math.log(sum(math.exp(s[a]) for a in others))
        total -= sum(s[p] - log_sum for p in positives) / max(1, len(positives))
    return total / len(z)


def loss_of(view_1, view_2, labels, temperature, **arguments):
    method = bare_method("supcon", temperature=temperature, **arguments)
    batch = empty_batch(len(view_1), labels=torch.tensor(labels))
    return method.loss((view_1, view_2), batch).total


@pytest.mark.parametrize(
    ("labels", "temperature", "value"),
    [([0, 0, 1], 0.1, 2.6753927801), ([0, 0, 1], 0.2, 1.7879881402), ([0, 1, 2], 0.2, 1.2102103624)],
)
def test_hand_computed_values(labels, temperature, value):
    assert loss_of(VIEW_1, VIEW_2, labels, temperature).item() == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize(("num", "classes"), [(2, 1), (7, 3), (5, 5)])
def test_loss_equals_the_loop_oracle(num, classes):
    views = (randn(num, 4), randn(num, 4, seed=1))
    labels = [i % classes for i in range(num)]
    torch.testing.assert_close(loss_of(*views, labels, 0.3).item(), oracle(views, labels, 0.3), **EXACT)


def test_base_temperature_scales_value_and_gradient():
    view = VIEW_1.clone().requires_grad_()
    plain, scaled = (loss_of(view, VIEW_2, [0, 0, 1], 0.14, **extra) for extra in ({}, {"base_temperature": 0.07}))
    torch.testing.assert_close(scaled, 2 * plain, **EXACT)


def test_collapse_and_renaming_of_labels():
    same = torch.ones(4, 3, dtype=torch.float64)
    assert loss_of(same, same.clone(), [0, 0, 1, 1], 0.1).item() == pytest.approx(math.log(7), abs=1e-10)
    assert loss_of(VIEW_1, VIEW_2, [5, 5, 9], 0.1).item() == pytest.approx(2.6753927801, abs=1e-7)


def test_method_is_the_formula_of_its_networks():
    labels = [0, 1, 0, 2]
    method = tiny_method("supcon", projection_dim=4)
    batch = tiny_batch(4, labels=torch.tensor(labels))
    z = [method.projector(method.backbone(view)).detach() for view in batch.views]
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), oracle(z, labels, 0.1), **EXACT)


def test_unlabelled_images_are_refused():
    with pytest.raises(DataError, match="label for every image"):
        loss_of(VIEW_1, VIEW_2, [0, -1, 1], 0.1)
