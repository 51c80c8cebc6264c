"""Barlow Twins against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.losses.covariance import cross_correlation, redundancy_loss
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

Z_A = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0], [4.0, 3.0]], dtype=torch.float64)
Z_B = torch.tensor([[1.0, 1.0], [2.0, 0.0], [4.0, 1.0], [3.0, 2.0]], dtype=torch.float64)


def standardized(z, eps, unbiased):
    columns = []
    for column in z.T.tolist():
        mean = sum(column) / len(column)
        var = sum((x - mean) ** 2 for x in column) / (len(column) - unbiased)
        columns.append([(x - mean) / math.sqrt(var + eps) for x in column])
    return columns


def oracle(z_a, z_b, weight=0.0051, *, eps=1e-5, unbiased=False):
    a, b = standardized(z_a, eps, unbiased), standardized(z_b, eps, unbiased)
    total = 0.0
    for i, column_i in enumerate(a):
        for j, column_j in enumerate(b):
            c = sum(x * y for x, y in zip(column_i, column_j, strict=True)) / len(column_i)
            total += (1 - c) ** 2 if i == j else weight * c**2
    return total


def loss_of(z_a, z_b, **arguments):
    return bare_method("barlow_twins", **arguments).loss((z_a, z_b), empty_batch(len(z_a))).total


@pytest.mark.parametrize(("num", "width"), [(2, 2), (4, 9), (16, 5), (31, 16)])
@pytest.mark.parametrize("weight", [0.0051, 0.5])
def test_loss_equals_the_loop_oracle(num, width, weight):
    z_a, z_b = randn(num, width), 2 + 3 * randn(num, width, seed=1)
    got = loss_of(z_a, z_b, off_diagonal_weight=weight).item()
    torch.testing.assert_close(got, oracle(z_a, z_b, weight), **EXACT)


def test_hand_computed_values():
    correlation = cross_correlation(Z_A, Z_B, eps=0.0)
    expected = torch.tensor([[0.8, 0.6324555320], [0.1825741858, 0.5773502692]], dtype=torch.float64)
    torch.testing.assert_close(correlation, expected, rtol=0, atol=1e-9)
    assert redundancy_loss(correlation, off_diagonal_weight=0.0).item() == pytest.approx(0.2186327950, abs=1e-9)
    assert redundancy_loss(correlation, off_diagonal_weight=0.0051).item() == pytest.approx(0.2208427950, abs=1e-9)
    assert loss_of(Z_A, Z_B).item() == pytest.approx(0.2208518024, abs=1e-9)


def test_unbiased_standardization_would_be_noticed():
    mutated = oracle(Z_A, Z_B, eps=1e-5, unbiased=True)
    assert oracle(Z_A, Z_B, eps=0.0, unbiased=True) == pytest.approx(0.4827177212, abs=1e-9)
    assert abs(loss_of(Z_A, Z_B).item() - mutated) > 0.1


def test_loss_scale_multiplies_the_whole_loss():
    assert loss_of(Z_A, Z_B, loss_scale=0.1).item() == pytest.approx(0.02208518024, abs=1e-10)


def test_identical_views_leave_their_own_correlation():
    correlation = cross_correlation(Z_A, Z_A, eps=0.0)
    assert redundancy_loss(correlation, off_diagonal_weight=0.0051).item() == pytest.approx(0.00544, abs=1e-9)
    # with eps every variance (>= 1.25) grows by a share of at most 8e-6, so squares change by 1.6e-5 of 0.0054
    assert loss_of(Z_A, Z_A).item() == pytest.approx(0.00544, abs=1e-6)


def test_constant_batch_is_a_dead_point():
    z = torch.full((4, 3), 2.0, dtype=torch.float64, requires_grad=True)
    total = loss_of(z, z)
    assert total.item() == pytest.approx(3.0, abs=1e-9)
    total.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_invariances():
    # large values, so that eps is no more than 1e-5 / 1e6 of a variance
    z_a, z_b = 1e3 * randn(8, 4).detach(), 1e3 * randn(8, 4, seed=1).detach()
    reference = loss_of(z_a, z_b)
    gain, shift = torch.tensor([1.0, 2.0, 0.5, 3.0]).double(), torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    samples, features = torch.tensor([3, 1, 7, 0, 2, 5, 4, 6]), torch.tensor([2, 0, 3, 1])
    for changed in (
        (z_a * gain + shift, z_b),
        (z_a[samples], z_b[samples]),
        (z_a[:, features], z_b[:, features]),
        (z_a * signs, z_b * signs),
        (z_b, z_a),
    ):
        torch.testing.assert_close(loss_of(*changed), reference, rtol=1e-9, atol=0)
    rotation = torch.linalg.qr(randn(4, 4, seed=3).detach())[0]
    assert abs(loss_of(z_a @ rotation, z_b @ rotation) - reference) > 1e-3
    assert abs(loss_of(z_a * signs, z_b) - reference) > 1e-3


def test_gradcheck():
    assert torch.autograd.gradcheck(loss_of, (randn(5, 3), randn(5, 3, seed=1)))


def test_method_feeds_the_projections_of_both_views_to_the_loss():
    method, batch = tiny_method("barlow_twins", projector_widths=(16, 16, 8)), tiny_batch(6)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    torch.testing.assert_close(total.item(), oracle(*projections), **EXACT)


def test_projector_has_no_biases_and_a_plain_output():
    method = tiny_method("barlow_twins", projector_widths=(16, 12, 8))
    linears = [layer for layer in method.projector if isinstance(layer, nn.Linear)]
    assert [layer.weight.shape for layer in linears] == [(16, 64), (12, 16), (8, 12)]
    assert all(layer.bias is None for layer in linears)
    assert isinstance(method.projector[-1], nn.Linear)


def test_one_dimensional_parameters_have_their_own_rate_on_imagenet():
    method = tiny_method("barlow_twins", projector_widths=(8, 8), bias_lr_factor=0.024)
    weights, others = method.parameter_groups()
    assert (weights.lr_factor, others.lr_factor) == (1.0, 0.024)
    assert all(p.ndim > 1 for _, p in weights.parameters)
    assert all(p.ndim == 1 for _, p in others.parameters)
    recipe = type(method).recipes["imagenet"]
    factor = type(method).default_arguments("imagenet")["bias_lr_factor"]
    assert recipe.base_lr * factor == pytest.approx(0.0048)
