"""Latent MIM against encoders, decoder and loss in numpy loops, and values by hand (Wei et al. 2024, sec. 3)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_bench.errors import ConfigError
from ssl_bench.methods.latent_mim import LatentMIM, mean_similarity, patch_contrast
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.nn.masking import random_mask
from ssl_bench.random import integers
from ssl_bench.records import Batch
from tests.reference.transformer import (
    attention,
    code_2d,
    embed_patches,
    encode,
    gelu,
    layer_norm,
    mlp,
    state_of,
)

ROWS = [[1, 0], [0, 1], [1, 1]]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make(**arguments: Any) -> LatentMIM:
    torch.manual_seed(0)
    backbone = build_backbone("vit_micro", in_channels=2, image_size=12, patch_size=4)
    settings = {"mask_ratio": 0.6, "gap": 1, "head_dim": 24, "decoder_width": 16, "decoder_depth": 2}
    return LatentMIM(backbone, **{**settings, "decoder_heads": 2, **arguments}).double()


def make_batch(num: int = 3, epoch: int = 0) -> Batch:
    views = torch.randn(num, 2, 12, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    images = torch.zeros(num, 2, 12, 12, dtype=torch.uint8)
    return Batch(images=images, index=torch.arange(num), epoch=epoch, seed=1, views=(views,))


# ---- the oracle ---------------------------------------------------------------------------------


def contrast(prediction: np.ndarray, target: np.ndarray, temperature: float, standardize: bool = True) -> float:
    num = len(prediction)
    if standardize:
        mean = sum(prediction) / num
        deviation = np.sqrt(sum((p - mean) ** 2 for p in prediction) / (num - 1))
        prediction = np.array([(p - mean) / (deviation + 1e-4) for p in prediction])
    total = 0.0
    for i, p in enumerate(prediction):
        scores = [p @ t / math.sqrt(p @ p) / math.sqrt(t @ t) / temperature for t in target]
        total += math.log(sum(math.exp(s) for s in scores)) - scores[i]
    return 2 * temperature * total / num


def similarity(tokens: np.ndarray) -> float:
    cosines = [a @ b / math.sqrt((a @ a) * (b @ b)) for a in tokens for b in tokens]
    return sum(cosines) / len(cosines)


def head(x: np.ndarray, state: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    for layer in (0, 3, 6):
        x = state[f"{prefix}.{layer}.weight"] @ x
        weight, bias = state[f"{prefix}.{layer + 1}.weight"], state[f"{prefix}.{layer + 1}.bias"]
        x = (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weight + bias
        x = gelu(x) if layer < 6 else x
    return x


def decode(known: list[np.ndarray], keep: list[int], masked: list[int], state: dict[str, np.ndarray]) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, state[f"decoder.{name}.weight"], state[f"decoder.{name}.bias"])

    known = [state["decoder.embed.weight"] @ x + state["decoder.embed.bias"] for x in known]
    width = len(known[0])
    seen = [code_2d(*divmod(i, 3), width) for i in keep]
    queries = [state["decoder.cls_token"][0, 0]]
    for place in masked:
        code = code_2d(*divmod(place, 3), width)
        shares = np.array([math.exp(code @ other / math.sqrt(width)) for other in seen])
        shares /= shares.sum()
        near = sum(s * x for s, x in zip(shares, known[1:], strict=True))
        queries.append(state["decoder.mask_token"][0, 0] + near + code)
    memory = [known[0]] + [x + code for x, code in zip(known[1:], seen, strict=True)]
    for b in range(2):
        name = f"blocks.{b}"
        normed = [norm(x, f"{name}.block.norm1") for x in queries]
        qkv = [state[f"decoder.{name}.block.qkv.weight"] @ x + state[f"decoder.{name}.block.qkv.bias"] for x in normed]
        mixed = attention(*zip(*(np.split(x, 3) for x in qkv), strict=True), heads=2)
        weight, bias = state[f"decoder.{name}.block.proj.weight"], state[f"decoder.{name}.block.proj.bias"]
        queries = [x + weight @ m + bias for x, m in zip(queries, mixed, strict=True)]
        asked = [
            state[f"decoder.{name}.query.weight"] @ norm(x, f"{name}.norm_query") + state[f"decoder.{name}.query.bias"]
            for x in queries
        ]
        kv = [
            state[f"decoder.{name}.key_value.weight"] @ norm(x, f"{name}.norm_memory")
            + state[f"decoder.{name}.key_value.bias"]
            for x in memory
        ]
        mixed = attention(asked, *zip(*(np.split(x, 2) for x in kv), strict=True), heads=2)
        weight, bias = state[f"decoder.{name}.proj.weight"], state[f"decoder.{name}.proj.bias"]
        queries = [x + weight @ m + bias for x, m in zip(queries, mixed, strict=True)]
        queries = [mlp(x, state, f"decoder.{name}.block") for x in queries]
    return np.array([state["decoder.head.weight"] @ norm(x, "norm") + state["decoder.head.bias"] for x in queries[1:]])


def oracle(method: LatentMIM, images: np.ndarray, keeps: list[list[int]], wanted: float) -> float:
    state = state_of(method)
    contrasts, predicted, visible = [], [], []
    for image, keep in zip(images, keeps, strict=True):

        def latents(prefix: str, head_prefix: str, places: list[int], image: np.ndarray = image) -> list[np.ndarray]:
            embedded = embed_patches(image, state, prefix, 4)
            tokens = [state[f"{prefix}.cls_token"][0, 0]]
            tokens += [embedded[i] + code_2d(*divmod(i, 3), 96) for i in places]
            return [head(x, state, head_prefix) for x in encode(tokens, state, prefix, heads=3)]

        masked = [i for i in range(9) if i not in keep]
        known = latents("backbone", "head", keep)
        prediction = decode(known, keep, masked, state)
        target = np.array(latents("target.module.0", "target.module.1", masked)[1:])
        contrasts.append(contrast(prediction, target, method.temperature))
        predicted.append(similarity(prediction))
        visible.append(similarity(np.array(known[1:])))
    diversity = (np.mean(predicted) - wanted) ** 2 + (np.mean(visible) - wanted) ** 2
    return float(np.mean(contrasts) + method.diversity_weight * diversity)


@pytest.mark.parametrize("arguments", [{}, {"diversity_weight": 1.0, "temperature": 0.5}])
def test_loss_equals_the_oracle(arguments: dict[str, Any]) -> None:
    method, batch = make(**arguments), make_batch()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # no zeros, and a target of its own
    method.wanted.fill_(0.6)
    keys = batch.keys("mask")
    keep, _ = random_mask(keys, 9, 0.6)
    images = method.cut_patches(batch.views[0], keys).numpy()
    # float64 throughout, but the package stores position codes in float32: relative 2^-24 on the inputs, which
    # eight blocks and two heads amplify by far less than 100
    assert method.loss(batch.views, batch).total.item() == pytest.approx(
        oracle(method, images, keep.tolist(), 0.6), rel=1e-6
    )


# ---- values computed by hand --------------------------------------------------------------------


def test_contrast_by_hand() -> None:
    rows = tensor([ROWS])
    assert float(patch_contrast(rows, rows, 0.2)) == pytest.approx(0.0567960405, abs=1e-9)
    assert contrast(np.array(ROWS, float), np.array(ROWS, float), 0.2) == pytest.approx(0.0567960405, abs=1e-9)
    plain = contrast(np.array(ROWS, float), np.array(ROWS, float), 0.2, standardize=False)
    assert plain == pytest.approx(0.1075969589, abs=1e-9)


@pytest.mark.parametrize(("num", "value"), [(3, 0.4394449155), (176, 2.0681935980)])
def test_contrast_of_equal_targets(num: int, value: float) -> None:
    prediction = torch.randn(1, num, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.ones(1, num, 5, dtype=torch.float64)
    assert float(patch_contrast(prediction, target, 0.2)) == pytest.approx(value, abs=1e-9)  # 2 t ln n


def test_similarity_by_hand() -> None:
    value = float(mean_similarity(tensor([ROWS])))
    assert value == pytest.approx(0.6476030139, abs=1e-9)
    assert (value - 0.75) ** 2 == pytest.approx(0.0104851428, abs=1e-9)
    assert similarity(np.array(ROWS, float)) == pytest.approx(value, abs=1e-12)


def test_schedules() -> None:
    method, seen = make(), []
    method.target.update = lambda online, momentum: seen.append(momentum)  # type: ignore[method-assign]
    wanted = [float(method.wanted)]
    for step in range(1, 11):
        method.after_optimizer_step(step, 10)
        wanted.append(float(method.wanted))
    assert (wanted[0], wanted[5], wanted[10]) == pytest.approx((0.75, 0.5, 0.25), abs=1e-12)
    assert (seen[4], seen[9]) == pytest.approx((0.995, 1.0), abs=1e-12)
    assert seen[0] == pytest.approx(1 - 0.01 * (1 + math.cos(math.pi / 10)) / 2, abs=1e-12)


# ---- properties ---------------------------------------------------------------------------------


def test_contrast_ignores_shift_scale_and_joint_order() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(2, 7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    loss = patch_contrast(prediction, target, 0.2)
    order = torch.randperm(7, generator=generator)
    assert torch.allclose(patch_contrast(prediction[:, order], target[:, order], 0.2), loss, rtol=1e-12)
    scale = torch.rand(5, generator=generator, dtype=torch.float64) + 1
    # 1e-4 beside deviations above .4 changes scores of size 1 / .2 by less than 5 * 1e-3
    assert torch.allclose(patch_contrast(prediction * scale + 3, target, 0.2), loss, atol=5e-3)
    assert not torch.allclose(patch_contrast(prediction[:, order], target, 0.2), loss, atol=5e-3)


def test_without_diversity_the_loss_is_the_mean_of_the_images_alone() -> None:
    method, batch = make(diversity_weight=0.0), make_batch()
    alone = []
    for i in range(3):
        one = dataclasses.replace(batch, images=batch.images[i : i + 1], index=batch.index[i : i + 1])
        alone.append(method.loss((batch.views[0][i : i + 1],), one).total.item())
    assert method.loss(batch.views, batch).total.item() == pytest.approx(sum(alone) / 3, rel=1e-12)


@pytest.mark.parametrize(("image_size", "patch_size", "gap"), [(12, 4, 1), (12, 4, 3), (15, 5, 4), (12, 3, 2)])
def test_patches_are_cut_at_offsets_within_their_cells(image_size: int, patch_size: int, gap: int) -> None:
    backbone = build_backbone("vit_micro", in_channels=2, image_size=image_size, patch_size=patch_size)
    method = LatentMIM(backbone, mask_ratio=0.6, gap=gap, head_dim=4, decoder_width=8, decoder_heads=2)
    images = torch.randn(4, 2, image_size, image_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = make_batch(4).keys("mask")
    side, cell = image_size // patch_size, patch_size + gap
    offsets = integers(keys, 2 * side * side, "gap", gap).reshape(4, side, side, 2)
    assert offsets.max() == gap - 1
    large = F.interpolate(images, size=(side * cell, side * cell), mode="bicubic")
    cut = method.cut_patches(images, keys)
    assert cut.shape == images.shape
    p = patch_size
    for b in range(4):
        for r in range(side):
            for c in range(side):
                top, left = r * cell + int(offsets[b, r, c, 0]), c * cell + int(offsets[b, r, c, 1])
                patch = cut[b, :, r * p : r * p + p, c * p : c * p + p]
                assert torch.equal(patch, large[b, :, top : top + p, left : left + p])


def test_without_gap_the_image_is_unchanged() -> None:
    method, batch = make(gap=0), make_batch()
    assert method.cut_patches(batch.views[0], batch.keys("mask")) is batch.views[0]


def test_the_target_sees_masked_patches_only_and_the_encoder_visible_ones() -> None:
    method, batch = make(gap=0, diversity_weight=0.0), make_batch()
    keep, mask = random_mask(batch.keys("mask"), 9, 0.6)
    assert keep.shape == (3, 3)
    assert (mask.sum(1) == 6).all()
    images = batch.views[0].clone().requires_grad_()
    method.loss((images,), batch).total.backward()
    assert images.grad is not None
    reached = images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((1, 4, 5)).flatten(1) > 0
    assert torch.equal(reached, ~mask)
    assert all(p.grad is None and not p.requires_grad for p in method.target.parameters())
    calls = []
    vit = next(method.target.module.children())
    original = vit.forward_tokens
    vit.forward_tokens = lambda images, keep: calls.append(keep) or original(images, keep=keep)  # type: ignore
    method.loss(batch.views, batch)
    assert torch.equal(calls[0], (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :6])


def test_twenty_of_196_patches_stay_visible_by_default() -> None:
    with torch.device("meta"):
        method = LatentMIM(build_backbone("vit_base", in_channels=3, image_size=224))
    keep, mask = random_mask(make_batch().keys("mask"), 196, method.mask_ratio)
    assert keep.shape[1] == 20
    assert (mask.sum(1) == 176).all()
    assert (method.gap, method.temperature, len(method.decoder.blocks)) == (4, 0.2, 3)


def test_embeddings_are_not_decayed() -> None:
    plain, free = make().parameter_groups()
    assert {name for name, _ in free.parameters} == {
        "backbone.patch_embed.weight",
        "backbone.patch_embed.bias",
        "decoder.embed.weight",
        "decoder.embed.bias",
    }
    assert free.weight_decay == 0.0
    assert len(plain.parameters) + len(free.parameters) == len(make().trainable_parameters())


def test_the_target_follows_encoder_and_head() -> None:
    method = make(target_momentum=0.5)
    with torch.no_grad():
        method.backbone.norm.bias.fill_(1.0)
        method.head[7].bias.fill_(1.0)
    method.after_optimizer_step(5, 10)  # momentum .75
    vit, head_copy = method.target.module.children()
    for copied in (vit.norm.bias, head_copy[7].bias):
        assert torch.allclose(copied, torch.full((96,), 0.25, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask_ratio": 0.95}, "mask_ratio"),
        ({"mask_ratio": 0.1}, "mask_ratio"),
        ({"gap": -1}, "gap"),
        ({"decoder_width": 18}, "decoder_width"),
        ({"decoder_heads": 3}, "decoder_heads"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**arguments)


def test_convolutional_backbones_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind vit"):
        LatentMIM(build_backbone("conv4", in_channels=1, image_size=28))
