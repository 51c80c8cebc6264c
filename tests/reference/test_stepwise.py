"""Eigenmodes against hand-computed values and an explicit gradient flow."""

import numpy as np
import pytest
import torch

from ssl_bench.evaluation.diagnostics.stepwise import critical_times, mode_figures, predicted_eigenvalues


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_critical_times_and_the_half_way_of_each_mode():
    assert float(critical_times(tensor(0.5), tensor(1e-3))) == pytest.approx(3.6271644346, abs=1e-9)
    assert float(critical_times(tensor(0.1), tensor(1e-3))) == pytest.approx(20.1476195637, abs=1e-9)
    time = 3.6271644346
    assert float(predicted_eigenvalues(tensor(0.5), tensor(1e-3), time)) == pytest.approx(0.5 + 1.25e-7, abs=1e-9)
    exact = np.log((1e6 - 0.5) / 0.5) / 4  # the time without the paper's approximation
    assert exact == pytest.approx(3.62716430963, abs=1e-10)
    assert float(predicted_eigenvalues(tensor(0.5), tensor(1e-3), exact)) == pytest.approx(0.5, abs=1e-12)


def test_predicted_eigenvalues_of_known_modes():
    found = predicted_eigenvalues(tensor(0.5, 0.1), tensor(0.3, 0.2), 1.0)
    assert found.tolist() == pytest.approx([0.7200986807, 0.0088587367], abs=1e-9)
    gammas = tensor(1.0, 0.5, 0.25)
    found = predicted_eigenvalues(gammas, tensor(1e-3, 1e-3, 1e-3), 1.9)
    assert (found / gammas).sqrt().tolist() == pytest.approx([0.89426574, 0.04467888, 0.00668586], abs=1e-8)
    assert float((1 - found).square().sum()) == pytest.approx(2.03809804019, abs=1e-10)
    late = predicted_eigenvalues(gammas, tensor(1e-3, 1e-3, 1e-3), 1000.0)  # no overflow
    assert late.tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)


def test_the_prediction_is_the_gradient_flow_of_the_loss():
    """Euler steps of 1e-3 on W itself; their own error is of the order of the step."""
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    gammas, initial = tensor(0.5, 0.1), tensor(0.3, 0.2)
    gamma = turn[:, :2] @ torch.diag(gammas) @ turn[:, :2].T
    weight = (torch.diag(initial) @ turn[:, :2].T).requires_grad_(True)
    for _ in range(1000):
        loss = (weight @ gamma @ weight.T - torch.eye(2)).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 1e-3 * gradient).detach().requires_grad_(True)
    found = torch.linalg.eigvalsh(weight.detach() @ gamma @ weight.detach().T).flip(0)
    torch.testing.assert_close(found, predicted_eigenvalues(gammas, initial, 1.0), rtol=0, atol=2e-4)


def test_figures_of_a_known_spectrum():
    rows = torch.diag(tensor(2, 1, 1))
    found = mode_figures(torch.cat([rows, -rows]) + 5)
    assert [found[f"eigenvalue_{k}"] for k in (1, 2, 3)] == pytest.approx([8 / 5, 2 / 5, 2 / 5], abs=1e-12)
    assert found["trace"] == pytest.approx(12 / 5, abs=1e-12)
    assert found["effective_rank"] == pytest.approx(2.3811015780, abs=1e-9)
    assert found["participation_ratio"] == pytest.approx(2.0, abs=1e-12)
    assert found["num_modes"] == 3
    uncentered = torch.cat([torch.diag(tensor(2, 1, 1)), torch.zeros(2, 3)])
    assert mode_figures(uncentered)["rankme"] == pytest.approx(2.8284271247, abs=1e-6)  # eps of RankMe


def test_modes_are_counted_exactly_and_do_not_depend_on_axes_or_mean():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 5, dtype=torch.float64, generator=generator)
    turn = torch.linalg.qr(torch.randn(80, 80, dtype=torch.float64, generator=generator)).Q
    wide = rows @ turn[:5] + 100 * turn[6]
    found, narrow = mode_figures(wide), mode_figures(rows)
    assert found["num_modes"] == narrow["num_modes"] == 5
    assert found["eigenvalue_6"] == 0.0
    assert "eigenvalue_64" in found
    assert "eigenvalue_65" not in found
    for name in ("trace", "effective_rank", "participation_ratio", "eigenvalue_5"):
        assert found[name] == pytest.approx(narrow[name], rel=1e-9)


def test_collapse_has_no_modes():
    found = mode_figures(torch.full((10, 4), 0.3))
    assert found["trace"] == found["num_modes"] == found["effective_rank"] == found["participation_ratio"] == 0.0
