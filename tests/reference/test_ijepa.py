"""I-JEPA against encoders and a predictor in numpy loops, and values computed by hand (Assran et al. 2023, sec. 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ssl_bench.errors import ConfigError
from ssl_bench.methods.ijepa import IJEPA, block_loss
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.records import Batch
from tests.reference.transformer import block, code_2d, embed_patches, encode, layer_norm, state_of

TOKENS = [[1, 2, 3, 6], [0, 0, 1, -1]]
NORMALIZED = [[-1.069043440446, -0.534521720223, 0, 1.603565160669], [0, 0, 1.414199420450, -1.414199420450]]
PREDICTION = [[0, 0, 0, 0], [1, 1, -1, 3]]


def make(image_size: int = 20, **arguments: Any) -> IJEPA:
    torch.manual_seed(0)
    backbone = build_backbone("vit_micro", in_channels=2, image_size=image_size, patch_size=4)
    return IJEPA(backbone, **{"predictor_width": 12, "predictor_depth": 2, **arguments}).double()


def make_batch(num: int = 3, size: int = 20, epoch: int = 0) -> Batch:
    views = torch.randn(num, 2, size, size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    images = torch.zeros(num, 2, size, size, dtype=torch.uint8)
    return Batch(images=images, index=torch.arange(num), epoch=epoch, seed=1, views=(views,))


def smooth_l1(error: np.ndarray) -> float:
    return sum(0.5 * e * e if abs(e) < 1 else abs(e) - 0.5 for e in error) / len(error)


def oracle(method: IJEPA, batch: Batch) -> float:
    """Every image by itself, without padding."""
    state = state_of(method)
    columns = method.backbone.grid[1]
    contexts, targets = (mask.numpy() for mask in method.masks(batch))
    losses = []
    for image, context, blocks in zip(batch.views[0].numpy(), contexts, targets, strict=True):

        def tokens(prefix: str, places: list[int], image: np.ndarray = image) -> list[np.ndarray]:
            embedded = embed_patches(image, state, prefix, 4)
            return encode([embedded[i] + code_2d(*divmod(i, columns), 96) for i in places], state, prefix, heads=3)

        known = [int(i) for i in np.flatnonzero(context)]
        weight, bias = state["predictor.embed.weight"], state["predictor.embed.bias"]
        width = len(bias)
        narrow = [
            weight @ x + bias + code_2d(*divmod(i, columns), width)
            for i, x in zip(known, tokens("backbone", known), strict=True)
        ]
        whole = tokens("target.module", list(range(len(context))))
        errors = []
        for mask in blocks:
            asked = [int(i) for i in np.flatnonzero(mask)]
            sequence = narrow + [
                state["predictor.mask_token"][0, 0] + code_2d(*divmod(i, columns), width) for i in asked
            ]
            for b in range(2):
                sequence = block(sequence, state, f"predictor.blocks.{b}", heads=3)
            for i, x in zip(asked, sequence[len(known) :], strict=True):
                normed = layer_norm(x, state["predictor.norm.weight"], state["predictor.norm.bias"])
                guess = state["predictor.head.weight"] @ normed + state["predictor.head.bias"]
                mean, variance = whole[i].mean(), whole[i].var()
                errors.append(smooth_l1(guess - (whole[i] - mean) / np.sqrt(variance + 1e-5)))
        losses.append(sum(errors) / len(errors))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("image_size", [20, 24])
def test_loss_equals_the_oracle(image_size: int) -> None:
    method, batch = make(image_size), make_batch(size=image_size)
    with torch.no_grad():
        for parameter in method.target.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)  # a target that is not the online encoder
    context = method.masks(batch)[0]
    assert len(set(context.sum(1).tolist())) > 1  # padding is needed
    # float64 throughout, but the package stores position codes in float32: relative 2^-24 on the inputs, which
    # six blocks amplify by far less than 100
    assert method.loss(batch.views, batch).total.item() == pytest.approx(oracle(method, batch), rel=1e-6)


def test_loss_by_hand() -> None:
    tokens = torch.tensor(TOKENS, dtype=torch.float64)
    target = F.layer_norm(tokens, (4,))
    assert torch.allclose(target, torch.tensor(NORMALIZED, dtype=torch.float64), rtol=0, atol=1e-11)
    prediction = torch.tensor(PREDICTION, dtype=torch.float64)
    valid = torch.tensor([[[True, True]]])
    loss = block_loss(prediction[None, None], target[None, None], valid)
    assert float(loss) == pytest.approx(1.0804830221, abs=1e-9)
    assert float(block_loss(target[None, None], target[None, None], valid)) == 0


def test_target_tokens_are_normalized_without_an_affine_map() -> None:
    method, batch = make(), make_batch()
    tokens = method.target_tokens(batch.views[0])
    assert tokens.mean(-1).abs().max() < 1e-12
    # variance v / (v + 1e-5) with v near 1 behind the encoder's own norm
    assert torch.allclose(tokens.var(-1, unbiased=False), torch.ones(3, 25, dtype=torch.float64), rtol=0, atol=2e-5)


def test_padding_does_not_count() -> None:
    prediction = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.zeros_like(prediction)
    valid = torch.ones(2, 3, 4, dtype=torch.bool)
    valid[1, :, 2:] = False
    loss = block_loss(prediction, target, valid)
    expected = [smooth_l1(prediction[0].numpy().ravel()), smooth_l1(prediction[1, :, :2].numpy().ravel())]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_loss_does_not_depend_on_batch_mates() -> None:
    method, batch = make(24), make_batch(5, size=24)
    alone = []
    for i in range(5):
        one = dataclasses.replace(batch, images=batch.images[i : i + 1], index=batch.index[i : i + 1])
        alone.append(method.loss((batch.views[0][i : i + 1],), one).total.item())
    assert method.loss(batch.views, batch).total.item() == pytest.approx(sum(alone) / 5, rel=1e-12)


def test_target_pixels_do_not_reach_the_prediction() -> None:
    method, batch = make(), make_batch()
    context, targets = method.masks(batch)
    assert not (context[:, None] & targets).any()
    images = batch.views[0].clone().requires_grad_()
    method.loss((images,), batch).total.backward()
    assert images.grad is not None
    reached = images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((1, 4, 5)).flatten(1) > 0
    assert torch.equal(reached, context)  # and the target encoder passes none back
    assert all(p.grad is None and not p.requires_grad for p in method.target.parameters())


def test_a_constant_target_is_matched_by_a_constant_prediction() -> None:
    """Collapse is a minimum: only the momentum target and the predictor stand against it."""
    method, batch = make(), make_batch()
    with torch.no_grad():
        method.target.module.norm.weight.zero_()
        method.target.module.norm.bias.copy_(torch.arange(96))
        method.predictor.head.weight.zero_()
        method.predictor.head.bias.copy_(F.layer_norm(torch.arange(96, dtype=torch.float64), (96,)))
    output = method.loss(batch.views, batch)
    assert output.total.item() < 1e-24
    assert output.terms["target_std"].item() < 1e-12


def test_momentum_rises_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    method, seen = make(), []
    monkeypatch.setattr(method.target, "update", lambda online, momentum: seen.append(momentum))
    for step in range(1, 12):
        method.after_optimizer_step(step, 10)
    assert seen[0] == pytest.approx(0.996, abs=1e-12)
    assert seen[5] == pytest.approx(0.998, abs=1e-12)  # half of the steps done before
    assert seen[10] == pytest.approx(1.0, abs=1e-12)


def test_the_target_follows_the_online_encoder() -> None:
    method = make(target_momentum=0.75)
    with torch.no_grad():
        method.backbone.norm.bias.fill_(1.0)
    method.after_optimizer_step(1, 10)
    assert torch.allclose(method.target.module.norm.bias, torch.full((96,), 0.25, dtype=torch.float64))


def test_the_target_encoder_is_evaluated_by_its_mean_token() -> None:
    method, batch = make(), make_batch()
    with torch.no_grad():
        method.target.module.norm.bias.fill_(3.0)
    tokens = method.evaluation_backbone.forward_tokens(batch.views[0])
    assert tokens.shape == (3, 25, 96)  # no class token
    assert torch.equal(method.embed(batch.views[0]), tokens.mean(1).detach())
    assert method.evaluation_backbone.arguments["class_token"] is False


def test_predictor_initialization() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("vit_micro", in_channels=1, image_size=28)
    predictor = IJEPA(backbone, predictor_width=384, predictor_depth=3).predictor
    for k, layer in enumerate(predictor.blocks, 1):
        # 384^2 entries or more: the standard deviation's relative error is below 1 / sqrt(2 * 384^2) = .002
        assert float(layer.proj.weight.detach().std()) == pytest.approx(0.02 / (2 * k) ** 0.5, rel=0.01)
        assert float(layer.mlp[2].weight.detach().std()) == pytest.approx(0.02 / (2 * k) ** 0.5, rel=0.01)
        assert float(layer.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"predictor_width": 14}, "predictor_width"),
        ({"predictor_width": 20}, "predictor_width"),
        ({"num_targets": 0}, "num_targets"),
        ({"num_targets": 7}, "num_targets"),
        ({"target_scale": (0.2, 0.15)}, "target_scale"),
        ({"target_scale": (0.9, 1.0)}, "num_targets"),
        ({"context_scale": (0.85, 1.2)}, "context_scale"),
        ({"target_aspect": (0.0, 1.5)}, "target_aspect"),
        ({"min_context": 0}, "min_context"),
        ({"min_context": 25}, "min_context"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**arguments)


def test_convolutional_backbones_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind vit"):
        IJEPA(build_backbone("conv4", in_channels=1, image_size=28))
