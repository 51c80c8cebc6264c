"""W-MSE against the paper's equations in numpy, and the card's values."""

import numpy as np
import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.losses.whitening import cholesky_whiten
from ssl_bench.random import uniform
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

A = torch.tensor([[1, 0], [0, 1], [-1, 1], [2, 2]]).double()
B = torch.tensor([[1, 0.5], [0.5, 1], [-1, 0], [1, 2]]).double()


def whiten(h, eps=0.0):
    h = np.asarray(h.detach())
    centered = h - h.mean(0)
    sigma = (1 - eps) * centered.T @ centered / (len(h) - 1) + eps * np.eye(h.shape[1])
    return centered @ np.linalg.inv(np.linalg.cholesky(sigma)).T


def cosine_loss(a, b):
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return 2 - 2 * cosines.mean()


def loss_of(*views, block, **arguments):
    method = bare_method("w_mse", projection_dim=views[0].shape[1], block_size=block, **arguments)
    return method.loss(views, empty_batch(len(views[0]))).total


def test_hand_computed_values():
    wanted = [
        [0.3872983346, -1.4200938936],
        [-0.3872983346, 0.1290994449],
        [-1.1618950039, 0.3872983346],
        [1.1618950039, 0.9036961141],
    ]
    torch.testing.assert_close(cholesky_whiten(A), torch.tensor(wanted).double(), rtol=0, atol=1e-7)
    assert loss_of(A, B, block=4).item() == pytest.approx(0.9127167359, abs=1e-9)
    assert loss_of(A, B, block=4, eps=0.1).item() == pytest.approx(0.9314354889, abs=1e-9)
    assert ((cholesky_whiten(A) - cholesky_whiten(B)) ** 2).mean().item() == pytest.approx(0.1201761548, abs=1e-9)


@pytest.mark.parametrize("num_views", [2, 4])
def test_loss_equals_the_oracle_over_blocks_and_pairs(num_views):
    views = [randn(12, 2, seed=seed) for seed in range(num_views)]
    batch = empty_batch(12)
    order = uniform(batch.keys("w_mse"), 1, "order", torch.float64)[:, 0].argsort().numpy()
    total, pairs = 0.0, 0
    for a in range(num_views):
        for b in range(a + 1, num_views):
            blocks = [order[i : i + 4] for i in range(0, 12, 4)]
            total += np.mean([cosine_loss(whiten(views[a][i]), whiten(views[b][i])) for i in blocks])
            pairs += 1
    torch.testing.assert_close(loss_of(*views, block=4).item(), total / pairs, **EXACT)


def test_covariance_is_the_identity_and_the_energy_fixed():
    z = cholesky_whiten(randn(9, 4))
    torch.testing.assert_close(torch.cov(z.T), torch.eye(4).double(), **EXACT)
    assert z.square().sum().item() == pytest.approx(8 * 4, abs=1e-9)


def test_invariant_to_lower_triangular_maps_only():
    lower, upper = (torch.tensor(m).double() for m in ([[2.0, 0.0], [1.0, 0.5]], [[2.0, 1.0], [0.0, 0.5]]))
    base = cholesky_whiten(A)
    torch.testing.assert_close(cholesky_whiten(A @ lower.T + 3), base, **EXACT)
    assert (cholesky_whiten(A @ upper.T) - base).abs().max().item() == pytest.approx(0.3873, abs=1e-4)


def test_identical_views_give_zero_and_the_gradient_ignores_shifts():
    h = randn(8, 2)
    assert loss_of(h, h.clone(), block=4).item() == pytest.approx(0.0, abs=1e-10)
    other = randn(8, 2, seed=1)
    loss_of(h, other, block=8).backward()
    torch.testing.assert_close(h.grad.sum(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-10)
    assert other.grad.abs().max() > 1e-4, "both views have gradient"


def test_constant_projections_and_bad_sizes_are_refused():
    with pytest.raises(torch.linalg.LinAlgError):
        loss_of(torch.ones(8, 2).double(), torch.ones(8, 2).double(), block=8)
    with pytest.raises(ConfigError, match="multiple of `block_size`"):
        loss_of(randn(6, 2), randn(6, 2), block=4)
    with pytest.raises(ConfigError, match="must exceed `projection_dim`"):
        tiny_method("w_mse", projection_dim=8, block_size=8)


def test_method_whitens_its_projections():
    method, batch = tiny_method("w_mse", hidden_dim=8, projection_dim=3, block_size=8), tiny_batch(8)
    z = [whiten(method.projector(method.backbone(view))) for view in batch.views]
    assert method.loss(batch.views, batch).total.item() == pytest.approx(cosine_loss(*z), abs=1e-8)
