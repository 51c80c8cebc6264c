"""Masks over patches: exact counts, and a function of each sample's key alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.nn.masking import block_masks, block_sizes, multi_block_masks, num_kept, random_mask, true_places
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


IJEPA = {"num_targets": 4, "target_scale": (0.15, 0.2), "target_aspect": (0.75, 1.5), "context_scale": (0.85, 1.0)}


def sides(mask: torch.Tensor, grid: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of one block; fails if the mask is no full rectangle."""
    square = mask.reshape(grid)
    height, width = int(square.any(1).sum()), int(square.any(0).sum())
    assert int(square.sum()) == height * width
    return height, width


def test_block_sizes_by_hand() -> None:
    """14 x 14: floor(29.4) = 29 at .75, floor(34.3) = 34 at 1.125, floor(39.2) = 39 at 1.5."""
    u = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    rows, columns = block_sizes(u, (14, 14), (0.15, 0.2), (0.75, 1.5))
    assert rows.tolist() == [5, 6, 8]  # 4.66, 6.18, 7.65
    assert columns.tolist() == [6, 5, 5]  # 6.22, 5.50 (rounds to 5: 34 / 1.125 = 30.2, root 5.497), 5.10
    tiny = block_sizes(u, (2, 2), (0.15, 0.2), (0.75, 1.5))
    assert tiny[0].tolist() == tiny[1].tolist() == [1, 1, 1]
    whole = block_sizes(u, (7, 7), (1.0, 1.0), (1.0, 1.0))
    assert whole[0].tolist() == whole[1].tolist() == [7, 7, 7]


def test_block_places_are_uniform_over_all_that_fit() -> None:
    numbers = torch.linspace(0, 1, 61, dtype=torch.float64)[:-1]
    size = (torch.tensor(3.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    masks = block_masks(size, numbers, numbers[0], (5, 4)).reshape(60, 5, 4)
    assert (masks.sum((1, 2)) == 6).all()
    assert masks[:, :, 2:].any().item() is False
    assert masks.any(2).sum(0).tolist() == [20, 40, 60, 40, 20]  # tops 0, 1, 2 equally often


@pytest.mark.parametrize("side", [4, 5, 7, 8, 14])
def test_multi_block_masks_are_blocks_that_do_not_overlap_the_context(side: int) -> None:
    context, targets = multi_block_masks(keys(300), (side, side), **IJEPA, min_context=6)
    assert context.shape == (300, side**2)
    assert targets.shape == (300, 4, side**2)
    assert not (context[:, None] & targets).any()
    assert (context.sum(1) >= 6).all()
    shapes = [{sides(block, (side, side)) for block in blocks} for blocks in targets]
    assert all(len(shape) == 1 for shape in shapes)  # one size an image
    assert len(set.union(*shapes)) > 1 or side == 5
    # what the context and the targets cover together contains a square of the context's size
    for own, blocks in zip(context[:50], targets[:50], strict=True):
        covered = own.reshape(side, side)
        rows, columns = covered.any(1).nonzero(), covered.any(0).nonzero()
        inside = torch.zeros(side, side, dtype=torch.bool)
        inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
        assert (covered | ~inside | blocks.any(0).reshape(side, side)).all()


def test_multi_block_masks_depend_on_the_sample_and_epoch_only() -> None:
    context, targets = multi_block_masks(keys(20), (7, 7), **IJEPA, min_context=11)
    alone = multi_block_masks(keys(20)[7:8], (7, 7), **IJEPA, min_context=11)
    assert torch.equal(alone[0], context[7:8])
    assert torch.equal(alone[1], targets[7:8])
    assert len(context.unique(dim=0)) == 20
    assert not torch.equal(multi_block_masks(keys(20, epoch=1), (7, 7), **IJEPA, min_context=11)[0], context)


def test_multi_block_masks_use_every_patch() -> None:
    context, targets = multi_block_masks(keys(3000), (7, 7), **IJEPA, min_context=11)
    assert context.any(0).all()
    assert targets.any(0).any(0).all()


def test_the_first_draw_with_enough_context_is_taken() -> None:
    few = multi_block_masks(keys(500), (7, 7), **IJEPA, min_context=1)
    enough = multi_block_masks(keys(500), (7, 7), **IJEPA, min_context=20)
    most = multi_block_masks(keys(500), (7, 7), **IJEPA, min_context=49)
    counts = [context.sum(1) for context, _ in (few, enough, most)]
    kept = counts[0] >= 20
    assert 0.3 < kept.double().mean() < 0.95
    assert torch.equal(enough[0][kept], few[0][kept])
    assert torch.equal(enough[1][kept], few[1][kept])
    assert (counts[1][~kept] > counts[0][~kept]).all()
    assert (counts[2] >= counts[1]).all()


def test_true_places() -> None:
    mask = torch.tensor([[[False, True, True, False], [True, False, False, False]]])
    places, valid = true_places(mask, 3)
    assert valid.tolist() == [[[True, True, False], [True, False, False]]]
    assert places[0, 0, :2].tolist() == [1, 2]
    assert places[0, 1, 0] == 0
