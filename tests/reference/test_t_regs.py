"""T-REGS against Kruskal's tree in plain loops, scipy's, and the card's values."""

import itertools
import math

import pytest
import torch
from scipy.sparse.csgraph import minimum_spanning_tree as scipy_tree
from scipy.spatial.distance import cdist

from ssl_bench.losses.spanning_tree import spanning_tree_entropy, unit_norm_penalty
from ssl_bench.regularizers.t_regs import TREGS
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

Z = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 3]], dtype=torch.float64)
SQUARE = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)


def tree_length(z):
    """Kruskal's algorithm."""
    rows = z.tolist()
    edges = sorted((math.dist(rows[i], rows[j]), i, j) for i, j in itertools.combinations(range(len(rows)), 2))
    part = list(range(len(rows)))
    total = 0.0
    for length, i, j in edges:
        if part[i] != part[j]:
            total += length
            part = [part[i] if p == part[j] else p for p in part]
    return total


def norms(z):
    return sum((math.hypot(*row) - 1) ** 2 for row in z.tolist()) / len(z)


def oracle(z_a, z_b, beta=10.0, gamma=0.2, lam=8e-4):
    distance = sum(math.dist(a, b) ** 2 for a, b in zip(z_a.tolist(), z_b.tolist(), strict=True)) / len(z_a)
    spread = sum(-gamma * tree_length(z) / len(z) + lam * norms(z) for z in (z_a, z_b))
    return beta * distance + spread


def loss_of(z_a, z_b, **arguments):
    return bare_method("t_regs", projector_widths=(4, z_a.shape[1]), **arguments).loss(
        (z_a, z_b), empty_batch(len(z_a))
    )


def test_hand_computed_terms():
    assert spanning_tree_entropy(Z).item() == pytest.approx(-1.5405694150, abs=1e-9)
    assert unit_norm_penalty(Z).item() == pytest.approx(3.1286796564, abs=1e-9)
    assert TREGS()((Z,)).item() == pytest.approx(-0.3056109393, abs=1e-9)
    assert spanning_tree_entropy(SQUARE).item() == pytest.approx(-4.2426406871 / 4, abs=1e-9)
    assert unit_norm_penalty(SQUARE).item() == pytest.approx(0, abs=1e-15)


def test_hand_computed_gradient():
    z = Z.clone().requires_grad_()
    spanning_tree_entropy(z).backward()
    wanted = [[0.25, 0.25], [-0.25, 0], [0.2371708, -0.1709431], [-0.2371708, -0.0790569]]
    torch.testing.assert_close(z.grad, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(z.grad.sum(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)


def test_hand_computed_loss():
    assert loss_of(Z, SQUARE).total.item() == pytest.approx(81.9822570264, abs=1e-8)


@pytest.mark.parametrize(("num", "width"), [(2, 1), (7, 3), (30, 5)])
def test_loss_equals_the_loop_oracle(num, width):
    z_a, z_b = randn(num, width), randn(num, width, seed=1)
    torch.testing.assert_close(loss_of(z_a, z_b).total.item(), oracle(z_a, z_b), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_is_as_short_as_scipys(dtype):
    z = randn(200, 16).detach().to(dtype)
    wanted = scipy_tree(cdist(z.double().numpy(), z.double().numpy())).sum()
    # float32 lengths, 199 of them of order 5, summed: relative 200 * 2^-24
    torch.testing.assert_close(-200 * spanning_tree_entropy(z).item(), wanted, rtol=1.2e-5, atol=0)


def test_a_regular_simplex_is_longest():
    simplex = torch.eye(5, dtype=torch.float64) - 0.2
    simplex = simplex / simplex.norm(dim=1, keepdim=True)
    assert -5 * spanning_tree_entropy(simplex).item() == pytest.approx(6.3245553203, abs=1e-9)
    for seed in range(20):
        z = randn(5, 5, seed=seed).detach()
        assert -5 * spanning_tree_entropy(z / z.norm(dim=1, keepdim=True).clamp(min=1)).item() <= 6.3245553203 + 1e-9


def test_length_ignores_order_rotation_and_shift_and_scales():
    z = randn(12, 4).detach()
    rotation = torch.linalg.qr(randn(4, 4, seed=1).detach())[0]
    for moved, factor in [(z.flip(0), 1), (z @ rotation, 1), (z + 3, 1), (-2.5 * z, 2.5)]:
        torch.testing.assert_close(spanning_tree_entropy(moved), factor * spanning_tree_entropy(z), **EXACT)


def test_identical_points_have_length_zero_and_a_finite_gradient():
    z = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    value = spanning_tree_entropy(z) + unit_norm_penalty(z)
    value.backward()
    assert spanning_tree_entropy(z).item() == 0
    assert torch.isfinite(z.grad).all()
    pair = torch.tensor([[0, 0], [0, 0], [3, 4]], dtype=torch.float64, requires_grad=True)
    spanning_tree_entropy(pair).backward()
    assert spanning_tree_entropy(pair).item() == pytest.approx(-5 / 3)
    assert torch.isfinite(pair.grad).all()


def test_one_point_has_no_tree():
    assert spanning_tree_entropy(Z[:1]).item() == 0


def test_near_duplicates_far_from_the_origin_keep_their_distance():
    z = torch.tensor([[1000.0, 0.0], [1000.001, 0.0], [1000.003, 0.0]])
    # float32 spacing at 1000 is 6.1e-5: each length carries at most that error
    assert -3 * spanning_tree_entropy(z).item() == pytest.approx(0.003, abs=1.3e-4)


def test_method_is_the_formula_of_its_projections():
    method = tiny_method("t_regs", projector_widths=(8, 6))
    batch = tiny_batch(7)
    z = [method.projector(method.backbone(view)) for view in batch.views]
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), oracle(*z), **EXACT)
