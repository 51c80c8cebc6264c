"""Local dimension and TwoNN against hand-computed values, loops and data of known dimension."""

import math

import pytest
import torch

from ssl_bench.evaluation.diagnostics.intrinsic_dimension import (
    geometric_mean,
    local_dimension_mle,
    local_dimension_moments,
    neighbor_distances,
    two_nn,
)
from ssl_bench.losses.local_dimension import local_dimension

FIVE = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)


def cube(num, dim, seed=0):
    return torch.rand(num, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_estimates_of_known_distances():
    assert float(local_dimension_mle(FIVE)) == pytest.approx(1.53388451232, abs=1e-10)
    assert float(local_dimension_moments(FIVE)) == pytest.approx(1.5, abs=1e-12)
    ratios = torch.tensor([1.2, 1.5, 2.0, 3.0], dtype=torch.float64)
    assert two_nn(torch.stack([torch.ones(4), ratios], 1)) == pytest.approx(1.68099283415, abs=1e-10)
    assert geometric_mean(torch.tensor([1.0, 4.0, 16.0])) == pytest.approx(4.0, abs=1e-12)


def test_moments_of_points_on_a_line():
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0], [15.0]])
    expected = {2: [2.0, 3.0, 5.0, 5.0, 5.0], 3: [1.1, 1.0, 3.0, 4.25, 4.25]}
    for k, values in expected.items():
        found = local_dimension_moments(neighbor_distances(line, k))
        torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), rtol=0, atol=1e-12)


def test_distances_and_estimates_equal_the_loops():
    x = torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k = 6
    rows = []
    for i in range(40):
        others = [math.dist(x[i].tolist(), x[j].tolist()) for j in range(40) if j != i]
        rows.append(sorted(others)[:k])
    distances = neighbor_distances(x, k)
    torch.testing.assert_close(distances, torch.tensor(rows, dtype=torch.float64), rtol=1e-12, atol=0)
    mle = [-k / sum(math.log(r / row[-1]) for row in rows[i : i + 1] for r in row) for i, row in enumerate(rows)]
    moments = [sum(row) / k / (row[-1] - sum(row) / k) for row in rows]
    assert local_dimension_mle(distances).tolist() == pytest.approx(mle, rel=1e-10)
    assert local_dimension_moments(distances).tolist() == pytest.approx(moments, rel=1e-10)
    assert two_nn(distances) == pytest.approx(40 / sum(math.log(row[1] / row[0]) for row in rows), rel=1e-10)


def test_the_regularizers_estimate_is_the_same():
    x = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    other = local_dimension(x, x, k=8, exclude=torch.arange(60))
    torch.testing.assert_close(local_dimension_moments(neighbor_distances(x, 8)), other, rtol=1e-10, atol=0)


def test_chunks_do_not_change_the_distances(monkeypatch):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(3))
    whole = neighbor_distances(x, 5)
    monkeypatch.setattr("ssl_bench.evaluation.diagnostics.intrinsic_dimension.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(neighbor_distances(x, 5), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_a_uniform_cube_has_its_dimension(dim):
    """Within 10 %: a cube's faces lower the estimates, by 8 % in five dimensions; k instead of k - 1 raises them."""
    distances = neighbor_distances(cube(2000, dim), 32)
    assert geometric_mean(local_dimension_mle(distances)) == pytest.approx(dim, rel=0.1)
    assert geometric_mean(local_dimension_moments(distances)) == pytest.approx(dim, rel=0.1)
    assert two_nn(distances) == pytest.approx(dim, rel=0.1)


def test_rotation_scale_shift_and_order_leave_the_estimates():
    x = cube(200, 3)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    before, after = neighbor_distances(x, 10), neighbor_distances((5 * x @ turn + 30).flip(0), 10)
    for estimate in (local_dimension_mle, local_dimension_moments):
        torch.testing.assert_close(estimate(after).flip(0), estimate(before), rtol=1e-8, atol=0)
    assert two_nn(after) == pytest.approx(two_nn(before), rel=1e-8)


def test_duplicates_are_at_distance_zero_and_near_ones_keep_their_digits():
    """In float32 two neighbors at 1000 may differ by 6e-5, which the expanded square of float32 would lose."""
    step = 1000 * 2.0**-23
    x = torch.tensor([[1000.0, 0.0], [1000.0, 0.0], [1000.0 + step, 0.0], [0.0, 1000.0]])
    step = float(x[2, 0].double() - 1000)
    distances = neighbor_distances(x, 2)
    assert distances[0].tolist() == [0.0, pytest.approx(step, rel=1e-9)]
    assert distances[2].tolist() == [pytest.approx(step, rel=1e-9)] * 2


def test_equidistant_neighbors_have_infinite_dimension():
    simplex = neighbor_distances(torch.eye(5), 4)
    assert torch.isinf(local_dimension_mle(simplex)).all()
    assert torch.isinf(local_dimension_moments(simplex)).all()
    assert two_nn(simplex) == math.inf
