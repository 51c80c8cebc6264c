"""BYOL with closed-form predictors (the variant of its docstring) against plain oracles, and the card's values."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.methods.byol_closed_form import closed_form_predictor, moment_sum
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

KINDS = ("ols", "procrustes", "projection", "sqrt")
HEADS = {"hidden_dim": 12, "projection_dim": 5}
Z = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
T = torch.tensor([[1, 0.2], [0.1, 1], [0.9, 1.1]], dtype=torch.float64)


def predictor(z, t, kind, *, ridge=0.0, energy=0.99, floor=0.0):
    return closed_form_predictor(moment_sum(z, t, kind), kind, ridge=ridge, energy=energy, floor=floor)


def oracle_predictor(z, t, kind, *, ridge, energy, floor):
    """By other routes than the code: augmented least squares, and singular vectors of the rows."""
    z, t = z.detach().numpy(), t.detach().numpy()
    width = z.shape[1]
    if kind == "ols":
        shift = math.sqrt(ridge * (z**2).sum() / width)
        rows = np.concatenate([z, shift * np.eye(width)])
        return np.linalg.lstsq(rows, np.concatenate([t, np.zeros((width, width))]), rcond=None)[0]
    if kind == "procrustes":  # polar factor C (C^T C)^-1/2
        cross = z.T @ t
        values, vectors = np.linalg.eigh(cross.T @ cross)
        return cross @ (vectors / np.sqrt(values)) @ vectors.T
    _, singular, v_t = np.linalg.svd(z, full_matrices=False)
    if kind == "sqrt":
        return v_t.T @ np.diag(singular / singular[0] + floor) @ v_t
    k = 1
    while (singular[:k] ** 2).sum() < energy * (singular**2).sum():
        k += 1
    return v_t[:k].T @ v_t[:k]


def regression(p, t):
    """Mean squared distance of unit rows."""
    p, t = np.asarray(p), t.detach().numpy()
    total = 0.0
    for p_i, t_i in zip(p, t, strict=True):
        total += ((p_i / math.sqrt((p_i**2).sum()) - t_i / math.sqrt((t_i**2).sum())) ** 2).sum()
    return total / len(p)


class Fixed(nn.Module):
    """A target network that gives a set answer for each view."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, view):
        (answer,) = (t for v, t in self.answers if v is view)
        return answer


def method_of(z_1, z_2, t_1, t_2, **arguments):
    method = bare_method("byol_closed_form", projection_dim=z_1.shape[1], **arguments)
    method.target = Fixed([(z_1, t_1), (z_2, t_2)])
    return method


def loss_of(z_1, z_2, t_1, t_2, **arguments):
    return method_of(z_1, z_2, t_1, t_2, **arguments).loss((z_1, z_2), empty_batch(len(z_1))).total


@pytest.mark.parametrize(
    ("kind", "ridge", "expected"),
    [
        ("ols", 0.0, [[0.9333333333, 0.1666666667], [0.0333333333, 0.9666666667]]),
        # 0.1 on Z^T Z / 3, whose mean diagonal is 2 / 3
        ("ols", 0.15, [[0.7855477855, 0.2074592075], [0.0932400932, 0.8228438228]]),
        ("procrustes", 0.0, [[0.9971993099, 0.0747899482], [-0.0747899482, 0.9971993099]]),
        ("sqrt", 0.0, [[0.7886751346, 0.2113248654], [0.2113248654, 0.7886751346]]),
    ],
)
def test_hand_computed_predictors(kind, ridge, expected):
    got = predictor(Z, T, kind, ridge=ridge)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_hand_computed_residuals_and_losses():
    for kind, residual, loss in (("ols", 0.0055555556, 0.0016987965), ("procrustes", 0.0158438506, 0.0153315417)):
        prediction = Z @ predictor(Z, T, kind)
        assert (prediction - T).square().sum(1).mean().item() == pytest.approx(residual, abs=1e-9)
        twice = Z.clone()  # both directions alike: the sum of two equal terms
        total = loss_of(Z, twice, T, T, predictor=kind, ridge=0.0, statistics_momentum=0.0)
        assert total.item() == pytest.approx(2 * loss, abs=1e-9)
    assert regression(Z, T) == pytest.approx(0.0195632959, abs=1e-9)  # no predictor
    same = loss_of(Z, Z.clone(), T, T, predictor="projection", energy=1.0)
    assert same.item() == pytest.approx(2 * 0.0195632959, abs=1e-9)


def test_rank_one_projections_give_the_projector_on_their_line():
    z = torch.tensor([[1, 1], [2, 2], [-1, -1]], dtype=torch.float64)
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    torch.testing.assert_close(predictor(z, z, "projection"), half, **EXACT)
    # on the line the moment is twice the mean of the diagonal, off it only the ridge remains
    torch.testing.assert_close(predictor(z, z, "ols", ridge=1e-3), half / (1 + 1e-3 / 2), **EXACT)


def test_targets_equal_to_projections_give_the_identity():
    z = randn(12, 4).detach()
    for kind in ("ols", "procrustes"):
        torch.testing.assert_close(predictor(z, z, kind), torch.eye(4, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_predictors_equal_the_oracle_and_ignore_the_scale(kind):
    z, t = randn(20, 6).detach() * torch.arange(1, 7), randn(20, 6, seed=1).detach()
    constants = {"ridge": 0.02, "energy": 0.9, "floor": 0.1}
    got = predictor(z, t, kind, **constants)
    torch.testing.assert_close(got.numpy(), oracle_predictor(z, t, kind, **constants), **EXACT)
    scaled = closed_form_predictor(7 * moment_sum(z, t, kind), kind, **constants)
    torch.testing.assert_close(scaled, got, **EXACT)


def test_shapes_of_the_predictors():
    z, t = randn(20, 6).detach() * torch.arange(1, 7), randn(20, 6, seed=1).detach()
    rotation = torch.linalg.qr(randn(6, 6, seed=2).detach()).Q
    orthogonal = predictor(z, t, "procrustes")
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(6, dtype=torch.float64), **EXACT)
    projector = predictor(z, t, "projection", energy=0.9)
    torch.testing.assert_close(projector @ projector, projector, **EXACT)
    assert 1 < round(projector.trace().item()) < 6
    for kind in ("ols", "procrustes"):  # rotated projections are predicted from alike
        rotated = predictor(z @ rotation, t, kind, ridge=0.1)
        torch.testing.assert_close(rotated, rotation.T @ predictor(z, t, kind, ridge=0.1), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_projections_stay_finite(kind):
    zero = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    total = loss_of(zero, zero * 1, zero.detach(), zero.detach() * 1, predictor=kind)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(zero.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_both_directions_with_one_predictor_of_both(kind):
    z_1, z_2, t_1, t_2 = (randn(9, 4, seed=seed) for seed in range(4))
    constants = {"ridge": 0.05, "energy": 0.9, "floor": 0.1}
    p = oracle_predictor(torch.cat([z_1, z_2]), torch.cat([t_2, t_1]), kind, **constants)
    expected = regression(z_1.detach().numpy() @ p, t_2) + regression(z_2.detach().numpy() @ p, t_1)
    got = loss_of(z_1, z_2, t_1, t_2, predictor=kind, **constants)
    torch.testing.assert_close(got.item(), expected, **EXACT)


def test_gradient_takes_the_predictor_as_a_constant():
    z_1, z_2, t_1, t_2 = (randn(9, 4, seed=seed) for seed in range(4))
    loss_of(z_1, z_2, t_1, t_2).backward()
    p = predictor(torch.cat([z_1, z_2]).detach(), torch.cat([t_2, t_1]).detach(), "ols", ridge=1e-3)
    fixed = z_1.detach().requires_grad_()
    (2 - 2 * torch.cosine_similarity(fixed @ p, t_2.detach())).mean().backward()
    torch.testing.assert_close(z_1.grad, fixed.grad, **EXACT)


def test_moments_remember_past_steps_once_an_optimizer_step():
    z_1, z_2, t_1, t_2 = (randn(9, 4, seed=seed).detach() for seed in range(4))
    method = method_of(z_1, z_2, t_1, t_2, statistics_momentum=0.25)
    method.target.update = lambda *_: None
    new = moment_sum(torch.cat([z_1, z_2]), torch.cat([t_2, t_1]), "ols") / 18
    for weight in (0.75, 0.9375):  # 1 - 0.25^k
        method.loss((z_1, z_2), empty_batch(9))
        method.loss((z_1, z_2), empty_batch(9))  # a second pass before the step leaves no trace
        method.after_optimizer_step(1, 4)
        torch.testing.assert_close(method.moments, weight * new, **EXACT)
    assert "moments" in method.state_dict()


def test_method_predicts_the_targets_projection_and_has_no_predictor_parameters():
    method, batch = tiny_method("byol_closed_form", **HEADS), tiny_batch(6)
    with torch.no_grad():
        for parameter in method.target.parameters():
            parameter.mul_(1.3)  # a target unlike the online network
    z_1, z_2 = (method.projector(method.backbone(view)).detach() for view in batch.views)
    t_1, t_2 = (method.target(view) for view in batch.views)
    p = oracle_predictor(torch.cat([z_1, z_2]), torch.cat([t_2, t_1]), "ols", ridge=1e-3, energy=0, floor=0)
    total = method.loss(batch.views, batch).total
    expected = regression(z_1.numpy() @ p, t_2) + regression(z_2.numpy() @ p, t_1)
    # the ridge of 1e-3 bounds the condition of the solve by 5e3, of the oracle's rows by its root
    torch.testing.assert_close(total.item(), expected, rtol=0, atol=1e-8)
    total.backward()
    for name, parameter in method.named_parameters():
        assert name.startswith(("backbone.", "projector.", "target.")), name
        assert (parameter.grad is None) == name.startswith("target."), name


def test_an_unknown_predictor_is_refused():
    with pytest.raises(ConfigError, match="`predictor` must be one of ols, procrustes, projection, sqrt"):
        tiny_method("byol_closed_form", predictor="identity")
