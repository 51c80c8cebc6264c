"""MSBReg against plain loops and singular values from numpy, and the card's values."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from ssl_bench.losses.common import unit_rows
from ssl_bench.methods.msbreg import centroid_terms, flat_spectrum
from ssl_bench.random import normal
from tests.reference.tiny import EXACT, empty_batch, randn, record_outputs, tiny_batch, tiny_method

ONLINE = torch.tensor([[[1, 0], [0.6, 0.8]], [[0, 1], [-0.8, 0.6]]], dtype=torch.float64)  # image, view
TARGET = torch.tensor([[[0.8, 0.6], [1, 0]], [[0, 1], [-0.6, 0.8]]], dtype=torch.float64)
SMALL = {"hidden_dim": 8, "projection_dim": 6}


def unit(row):
    norm = math.sqrt(sum(x * x for x in row))
    return [x / norm for x in row]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def oracle(online, target, directions, singular=0.1, brownian=0.1):
    pull = push = 0.0
    centers = []
    for rows, others, n in zip(online.tolist(), target.tolist(), directions.tolist(), strict=True):
        center = unit([sum(c) / len(rows) for c in zip(*rows, strict=True)])
        pull += 2 - 2 * dot(center, unit([sum(c) for c in zip(*others, strict=True)]))
        push += sum(dot(row, n) for row in rows) / len(rows)
        centers.append(center)
    num, r = len(centers), min(len(centers), len(centers[0]))
    values = np.linalg.svd(np.array(centers), compute_uv=False)
    spectrum = sum((s**2 * r / num - 1) ** 2 for s in values) / r
    return pull / num, spectrum, push / num, pull / num + singular * spectrum + brownian * push / num


def test_hand_computed_centroid_terms():
    assert centroid_terms(ONLINE, TARGET, centroid="both").mean().item() == pytest.approx(0.0201010127, abs=1e-9)
    assert centroid_terms(ONLINE, TARGET, centroid="target").mean().item() == pytest.approx(0.2291245103, abs=1e-9)


def test_hand_computed_push_and_its_gradient():
    # the card's values: a linear functional of the unit embedding, its gradient tangential
    n = torch.tensor([[0.6, -0.8], [0.6, -0.8]], dtype=torch.float64)
    assert (ONLINE * n[:, None]).sum(-1).mean().item() == pytest.approx(-0.36)
    n_2 = torch.tensor([[0.6, -0.8], [0.0, 1.0]], dtype=torch.float64)
    assert (ONLINE * n_2[:, None]).sum(-1).mean().item() == pytest.approx(0.48)
    u = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    (unit_rows(u) * n[:1]).sum().backward()
    torch.testing.assert_close(u.grad, torch.tensor([[0.1536, -0.1152]], dtype=torch.float64), **EXACT)
    assert (u.grad * u.detach()).sum().abs() < 1e-15


@pytest.mark.parametrize(("num", "width"), [(4, 6), (9, 3)])
def test_spectrum_is_r_less_one_at_collapse(num, width):
    same = torch.zeros(num, width, dtype=torch.float64)
    same[:, 0] = 1
    assert flat_spectrum(same).item() == pytest.approx(min(num, width) - 1, abs=1e-12)


def test_orthonormal_rows_have_a_flat_spectrum():
    basis = torch.linalg.qr(randn(6, 4).detach())[0].T
    assert flat_spectrum(basis).item() == pytest.approx(0, abs=1e-12)


def test_two_orthogonal_images_are_flat_and_two_equal_ones_give_one():
    assert flat_spectrum(torch.eye(2, dtype=torch.float64)).item() == pytest.approx(0)
    assert flat_spectrum(torch.tensor([[1.0, 0], [1, 0]], dtype=torch.float64)).item() == pytest.approx(1)


@pytest.mark.parametrize("num_views", [2, 3])
def test_loss_equals_the_loop_oracle(num_views):
    method, batch = tiny_method("msbreg", num_views=num_views, **SMALL), tiny_batch(7, num_views=num_views)
    predictions, projections = record_outputs(method.predictor), record_outputs(method.target)
    output = method.loss(batch.views, batch)
    online, target = (unit_rows(torch.stack(rows, 1)) for rows in (predictions, projections))
    directions = unit_rows(normal(batch.keys("brownian"), 6, "direction", torch.float64))
    for got, wanted in zip((*output.terms.values(), output.total), oracle(online, target, directions), strict=True):
        torch.testing.assert_close(got.item(), wanted, **EXACT)


def test_one_view_without_the_other_terms_is_byols_distance():
    rows, others = unit_rows(randn(5, 1, 4)), unit_rows(randn(5, 1, 4, seed=1))
    wanted = (rows - others).square().sum(-1)[:, 0]
    torch.testing.assert_close(centroid_terms(rows, others, centroid="both"), wanted, **EXACT)


def test_pushes_differ_between_images_and_epochs_and_vanish_on_average():
    batch = empty_batch(20000)
    n = unit_rows(normal(batch.keys("brownian"), 3, "direction", torch.float64))
    later = dataclasses.replace(batch, epoch=1)
    assert not torch.equal(n, unit_rows(normal(later.keys("brownian"), 3, "direction", torch.float64)))
    # a coordinate of a uniform unit vector in 3 dimensions has variance 1/3; four standard errors
    assert n.mean(0).abs().max() < 4 * math.sqrt(1 / 3 / 20000)
    torch.testing.assert_close(n.T @ n / 20000, torch.eye(3, dtype=torch.float64) / 3, rtol=0, atol=0.01)
