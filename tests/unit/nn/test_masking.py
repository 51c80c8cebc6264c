"""Masks over patches: exact counts, and a function of each sample's key alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.nn.masking import num_kept, random_mask
from ssl_bench.random import sample_keys


def keys(num: int, epoch: int = 0) -> torch.Tensor:
    return sample_keys(3, epoch, torch.arange(num), "mask")


@pytest.mark.parametrize("num_patches", [4, 10, 36, 49, 64, 100, 196, 256, 784])
def test_num_kept_is_the_exact_floor(num_patches: int) -> None:
    for percent in range(1, 100):
        exact = math.floor(num_patches * (1 - Fraction(percent, 100)))
        if exact == 0:
            with pytest.raises(ConfigError, match="mask_ratio"):
                num_kept(num_patches, percent / 100)
        elif exact < num_patches:
            assert num_kept(num_patches, percent / 100) == exact


def test_num_kept_survives_float_error() -> None:
    assert int(10 * (1 - 0.9)) == 0  # what the guard is for
    assert num_kept(10, 0.9) == 1


@pytest.mark.parametrize("ratio", [0.0, 1.0, 0.999])
def test_num_kept_refuses_empty_sides(ratio: float) -> None:
    with pytest.raises(ConfigError, match="between 1 and 48 of 49"):
        num_kept(49, ratio)


@pytest.mark.parametrize(
    ("num_patches", "ratio", "kept"), [(49, 0.75, 12), (64, 0.75, 16), (10, 0.9, 1), (49, 0.5, 24)]
)
def test_random_mask_counts_and_complements(num_patches: int, ratio: float, kept: int) -> None:
    keep, mask = random_mask(keys(50), num_patches, ratio)
    assert keep.shape == (50, kept)
    assert (mask.sum(1) == num_patches - kept).all()
    assert (keep.diff(dim=1) > 0).all()  # ascending and distinct
    assert not mask.gather(1, keep).any()


def test_random_mask_depends_on_the_sample_and_epoch_only() -> None:
    keep, mask = random_mask(keys(20), 49, 0.75)
    alone = random_mask(keys(20)[7:8], 49, 0.75)
    assert torch.equal(alone[0], keep[7:8])
    assert torch.equal(alone[1], mask[7:8])
    assert len(mask.unique(dim=0)) == 20
    assert not torch.equal(random_mask(keys(20, epoch=1), 49, 0.75)[1], mask)


def test_random_mask_is_uniform_over_patches() -> None:
    num = 4000
    mask = random_mask(keys(num), 49, 0.75)[1].double()
    share = 37 / 49
    # 49 binomial shares: five standard deviations are passed by chance once in 35,000 drawings
    assert (mask.mean(0) - share).abs().max() < 5 * math.sqrt(share * (1 - share) / num)
    # without replacement, two patches have covariance -share (1 - share) / 48; its error is below 1 / sqrt(num)
    covariance = torch.cov(mask.T)
    off = covariance[~torch.eye(49, dtype=torch.bool)]
    assert abs(float(off.mean()) + share * (1 - share) / 48) < 1e-6  # exact, since row sums are constant
    assert (off + share * (1 - share) / 48).abs().max() < 6 * share * (1 - share) / math.sqrt(num)
