"""MAE against an implementation in numpy loops, and against values computed by hand.

The oracle follows He et al. 2022 (section 3 and appendix A) in float64 and shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.losses.reconstruction import masked_mse, normalize_patches, patchify, unpatchify
from ssl_bench.methods.mae import MAE
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.nn.masking import random_mask
from ssl_bench.records import Batch
from tests.reference.transformer import block, code_2d, layer_norm

TARGET = [[0, 1, 2, 3], [1, 1, 1, 1], [4, 2, 0, 2], [-1, 0, 1, 2]]
PREDICTION = [[0, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, -0.5, -0.5], [1, 1, 1, 1]]
MASK = [True, False, True, True]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None]


def make_mae(**arguments: Any) -> MAE:
    torch.manual_seed(0)
    backbone = build_backbone("vit_micro", in_channels=2, image_size=12)  # 3 x 3 patches of 4 x 4 x 2 values
    settings = {"decoder_width": 16, "decoder_depth": 2, "decoder_heads": 2, "mask_ratio": 0.6, **arguments}
    return MAE(backbone, **settings).double()


def make_batch(num: int = 4, epoch: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(5)
    views = (torch.randn(num, 2, 12, 12, generator=generator, dtype=torch.float64),)
    index = torch.arange(num)
    return Batch(images=torch.zeros(num, 2, 12, 12, dtype=torch.uint8), index=index, epoch=epoch, seed=1, views=views)


# ---- the oracle ---------------------------------------------------------------------------------


def oracle_loss(method: MAE, images: np.ndarray, visible: list[list[int]], normalize: bool) -> float:
    """Mean error over all masked patches of all images, patch 4, 3 x 3 grid."""
    state = {key: value.detach().numpy() for key, value in method.state_dict().items()}
    width, narrow = method.backbone.width, method.mask_token.shape[2]
    total, count = 0.0, 0
    for image, kept in zip(images, visible, strict=True):
        tokens = [state["backbone.cls_token"][0, 0]]
        for place in kept:
            row, column = divmod(place, 3)
            patch = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            kernel, bias = state["backbone.patch_embed.weight"], state["backbone.patch_embed.bias"]
            token = np.array([(kernel[d] * patch).sum() for d in range(width)]) + bias
            tokens.append(token + code_2d(row, column, width))
        for b in range(4):
            tokens = block(tokens, state, f"backbone.blocks.{b}", 3)
        tokens = [layer_norm(x, state["backbone.norm.weight"], state["backbone.norm.bias"]) for x in tokens]
        narrowed = [state["decoder_embed.weight"] @ x + state["decoder_embed.bias"] for x in tokens]
        sequence = [narrowed[0]]
        for place in range(9):
            content = narrowed[1 + kept.index(place)] if place in kept else state["mask_token"][0, 0]
            sequence.append(content + code_2d(*divmod(place, 3), narrow))
        for b in range(2):
            sequence = block(sequence, state, f"decoder.{b}", 2)
        for place in range(9):
            if place in kept:
                continue
            row, column = divmod(place, 3)
            # pixel order inside a patch: row, column, channel
            truth = np.array(
                [image[c, 4 * row + i, 4 * column + j] for i in range(4) for j in range(4) for c in range(2)]
            )
            if normalize:
                mean = truth.sum() / 32
                truth = (truth - mean) / math.sqrt(((truth - mean) ** 2).sum() / 31 + 1e-6)
            normed = layer_norm(sequence[1 + place], state["decoder_norm.weight"], state["decoder_norm.bias"])
            guess = state["decoder_head.weight"] @ normed + state["decoder_head.bias"]
            total += ((guess - truth) ** 2).sum() / 32
            count += 1
    return total / count


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_equals_the_oracle(normalize: bool) -> None:
    method, batch = make_mae(normalize_target=normalize), make_batch()
    keep, mask = random_mask(batch.keys("mask"), 9, 0.6)
    assert (mask.sum(1) == 6).all()
    expected = oracle_loss(method, batch.views[0].numpy(), keep.tolist(), normalize)
    # float64 throughout, but the codes of both sides are stored in float32: relative 2^-24 on the inputs,
    # which six blocks amplify by far less than 100
    assert method.loss(batch.views, batch).total.item() == pytest.approx(expected, rel=1e-6)


# ---- values computed by hand --------------------------------------------------------------------


def test_raw_loss_by_hand() -> None:
    target, prediction = tensor(TARGET), tensor(PREDICTION)
    each = [float(masked_mse(prediction, target, torch.eye(4)[i][None])) for i in range(4)]
    assert each == pytest.approx([3.5, 0.75, 5.25, 1.5], abs=1e-12)
    loss = float(masked_mse(prediction, target, torch.tensor([MASK])))
    assert loss == pytest.approx(3.4166666667, abs=1e-9)


def test_normalized_loss_by_hand() -> None:
    target, prediction = normalize_patches(tensor(TARGET)), tensor(PREDICTION)
    each = [float(masked_mse(prediction, target, torch.eye(4)[i][None])) for i in range(4)]
    assert each == pytest.approx([0.74999955, 0.25, 0.387627397874, 1.74999955], abs=1e-7)
    loss = float(masked_mse(prediction, target, torch.tensor([MASK])))
    assert loss == pytest.approx(0.9625421660, abs=1e-9)


def test_loss_without_learning_is_below_one() -> None:
    target = normalize_patches(tensor(TARGET))
    zero = torch.zeros_like(target)
    each = [float(masked_mse(zero, target, torch.eye(4)[i][None])) for i in range(4)]
    assert each == pytest.approx([0.74999955, 0, 0.7499997188, 0.74999955], abs=1e-7)  # (D - 1) / D, constant row 0
    wide = normalize_patches(torch.randn(1, 1, 768, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert float(wide.square().mean()) == pytest.approx(767 / 768, abs=1e-5)


# ---- properties ---------------------------------------------------------------------------------


def test_patchify_order_and_inverse() -> None:
    images = torch.arange(2 * 3 * 8 * 12).reshape(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    for row in range(2):
        for column in range(3):
            for i in range(4):
                for j in range(4):
                    for c in range(3):
                        value = patches[1, 3 * row + column, 12 * i + 3 * j + c]
                        assert value == images[1, c, 4 * row + i, 4 * column + j]
    assert torch.equal(unpatchify(patches, 4, (2, 3)), images)


@pytest.mark.parametrize(("scale", "shift"), [(3.0, -2.0), (0.1, 5.0)])
def test_normalized_target_ignores_brightness_and_contrast(scale: float, shift: float) -> None:
    patches = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # eps 1e-6 beside a variance above 0.1^2 / 2 moves the target by at most a share of 1e-4
    assert torch.allclose(normalize_patches(scale * patches + shift), normalize_patches(patches), rtol=1e-3, atol=1e-3)


def test_visible_patches_receive_no_gradient_from_the_loss() -> None:
    prediction = tensor(PREDICTION).requires_grad_()
    masked_mse(prediction, tensor(TARGET), torch.tensor([MASK])).sum().backward()
    assert prediction.grad is not None
    assert (prediction.grad[0, 1] == 0).all()
    expected = 2 * (tensor(PREDICTION) - tensor(TARGET)).detach()[0, 0] / (4 * 3)
    assert torch.allclose(prediction.grad[0, 0], expected, atol=1e-15)


def test_masked_pixels_do_not_reach_the_prediction() -> None:
    method, batch = make_mae(), make_batch()
    keep, mask = random_mask(batch.keys("mask"), 9, 0.6)
    images = batch.views[0].clone().requires_grad_()
    method.predict(images, keep).sum().backward()
    assert images.grad is not None
    reached = patchify(images.grad, 4).abs().sum(-1) > 0
    assert torch.equal(reached, ~mask)


def test_prediction_ignores_the_order_of_visible_patches() -> None:
    method, batch = make_mae(), make_batch()
    keep, _ = random_mask(batch.keys("mask"), 9, 0.6)
    # the same float64 sums in another order
    assert torch.allclose(
        method.predict(batch.views[0], keep), method.predict(batch.views[0], keep.flip(1)), atol=1e-12
    )


def test_loss_is_the_mean_of_the_images_alone() -> None:
    method, batch = make_mae(), make_batch()
    alone = []
    for i in range(4):
        one = dataclasses.replace(batch, images=batch.images[i : i + 1], index=batch.index[i : i + 1])
        alone.append(method.loss((batch.views[0][i : i + 1],), one).total.item())
    assert method.loss(batch.views, batch).total.item() == pytest.approx(sum(alone) / 4, rel=1e-12)


def test_masks_change_with_the_epoch() -> None:
    method, batch = make_mae(), make_batch()
    same = method.loss(batch.views, batch).total
    assert torch.equal(method.loss(batch.views, batch).total, same)
    assert not torch.equal(method.loss(batch.views, dataclasses.replace(batch, epoch=1)).total, same)


def test_tokens_are_decayed_and_positions_are_constants() -> None:
    method = make_mae()
    names = {name for name, p in method.trainable_parameters() if p.ndim > 1}
    assert {"backbone.cls_token", "mask_token", "backbone.patch_embed.weight"} <= names  # as in the official code
    assert not any("position" in name for name, _ in method.named_parameters())
    assert not any("position" in key for key in method.state_dict())


@pytest.mark.parametrize("normalize", [True, False])
def test_reconstruction_shows_visible_pixels_and_the_prediction(normalize: bool) -> None:
    method, batch = make_mae(normalize_target=normalize), make_batch()
    _, mask = random_mask(batch.keys("mask"), 9, 0.6)
    original, masked, whole = method.reconstruct(batch.views, batch)
    assert original is batch.views[0]
    before, hidden, after = (patchify(x, 4) for x in (original, masked, whole))
    assert torch.equal(hidden[~mask], before[~mask])
    assert (hidden[mask] == 0).all()
    assert torch.equal(after[~mask], before[~mask])
    # the picture's error, measured in the target's units, is the loss
    scale = (before.var(-1, keepdim=True) + 1e-6).sqrt() if normalize else torch.ones_like(before[..., :1])
    error = ((after - before) / scale)[mask].square().mean()
    assert float(error) == pytest.approx(method.loss(batch.views, batch).total.item(), rel=1e-9)
    assert not whole.requires_grad


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask_ratio": 0.95}, "mask_ratio"),
        ({"decoder_width": 18}, "decoder_width"),
        ({"decoder_heads": 3}, "decoder_heads"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_mae(**arguments)


def test_convolutional_backbones_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind vit"):
        MAE(build_backbone("conv4", in_channels=1, image_size=28))


def test_paper_defaults() -> None:
    method = MAE(build_backbone("vit_micro", in_channels=3, image_size=32))
    assert method.mask_ratio == 0.75
    assert len(method.decoder) == 8
    assert method.decoder_embed.out_features == 512
    assert method.decoder[0].heads == 16
    assert method.normalize_target
