"""LDReg against the paper's estimate in plain loops, and the card's values."""

import dataclasses
import math

import pytest
import torch

from ssl_bench.losses.local_dimension import local_dimension, local_dimension_regularizer
from tests.reference.tiny import EXACT, randn, record_outputs, tiny_batch, tiny_method

LINE = torch.tensor([[0], [1], [3], [7], [15]], dtype=torch.float64)


def own(rows):
    return torch.arange(len(rows))


def dimensions_of(rows, k):
    """The paper's moment estimate at every row, one distance at a time."""
    points = rows.tolist()
    values = []
    for i, x in enumerate(points):
        distances = sorted(math.dist(x, y) for j, y in enumerate(points) if j != i)[:k]
        mean = sum(distances) / len(distances)
        values.append(mean / (distances[-1] - mean))
    return values


def oracle(rows, k):
    values = dimensions_of(rows, k)
    return -sum(math.log(value) for value in values) / len(values)


@pytest.mark.parametrize(
    ("k", "dimensions", "l1", "l2"),
    [
        (2, [2, 3, 5, 5, 5], -1.3240146413, -1.3753743604),
        (3, [1.1, 1, 3, 4.25, 4.25], -0.8175520869, -1.0395366350),
    ],
)
def test_hand_computed_values(k, dimensions, l1, l2):
    expected = torch.tensor(dimensions, dtype=torch.float64)
    torch.testing.assert_close(local_dimension(LINE, LINE, k=k, exclude=own(LINE)), expected, **EXACT)
    assert local_dimension_regularizer(LINE, k=k).item() == pytest.approx(l1, abs=1e-9)
    assert local_dimension_regularizer(LINE, k=k, norm="l2").item() == pytest.approx(l2, abs=1e-9)


@pytest.mark.parametrize(("num", "width", "k"), [(5, 2, 3), (20, 7, 19), (40, 3, 10)])
def test_dimensions_equal_the_loop_oracle(num, width, k):
    rows = randn(num, width).detach()
    got = local_dimension(rows, rows, k=k, exclude=own(rows))
    torch.testing.assert_close(got, torch.tensor(dimensions_of(rows, k), dtype=torch.float64), **EXACT)


def test_more_neighbors_than_there_are_means_all():
    rows = randn(6, 3).detach()
    assert local_dimension_regularizer(rows, k=64) == local_dimension_regularizer(rows, k=5)


def test_a_few_queries_against_many_references():
    rows = randn(12, 4).detach()
    some = torch.tensor([7, 2])
    got = local_dimension(rows[some], rows, k=5, exclude=some)
    torch.testing.assert_close(got, local_dimension(rows, rows, k=5, exclude=own(rows))[some], **EXACT)


def test_self_is_left_out_by_its_index_though_a_duplicate_is_as_near():
    rows = torch.cat([LINE, LINE[:1]])
    got = local_dimension(rows, rows, k=3, exclude=own(rows))  # 0 and its duplicate see 0, 1, 3
    assert got[0].item() == got[5].item() == pytest.approx((4 / 3) / (3 - 4 / 3), abs=1e-9)


def test_value_is_that_of_the_moved_turned_and_scaled_points():
    rows = randn(15, 4).detach()
    rotation = torch.linalg.qr(randn(4, 4, seed=1).detach()).Q
    expected = local_dimension_regularizer(rows, k=6)
    torch.testing.assert_close(local_dimension_regularizer(3 * rows @ rotation + 5, k=6), expected, **EXACT)


def test_gradient_is_that_of_constant_neighbors():
    rows = randn(9, 3)
    local_dimension_regularizer(rows, k=4).backward()
    fixed, step = rows.detach(), 1e-6
    for i, j in ((0, 0), (4, 2), (8, 1)):
        values = []
        for sign in (1, -1):
            moved = fixed.clone()
            moved[i, j] += sign * step
            logarithm = local_dimension(moved[i : i + 1], fixed, k=4, exclude=torch.tensor([i])).log()
            values.append(-logarithm.item() / 9)
        # central difference: truncation of order step^2, rounding of order 1e-16 / step
        assert rows.grad[i, j].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)


def test_references_get_no_gradient():
    queries, references = randn(3, 2), randn(7, 2, seed=1)
    local_dimension(queries, references, k=4, exclude=torch.arange(3)).sum().backward()
    assert references.grad is None
    assert queries.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_points_and_equal_distances_stay_finite(dtype):
    for rows in (torch.zeros(6, 3, dtype=dtype), torch.eye(4, dtype=dtype), torch.ones(2, 2, dtype=dtype)):
        rows.requires_grad_()
        value = local_dimension_regularizer(rows, k=3)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(rows.grad).all()
    assert local_dimension_regularizer(torch.zeros(6, 3, dtype=dtype), k=3).item() == pytest.approx(-math.log(1e-6))


def test_float32_far_from_the_origin_is_centered():
    rows = randn(30, 8).detach()
    # offset and rows are rounded to float32 first: 100 * 2^-24 of distances of about 1; cancellation without the
    # centering would be 100^2 * 2^-24 of squared distances
    far = (rows + 100).float()
    expected = local_dimension_regularizer(far.double(), k=10)
    assert local_dimension_regularizer(far, k=10).item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_uniform_points_of_a_cube_have_its_dimension(dimension):
    points = torch.rand(3000, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inner = (points - 0.5).abs().amax(1).argsort()[:500]  # away from the faces, where half the ball is missing
    got = local_dimension(points[inner], points, k=64, exclude=inner)
    assert got.log().mean().exp().item() == pytest.approx(dimension, rel=0.2)


def test_method_adds_the_term_of_both_views_embeddings():
    method, batch = tiny_method("ldreg", num_neighbors=4, dimension_weight=0.3, start_epoch=2), tiny_batch(7)
    embeddings = record_outputs(method.backbone)
    early = method.loss(batch.views, dataclasses.replace(batch, epoch=1))
    rows = torch.cat(embeddings)
    late = method.loss(batch.views, dataclasses.replace(batch, epoch=2))
    torch.testing.assert_close((late.total - early.total).item(), 0.3 * oracle(rows, 4), **EXACT)
    torch.testing.assert_close(late.terms["log_dimension"].item(), -oracle(rows, 4), **EXACT)


def test_before_its_start_the_loss_is_that_of_simclr():
    batch = tiny_batch(6)
    base, method = tiny_method("simclr"), tiny_method("ldreg", start_epoch=1)
    method.load_state_dict(base.state_dict())
    assert method.loss(batch.views, batch).total == base.loss(batch.views, batch).total
