"""VIbCReg against its equations in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.losses.covariance import off_diagonal_correlation
from ssl_bench.losses.whitening import group_iter_norm
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

Z_1 = torch.tensor([[1, 0], [2, 1], [3, 5]]).double()
Z_2 = torch.tensor([[1, 1], [2, 0], [2, 4]]).double()


def columns(z):
    return [list(column) for column in zip(*z.tolist(), strict=True)]


def hinge(z):
    total = 0.0
    for c in columns(z):
        mean = sum(c) / len(c)
        total += max(0.0, 1 - math.sqrt(sum((x - mean) ** 2 for x in c) / (len(c) - 1) + 1e-4))
    return total / z.shape[1]


def correlation(z):
    units = []
    for c in columns(z):
        centered = [x - sum(c) / len(c) for x in c]
        norm = math.sqrt(sum(x * x for x in centered))
        units.append([x / norm for x in centered])
    width = len(units)
    pairs = ((i, j) for i in range(width) for j in range(width) if i != j)
    return sum(sum(a * b for a, b in zip(units[i], units[j], strict=True)) ** 2 for i, j in pairs) / width**2


def oracle(z_1, z_2):
    invariance = ((z_1 - z_2) ** 2).sum().item() / z_1.numel()
    return 25 * invariance + 25 * (hinge(z_1) + hinge(z_2)) + 200 * (correlation(z_1) + correlation(z_2))


def loss_of(z_1, z_2):
    method = bare_method("vibcreg", projector_widths=(4, z_1.shape[1]), iter_norm_group_dim=0)
    return method.loss((z_1, z_2), empty_batch(len(z_1)))


def test_hand_computed_values():
    output = loss_of(Z_1, Z_2)
    assert output.terms["invariance"].item() == pytest.approx(0.6666666667, abs=1e-9)
    assert output.terms["variance"].item() == pytest.approx(0.2112815674, abs=1e-9)
    assert output.terms["covariance"].item() == pytest.approx(0.4848901099, abs=1e-9)
    assert output.total.item() == pytest.approx(118.9267278292, abs=1e-7)
    small = loss_of(Z_1 * 0.3, Z_2 * 0.3)
    assert small.terms["covariance"].item() == pytest.approx(0.4848901099, abs=1e-9)
    assert small.total.item() == pytest.approx(124.8276672304, abs=1e-7)


@pytest.mark.parametrize(("num", "width"), [(3, 2), (9, 5)])
def test_loss_equals_the_loop_oracle(num, width):
    z_1, z_2 = randn(num, width), randn(num, width, seed=1)
    torch.testing.assert_close(loss_of(z_1, z_2).total.item(), oracle(z_1, z_2), **EXACT)


def test_correlation_term_ignores_shift_and_scale_and_is_bounded():
    z = randn(8, 4).detach()
    moved = z * torch.tensor([2.0, 0.1, 5.0, 1.0]).double() + 3
    torch.testing.assert_close(off_diagonal_correlation(moved), off_diagonal_correlation(z), **EXACT)
    equal = z[:, :1].expand(-1, 4)
    assert off_diagonal_correlation(equal).item() == pytest.approx(3 / 4, abs=1e-12)


def test_iter_norm_equals_the_newton_iteration_written_out():
    x = randn(10, 6).detach()
    got = group_iter_norm(x, groups=2, iterations=5)
    for g in range(2):
        part = x[:, 3 * g : 3 * g + 3]
        centered = part - part.mean(0)
        sigma = centered.T @ centered / 10 + 1e-5 * torch.eye(3, dtype=torch.float64)
        trace = sigma.trace()
        p = torch.eye(3, dtype=torch.float64)
        for _ in range(5):
            p = 1.5 * p - 0.5 * torch.linalg.matrix_power(p, 3) @ (sigma / trace)
        torch.testing.assert_close(got[:, 3 * g : 3 * g + 3], centered @ p / trace.sqrt(), **EXACT)


def test_many_iterations_whiten_within_groups():
    y = group_iter_norm(randn(200, 4).detach(), groups=2, iterations=12)
    for g in range(2):
        part = y[:, 2 * g : 2 * g + 2]
        # eps 1e-5 on the diagonal leaves a relative 1e-5 of the covariance out
        torch.testing.assert_close(part.T @ part / 200, torch.eye(2).double(), rtol=0, atol=1e-4)


def test_method_is_the_formula_of_its_whitened_projections():
    method = tiny_method("vibcreg", projector_widths=(8, 6), iter_norm_group_dim=3)
    batch = tiny_batch(7)
    z = [group_iter_norm(method.projector(method.backbone(v)), groups=2, iterations=5) for v in batch.views]
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), oracle(*z), **EXACT)
