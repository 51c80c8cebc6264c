"""SimMIM against an encoder with mask tokens in numpy loops, and values computed by hand (Xie et al. 2022, sec. 3)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.losses.reconstruction import patchify
from ssl_bench.methods.simmim import SimMIM, masked_l1
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.records import Batch
from tests.reference.transformer import code_2d, embed_patches, encode, patches_of, state_of


def make(*, channels: int = 2, image_size: int = 12, patch_size: int = 4, **arguments: Any) -> SimMIM:
    torch.manual_seed(0)
    backbone = build_backbone("vit_micro", in_channels=channels, image_size=image_size, patch_size=patch_size)
    return SimMIM(backbone, **{"cell_patches": 1, **arguments}).double()


def make_batch(num: int = 3, size: int = 12, epoch: int = 0) -> Batch:
    views = torch.randn(num, 2, size, size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    images = torch.zeros(num, 2, size, size, dtype=torch.uint8)
    return Batch(images=images, index=torch.arange(num), epoch=epoch, seed=1, views=(views,))


def oracle(method: SimMIM, images: np.ndarray, masks: np.ndarray, size: int) -> float:
    """Sum of |x - x'| over masked pixels of all images, over the number of masked pixels and channels."""
    state, total, count = state_of(method), 0.0, 0
    for image, mask in zip(images, masks, strict=True):
        columns = image.shape[2] // size
        tokens = [state["backbone.cls_token"][0, 0]]
        for place, token in enumerate(embed_patches(image, state, "backbone", size)):
            content = state["mask_token"] if mask[place] else token
            tokens.append(content + code_2d(*divmod(place, columns), len(token)))
        tokens = encode(tokens, state, "backbone", heads=3)
        for place, patch in enumerate(patches_of(image, size)):
            if mask[place]:
                guess = state["head.weight"] @ tokens[1 + place] + state["head.bias"]
                # value order inside a patch: row, column, channel
                total += np.abs(patch.transpose(1, 2, 0).ravel() - guess).sum()
                count += size * size
    return total / count / images.shape[1]


@pytest.mark.parametrize(("image_size", "cell_patches"), [(12, 1), (16, 2)])
def test_loss_equals_the_oracle(image_size: int, cell_patches: int) -> None:
    method = make(image_size=image_size, cell_patches=cell_patches)
    batch = make_batch(size=image_size)
    expected = oracle(method, batch.views[0].numpy(), method.mask(batch).numpy(), 4)
    # float64 throughout, but the package stores position codes in float32: relative 2^-24 on the inputs, which
    # four blocks amplify by far less than 100
    assert method.loss(batch.views, batch).total.item() == pytest.approx(expected, rel=1e-6)


def test_loss_by_hand() -> None:
    """x = 0, .1, ..., 1.1 in three channels of 2 x 2, guess 0, pixels (0, 0) and (1, 1) masked: mean of six values."""
    images = torch.arange(12, dtype=torch.float64).reshape(1, 3, 2, 2) / 10
    target = patchify(images, 1)  # patches of one pixel
    mask = torch.tensor([[True, False, False, True]])
    loss = float(masked_l1(torch.zeros_like(target), target, mask))
    assert loss == pytest.approx((0 + 0.3 + 0.4 + 0.7 + 0.8 + 1.1) / 6, abs=1e-12)
    assert loss * 2 / (2 + 1e-5) == pytest.approx(0.5499972500, abs=1e-9)  # with the official code's 1e-5


@pytest.mark.parametrize(
    ("image_size", "patch_size", "cell", "ratio", "masked"),
    [
        (224, 16, 2, 0.6, 120),  # ceil(.6 * 49) cells of 4
        (32, 4, 2, 0.6, 40),
        (28, 4, 1, 0.6, 30),
        (20, 2, 5, 0.5, 50),
        (20, 2, 2, 0.28, 28),  # .28 * 25 is 7.000000000000001
        (20, 2, 1, 0.07, 7),
        (30, 5, 3, 0.3, 18),
    ],
)
def test_masks_are_whole_cells_with_exact_counts(
    image_size: int, patch_size: int, cell: int, ratio: float, masked: int
) -> None:
    method = make(image_size=image_size, patch_size=patch_size, cell_patches=cell, mask_ratio=ratio)
    mask = method.mask(make_batch(20))
    assert (mask.sum(1) == masked).all()
    side = image_size // patch_size
    grid = mask.reshape(20, side // cell, cell, side // cell, cell)
    assert (grid == grid[:, :, :1, :, :1]).all()
    assert len(mask.unique(dim=0)) > 1


def test_masks_are_functions_of_sample_and_epoch() -> None:
    method, batch = make(), make_batch(6)
    mask = method.mask(batch)
    alone = dataclasses.replace(batch, images=batch.images[2:3], index=batch.index[2:3])
    assert torch.equal(method.mask(alone), mask[2:3])
    assert not torch.equal(method.mask(dataclasses.replace(batch, epoch=1)), mask)


def test_masked_pixels_reach_the_target_only() -> None:
    method, batch = make(), make_batch()
    mask = method.mask(batch)
    outputs: list[Tensor] = []
    method.head.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    images = batch.views[0]
    hidden = torch.kron(mask.reshape(3, 1, 3, 3).double(), torch.ones(1, 1, 4, 4, dtype=torch.float64))
    first = method.loss((images,), batch).total
    second = method.loss((images + 3 * hidden,), batch).total
    assert torch.equal(outputs[0], outputs[1])
    assert first != second


def test_visible_outputs_receive_no_gradient() -> None:
    prediction = torch.zeros(2, 4, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, False], [False, False, True, True]])
    target = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked_l1(prediction, target, mask).mean().backward()
    assert prediction.grad is not None
    assert torch.allclose(prediction.grad, -target.sign() * mask[:, :, None] / (2 * 2 * 6), rtol=0, atol=1e-15)


def test_loss_is_the_mean_of_the_images_alone() -> None:
    method, batch = make(), make_batch()
    alone = []
    for i in range(3):
        one = dataclasses.replace(batch, images=batch.images[i : i + 1], index=batch.index[i : i + 1])
        alone.append(method.loss((batch.views[0][i : i + 1],), one).total.item())
    assert method.loss(batch.views, batch).total.item() == pytest.approx(sum(alone) / 3, rel=1e-12)


def test_mask_token_starts_small_and_is_not_decayed() -> None:
    token = make().mask_token.detach()
    assert token.ndim == 1  # one-dimensional parameters get no weight decay
    assert 0 < float(token.abs().max()) <= 0.02
    # a normal cut at one standard deviation has variance .291 of it; 96 values: five standard errors of 9 %
    assert float(token.square().mean()) == pytest.approx(0.2911 * 0.02**2, rel=5 * math.sqrt(0.8 / 96))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cell_patches": 2}, "cell_patches"),
        ({"cell_patches": 0}, "cell_patches"),
        ({"mask_ratio": 0.0}, "mask_ratio"),
        ({"mask_ratio": 0.95}, "mask_ratio"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**arguments)
    with pytest.raises(ConfigError, match="kind vit"):
        SimMIM(build_backbone("conv4", in_channels=1, image_size=28))
