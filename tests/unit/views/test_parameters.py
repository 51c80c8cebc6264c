"""Random parameters against torchvision's own draws: large samples, fixed seeds, Kolmogorov-Smirnov or chi-squared.

Seeds are fixed, so a test either always passes or never; the level 1e-3 only says which differences are too large.
With N = 20,000 a distribution function that is off by 0.02 anywhere fails.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch
import torchvision.transforms as T

from ssl_bench.random import sample_keys
from ssl_bench.views import parameters as draw

N = 20_000
LEVEL = 1e-3


def keys(num: int = N, seed: int = 0) -> torch.Tensor:
    return sample_keys(seed, 0, torch.arange(num), "view0")


def same_counts(ours: list, theirs: list) -> float:
    """P-value that two samples of a discrete variable have one distribution; rare values are pooled."""
    a, b = Counter(ours), Counter(theirs)
    common = [value for value in set(a) | set(b) if a[value] + b[value] >= 20]
    table = np.array([[c[value] for value in common] + [sum(c.values()) - sum(c[v] for v in common)] for c in (a, b)])
    table = table[:, table.sum(0) > 0]
    return 1.0 if table.shape[1] == 1 else float(scipy.stats.chi2_contingency(table).pvalue)


def torchvision_crops(height: int, width: int, scale: tuple, ratio: tuple) -> torch.Tensor:
    torch.manual_seed(1)
    image = torch.zeros(1, height, width)
    return torch.tensor([T.RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(N)]).T.float()


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(32, 32, (0.08, 1.0)), (32, 32, (0.05, 0.4)), (96, 40, (0.2, 1.0)), (17, 60, (0.9, 1.0)), (224, 224, (0.08, 1.0))],
)
def test_random_resized_crop_is_distributed_as_torchvisions(height, width, scale):
    ratio = (3 / 4, 4 / 3)
    ours = draw.random_resized_crop(keys(), height, width, scale, ratio)
    theirs = torchvision_crops(height, width, scale, ratio)
    for box in (ours, theirs):
        top, left, h, w = box
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (h >= 1).all()
        assert (w >= 1).all()
        assert (top + h <= height).all()
        assert (left + w <= width).all()

    def projections(box: torch.Tensor) -> dict[str, torch.Tensor]:
        top, left, h, w = box
        return {
            "top": top,
            "left": left,
            "height": h,
            "width": w,
            "area": h * w,
            "aspect": w / h,
            "bottom right": top + h + left + w,
            "center against size": (2 * top + h - height) * h - (2 * left + w - width) * w,
        }

    for (name, a), b in zip(projections(ours).items(), projections(theirs).values(), strict=True):
        p = scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue
        assert p > LEVEL, (name, p)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (2, 2), (3, 3), (4, 2), (3, 9)])
def test_random_resized_crop_of_tiny_images_has_the_same_joint_distribution(height, width):
    ours = draw.random_resized_crop(keys(), height, width, (0.08, 1.0), (3 / 4, 4 / 3))
    theirs = torchvision_crops(height, width, (0.08, 1.0), (3 / 4, 4 / 3))
    p = same_counts([tuple(box) for box in ours.T.tolist()], [tuple(box) for box in theirs.T.tolist()])
    assert p > LEVEL


def test_random_resized_crop_falls_back_to_the_largest_central_crop():
    for height, width, expected in ((10, 40, (0, 13, 10, 13)), (40, 10, (13, 0, 13, 10)), (12, 12, (0, 0, 12, 12))):
        # an area above what the ratio allows never fits, or only as the whole square
        box = draw.random_resized_crop(keys(50), height, width, (1.0, 1.0), (3 / 4, 4 / 3))
        theirs = T.RandomResizedCrop.get_params(torch.zeros(1, height, width), [1.0, 1.0], [3 / 4, 4 / 3])
        fell_back = [tuple(int(x) for x in b) == expected for b in box.T.tolist()]
        if height != width:
            assert all(fell_back)
            assert theirs == expected
        else:
            assert any(fell_back)


def test_padded_crop_is_uniform_over_all_places():
    u = draw.named(draw.draw_numbers(keys()))
    top, left = draw.padded_crop(u, 40, 40, 32)
    counts = np.bincount((top * 9 + left).int().numpy(), minlength=81)
    assert len(counts) == 81
    assert scipy.stats.chisquare(counts).pvalue > LEVEL


def test_numbers_are_uniform_and_uncorrelated():
    numbers = draw.draw_numbers(keys()).double().numpy()
    assert numbers.shape == (len(draw.NUMBERS), N)
    for name, row in zip(draw.NUMBERS, numbers, strict=True):
        assert scipy.stats.kstest(row, "uniform").pvalue > LEVEL, name
    correlation = np.corrcoef(numbers) - np.eye(len(numbers))
    # 120 correlations of standard deviation 1 / sqrt(N): five of them is a one in ten thousand event
    assert np.abs(correlation).max() < 5 / np.sqrt(N)


def operations_in_order(j: draw.Jitter, sample: int) -> list[tuple[str, float]]:
    steps = []
    for k in range(j.factors.shape[1]):
        if j.hue is not None and j.before[sample] == k:
            steps.append(("hue", float(j.hue[sample])))
        is_gray = j.gray_shares is not None and bool(j.gray_shares[sample, k])
        is_mean = j.mean_shares is not None and bool(j.mean_shares[sample, k])
        assert not (is_gray and is_mean)
        name = "saturation" if is_gray else "contrast" if is_mean else "brightness"
        steps.append((name, float(j.factors[sample, k])))
    if j.hue is not None and j.before[sample] == j.factors.shape[1]:
        steps.append(("hue", float(j.hue[sample])))
    return steps


def test_jitter_is_distributed_as_torchvisions():
    strengths = (0.4, 1.3, 0.8, 0.2)
    jitter = T.ColorJitter(*strengths)
    torch.manual_seed(2)
    theirs = [jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) for _ in range(N)]
    j = draw.jitter(draw.named(draw.draw_numbers(keys())), 0.8, *strengths)
    ours = [operations_in_order(j, sample) for sample in range(N)]
    names = ("brightness", "contrast", "saturation", "hue")
    for place, name in enumerate(names):
        factors = [dict(steps)[name] for steps in ours]
        assert scipy.stats.ks_2samp(factors, [t[1 + place] for t in theirs]).pvalue > LEVEL, name
    orders = Counter(tuple(name for name, _ in steps) for steps in ours)
    assert set(orders) == set(itertools.permutations(names))
    assert scipy.stats.chisquare(list(orders.values())).pvalue > LEVEL
    # the order says nothing about the factors: the mean contrast factor of each order is the overall one
    first = [dict(steps)["contrast"] for steps in ours if steps[0][0] == "contrast"]
    last = [dict(steps)["contrast"] for steps in ours if steps[-1][0] == "contrast"]
    assert scipy.stats.ks_2samp(first, last).pvalue > LEVEL
    assert scipy.stats.binomtest(int(j.applied.sum()), N, 0.8).pvalue > LEVEL


@pytest.mark.parametrize("active", list(itertools.product([0.0, 0.3], repeat=4)))
def test_jitter_leaves_operations_of_strength_zero_out(active):
    j = draw.jitter(draw.named(draw.draw_numbers(keys(200))), 1.0, *active)
    names = {n for n, s in zip(("brightness", "contrast", "saturation", "hue"), active, strict=True) if s}
    for sample in range(200):
        steps = operations_in_order(j, sample)
        assert {name for name, _ in steps} == names
        assert len(steps) == len(names)


def test_draws_do_not_depend_on_batch_mates():
    index = torch.tensor([5, 900, 3, 77])
    together = sample_keys(3, 2, index, "view1")
    box = draw.random_resized_crop(together, 32, 20, (0.08, 1.0), (3 / 4, 4 / 3))
    numbers = draw.draw_numbers(together)
    for place, i in enumerate(index):
        alone = sample_keys(3, 2, i[None], "view1")
        assert torch.equal(draw.random_resized_crop(alone, 32, 20, (0.08, 1.0), (3 / 4, 4 / 3))[:, 0], box[:, place])
        assert torch.equal(draw.draw_numbers(alone)[:, 0], numbers[:, place])
