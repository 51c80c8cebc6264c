"""RMQM against hand-computed values and loops."""

import itertools
import math

import pytest
import torch

from ssl_bench.evaluation.diagnostics.manifold_quality import manifold_quality


def at_angles(*degrees):
    angles = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([angles.cos(), angles.sin()], dim=1)[None]


def random_levels(n=12, levels=5, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(n, levels, dim, dtype=torch.float64, generator=generator)
    return 3 * torch.randn(n, 1, dim, dtype=torch.float64, generator=generator) + 0.3 * steps.cumsum(dim=1)


def loops(levels):
    d_o, d_p, c_o, c_p = [], [], [], []
    for image in levels.tolist():
        unit = [[v / math.hypot(*row) for v in row] for row in image]
        o = [math.dist(row, unit[0]) for row in unit[1:]]
        p = [math.dist(a, b) for a, b in zip(unit[1:], unit[:-1], strict=True)]
        d_o += o
        d_p += p
        c_o += [abs((b - a) / a) for a, b in itertools.pairwise(o)]
        c_p += [abs((b - a) / a) for a, b in itertools.pairwise(p)]
    mean = [sum(x) / len(x) for x in (d_o, d_p, c_o, c_p)]
    return [*mean, math.log(1 + mean[0] + mean[1] + 1 / mean[2] + 1 / mean[3])]


def test_one_point_at_known_angles():
    found = manifold_quality(at_angles(0, 10, 25, 50))
    assert found.to_original == pytest.approx(0.484142412284, abs=1e-11)
    assert found.to_previous == pytest.approx(0.289414365937, abs=1e-11)
    assert found.change_to_original == pytest.approx(1.21797903978, abs=1e-10)
    assert found.change_to_previous == pytest.approx(0.577914195048, abs=1e-11)
    assert found.value == pytest.approx(1.46440049878, abs=1e-10)
    assert found.curve == pytest.approx([0.17431149, 0.43287923, 0.84523652], abs=1e-8)
    assert found.num_dropped == (0, 0)
    assert not found.is_clipped


def test_parts_equal_the_loops():
    levels = random_levels()
    found = manifold_quality(levels)
    parts = [found.to_original, found.to_previous, found.change_to_original, found.change_to_previous, found.value]
    assert parts == pytest.approx(loops(levels), rel=1e-10)


def test_equal_steps_are_clipped_not_infinite():
    found = manifold_quality(at_angles(0, 10, 20, 30))
    assert found.change_to_previous <= 1e-12  # a few roundings of distances near 0.17
    assert found.is_clipped
    assert found.value == pytest.approx(
        math.log(1 + found.to_original + found.to_previous + 1 / found.change_to_original + 1e6)
    )


def test_invariances_and_the_meaning_of_the_axes():
    levels = random_levels()
    value = manifold_quality(levels).value
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    sizes = torch.rand(12, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5
    assert manifold_quality(levels @ turn).value == pytest.approx(value, rel=1e-10)
    assert manifold_quality(sizes * levels).value == pytest.approx(value, rel=1e-10)
    assert manifold_quality(levels.flip(0)).value == pytest.approx(value, rel=1e-10)
    assert manifold_quality(torch.cat([levels, levels])).value == pytest.approx(value, rel=1e-10)
    assert manifold_quality(levels[:, [0, 3, 1, 4, 2]]).value != pytest.approx(value, rel=0.01)
    assert manifold_quality(levels.transpose(0, 1)).value != pytest.approx(value, rel=0.01)


def test_images_that_do_not_move_at_once_are_left_out_of_the_changes_and_counted():
    moving, late = at_angles(0, 10, 25, 50), at_angles(0, 0, 25, 50)
    found, alone = manifold_quality(torch.cat([moving, late])), manifold_quality(moving)
    assert found.num_dropped == (1, 1)
    assert found.change_to_original == alone.change_to_original
    assert found.change_to_previous == alone.change_to_previous
    assert found.to_original < alone.to_original  # the distances count it
    back = manifold_quality(torch.cat([moving, at_angles(0, 10, 0, 50)]))
    assert back.num_dropped == (1, 0)  # returned to the original, but by steps that are not 0


def test_collapse_has_no_value():
    found = manifold_quality(torch.full((4, 5, 3), 0.3))
    assert math.isnan(found.value)
    assert found.to_original == found.to_previous == 0.0
    assert found.num_dropped == (4, 4)
    assert math.isnan(manifold_quality(torch.zeros(4, 5, 3)).value)
    generator = torch.Generator().manual_seed(0)
    rounded = 1 + 6e-8 * torch.rand(4, 5, 3, dtype=torch.float64, generator=generator)  # float32's last digit
    assert manifold_quality(rounded).num_dropped == (4, 4)


def test_two_levels_are_refused():
    with pytest.raises(ValueError, match="at least 3 levels"):
        manifold_quality(torch.ones(4, 2, 3))
