"""Spectra, spread, alignment and uniformity against hand-computed values."""

import math

import numpy as np
import pytest
import torch

from ssl_bench.evaluation.diagnostics.geometry import (
    alignment,
    collapse_std,
    covariance_eigenvalues,
    effective_rank,
    participation_ratio,
    rankme,
    stable_rank,
    uniformity,
)

FOUR = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
CIRCLE = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize(("eps", "expected"), [(1e-7, 2.82842725648), (1e-5, 2.82844029636), (0.0, 2.82842712475)])
def test_rankme_of_known_singular_values(eps, expected):
    assert rankme(torch.diag(torch.tensor([2.0, 1.0, 1.0])), eps=eps) == pytest.approx(expected, abs=1e-10)


def test_rankme_is_not_centered():
    assert rankme(FOUR) == pytest.approx(1.88988157484, abs=1e-6)  # the value is without eps 1e-7
    assert rankme(FOUR, eps=0.0) == pytest.approx(1.88988157484, abs=1e-10)
    assert rankme(FOUR + torch.tensor([3.0, 4.0]), eps=0.0) == pytest.approx(1.62679329028, abs=1e-10)


def test_effective_rank_of_eigenvalues_four_one_one():
    """Centered rows along the axes with variances in the ratio 4 : 1 : 1, on any offset."""
    rows = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    rows = torch.cat([rows, -rows])
    assert effective_rank(rows) == pytest.approx(2.38110157795, abs=1e-10)
    assert effective_rank(rows + 100.0) == pytest.approx(2.38110157795, abs=1e-8)


def test_eigenvalues_are_numpys_and_their_ratios_the_hand_computed_ones():
    x = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    expected = np.linalg.eigvalsh(np.cov(x.T.numpy()))[::-1].copy()
    torch.testing.assert_close(covariance_eigenvalues(x), torch.from_numpy(expected), rtol=1e-10, atol=0)
    eigenvalues = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
    assert participation_ratio(eigenvalues) == pytest.approx(2.0, abs=1e-12)
    assert stable_rank(eigenvalues) == pytest.approx(1.5, abs=1e-12)


def test_directions_without_variance_have_no_eigenvalue():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    flat = covariance_eigenvalues(torch.cat([x, x.sum(1, keepdim=True), torch.full((30, 2), 0.7)], dim=1))
    assert (flat > 0).sum() == 2
    constant = covariance_eigenvalues(torch.full((5, 3), 0.7))
    assert constant.tolist() == [0.0] * 3
    assert participation_ratio(constant) == stable_rank(constant) == 0.0


def test_more_dimensions_than_samples_give_the_same_spectrum():
    x = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.zeros(90, 40)])  # zero rows change neither singular values nor rank
    assert rankme(x, eps=0.0) == pytest.approx(rankme(padded, eps=0.0), rel=1e-6)  # noise below 1e-8 of the largest


def test_rotation_scale_and_order_leave_the_ranks():
    x = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 9.0)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    for figure in (rankme, effective_rank):
        assert figure(7 * x @ rotation) == pytest.approx(figure(x), rel=1e-9)
        assert figure(x.flip(0)) == pytest.approx(figure(x), rel=1e-9)


def test_collapse_is_seen_by_every_figure():
    constant = torch.full((50, 8), 0.3)
    assert collapse_std(constant) == pytest.approx(0.0, abs=1e-12)
    assert effective_rank(constant) == 0.0
    assert rankme(constant, eps=0.0) == pytest.approx(1.0, abs=1e-5)  # one uncentered direction is left
    assert float(uniformity(constant / constant.norm(dim=1, keepdim=True))) == 0.0
    assert rankme(torch.zeros(5, 3)) == 0.0


def test_isotropic_spread_is_one_over_root_of_the_width():
    x = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    assert collapse_std(x) == pytest.approx(1 / 4, rel=0.01)  # sampling error of a deviation: 1 / sqrt(2 N) = 0.5 %
    assert collapse_std(CIRCLE) == pytest.approx(1 / math.sqrt(2), abs=1e-12)


def test_uniformity_of_known_point_sets():
    assert float(uniformity(CIRCLE)) == pytest.approx(-4.39634896723, abs=1e-10)
    angles = 2 * math.pi * torch.arange(3, dtype=torch.float64) / 3
    assert float(uniformity(torch.stack([angles.cos(), angles.sin()], 1))) == pytest.approx(-6.0, abs=1e-10)
    tetrahedron = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1.0]], dtype=torch.float64) / math.sqrt(3)
    assert float(uniformity(tetrahedron)) == pytest.approx(-16 / 3, abs=1e-10)


def test_alignment_of_known_pairs():
    assert float(alignment(CIRCLE, CIRCLE)) == 0.0
    partners = CIRCLE.clone()
    partners[3] = torch.tensor([1.0, 0.0])
    assert float(alignment(CIRCLE, partners)) == pytest.approx(0.5, abs=1e-12)
