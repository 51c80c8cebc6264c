"""LiDAR against hand-computed values and the definition written out in numpy."""

import numpy as np
import pytest
import torch

from ssl_bench.evaluation.diagnostics.lidar import lidar

GROUPS = torch.tensor([[[2.0, 0], [3, 0]], [[0, 1], [0, 2]], [[-2, 0], [-3, -1]]])


def random_views(n=20, q=4, dim=6, spread=0.3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 1, dim, dtype=torch.float64, generator=generator) * torch.arange(1, dim + 1) + 4
    return images + spread * torch.randn(n, q, dim, dtype=torch.float64, generator=generator)


def test_the_value_of_three_pairs():
    assert lidar(GROUPS) == pytest.approx(1.44611979675, abs=1e-10)
    l = np.array([3.24491289, 23.57576068])  # noqa: E741
    shares = l / l.sum()
    assert lidar(GROUPS, eps=0.0) == pytest.approx(float(np.exp(-(shares * np.log(shares)).sum())), abs=1e-7)


@pytest.mark.parametrize("delta", [1e-4, 0.1])
def test_the_value_equals_the_definition_written_out(delta):
    x = random_views().numpy()
    n, q, dim = x.shape
    means = x.mean(1)
    grand = means.mean(0)
    between = sum(np.outer(m - grand, m - grand) for m in means) / (n - 1)
    within = sum(np.outer(v - m, v - m) for views, m in zip(x, means, strict=True) for v in views) / (n * (q - 1))
    scales, basis = np.linalg.eigh(within + delta * np.eye(dim))
    root = basis / np.sqrt(scales) @ basis.T
    eigenvalues = np.linalg.eigvalsh(root @ between @ root)
    shares = eigenvalues / eigenvalues.sum() + 1e-8
    assert lidar(torch.from_numpy(x), delta=delta) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-9)


def test_invariances():
    x = random_views()
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    assert lidar(x @ turn + 10) == pytest.approx(lidar(x), rel=1e-9)
    assert lidar(x.flip(0)) == pytest.approx(lidar(x), rel=1e-9)
    assert lidar(x.flip(1)) == pytest.approx(lidar(x), rel=1e-9)
    assert lidar(7 * x, delta=0.0) == pytest.approx(lidar(x, delta=0.0), rel=1e-9)
    assert lidar(x.transpose(0, 1)) != pytest.approx(lidar(x), rel=0.1)  # views of one image belong together


def test_the_rank_is_at_most_images_less_one():
    few = random_views(n=4, dim=30)
    assert lidar(few, eps=0.0) <= 3.0


def test_a_direction_within_the_images_counts_little():
    """Two directions differ between images; where views differ as much, the second is all but lost."""
    x = torch.zeros(40, 10, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x += torch.randn(40, 1, 2, dtype=torch.float64, generator=generator)
    noise = torch.randn(40, 10, 2, dtype=torch.float64, generator=generator)
    both, one = lidar(x + 0.1 * noise), lidar(x + noise * torch.tensor([0.1, 10.0]))
    assert both > 1.8
    assert one < 1.1


def test_collapse_has_rank_zero():
    assert lidar(torch.full((5, 3, 4), 0.3)) == 0.0
    assert lidar(torch.zeros(5, 3, 4)) == 0.0
    same_images = random_views()[:1].expand(5, -1, -1)
    assert lidar(same_images) == 0.0
    no_augmentation = random_views(spread=0.0)
    assert 1.0 < lidar(no_augmentation) <= 6.1  # nothing within, delta alone
