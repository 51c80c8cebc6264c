"""INTL against the paper's equations in numpy, and the card's values."""

import math

import numpy as np
import pytest
import torch

from ssl_bench.losses.whitening import iterative_whiten, trace_loss
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

A = torch.tensor([[1, 0], [0, 1], [-1, 1], [2, 2]]).double()
B = torch.tensor([[1, 0.5], [0.5, 1], [-1, 0], [1, 2]]).double()
X = torch.tensor([[1, 0, 2, -1, 0.5], [0, 1, -1, 2, 1], [2, -1, 0, 1, 3]]).double()
Y = torch.tensor([[1, 0.5, 1.5, -1, 0], [0.5, 1, -1, 1, 1], [1, -1, 0.5, 1, 2]]).double()


def whiten(x, axis, iterations=4):
    x = np.asarray(x.detach())
    centered = x - x.mean(axis=1 - axis, keepdims=True)
    sigma = (centered @ centered.T if axis == 0 else centered.T @ centered) / (x.shape[1 - axis] - 1)
    trace = np.trace(sigma)
    p = np.eye(len(sigma))
    for _ in range(iterations):
        p = 1.5 * p - 0.5 * p @ p @ p @ sigma / trace
    p = p / math.sqrt(trace)
    return p @ centered if axis == 0 else centered @ p


def trace(y, axis):
    return ((y.var(axis=1 - axis, ddof=1) - 1) ** 2).sum()


def distance(a, b):
    return 2 - 2 * np.mean((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def oracle(views, axis, weight):
    y = [whiten(view, axis) for view in views]
    return np.mean([distance(y_i, y[0]) + weight * (trace(y_i, axis) + trace(y[0], axis)) for y_i in y[1:]])


def loss_of(*views, axis, weight):
    method = bare_method("intl", hidden_dim=4, projection_dim=views[0].shape[1], axis=axis, trace_weight=weight)
    return method.loss(views, empty_batch(len(views[0])))


def test_hand_computed_values_over_features():
    output = loss_of(A, B, axis=1, weight=0.01)
    assert output.terms["distance"].item() == pytest.approx(0.9674175175, abs=1e-9)
    assert output.total.item() == pytest.approx(0.9674203599, abs=1e-9)
    y = iterative_whiten(A, iterations=4, axis=1)
    assert trace_loss(y, axis=1).item() == pytest.approx(4.1421e-6, abs=1e-9)
    torch.testing.assert_close(y[0], torch.tensor([0.5599786026, -1.3595372151]).double(), rtol=0, atol=1e-7)


def test_hand_computed_values_over_samples():
    output = loss_of(X, Y, axis=0, weight=0.05)
    assert output.terms["distance"].item() == pytest.approx(0.3860466675, abs=1e-9)
    assert output.total.item() == pytest.approx(0.4088130621, abs=1e-9)
    assert trace_loss(iterative_whiten(X, iterations=4, axis=0), axis=0).item() == pytest.approx(0.4367094534, abs=1e-9)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("num_views", [2, 3])
def test_loss_equals_the_oracle(axis, num_views):
    views = [randn(6, 9 if axis == 0 else 4, seed=seed) for seed in range(num_views)]
    torch.testing.assert_close(loss_of(*views, axis=axis, weight=0.3).total.item(), oracle(views, axis, 0.3), **EXACT)


def test_an_equal_spectrum_is_whitened_to_the_cards_value():
    basis = torch.linalg.qr(torch.cat([torch.ones(1, 20).double(), randn(8, 20, seed=2).detach()]).T).Q.T[1:]
    y = iterative_whiten(basis, iterations=4, axis=0)  # eight centered orthogonal rows of equal norm
    torch.testing.assert_close(y.var(1), torch.full((8,), 0.9562487926, dtype=torch.float64), rtol=0, atol=1e-9)
    assert trace_loss(y, axis=0).item() == pytest.approx(0.0153133452, abs=1e-9)


def test_scale_and_permutation():
    x = randn(5, 9).detach()
    base = iterative_whiten(x, iterations=4, axis=0)
    torch.testing.assert_close(iterative_whiten(x * 7, iterations=4, axis=0), base, **EXACT)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(iterative_whiten(x[order], iterations=4, axis=0), base[order], **EXACT)


@pytest.mark.parametrize("axis", [0, 1])
def test_method_takes_the_codes_trace_weight(axis):
    method, batch = tiny_method("intl", hidden_dim=8, projection_dim=12, axis=axis), tiny_batch(6)
    z = [method.projector(method.backbone(view)) for view in batch.views]
    weight = 0.01 * (math.log2(6 if axis == 0 else 12) - 3)
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), oracle(z, axis, weight), **EXACT)
