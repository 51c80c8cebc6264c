"""The vision transformer that every method shares."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ssl_bench.errors import ConfigError
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.nn.backbones.vit import ViT, require_vit
from ssl_bench.nn.positions import axis_code, grid_code
from ssl_bench.nn.transformer import Block


def vit(name: str = "vit_micro", image_size: int = 28, channels: int = 1, **arguments: Any) -> ViT:
    torch.manual_seed(0)
    backbone = build_backbone(name, in_channels=channels, image_size=image_size, **arguments)
    assert isinstance(backbone, ViT)
    return backbone.double().eval()


def images(num: int = 3, size: int = 28, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, channels, size, size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "width", "depth", "heads"),
    [("vit_micro", 96, 4, 3), ("vit_tiny", 192, 12, 3), ("vit_small", 384, 12, 6), ("vit_base", 768, 12, 12)],
)
def test_sizes(name: str, width: int, depth: int, heads: int) -> None:
    with torch.device("meta"):
        backbone = build_backbone(name, in_channels=3, image_size=224)
    assert isinstance(backbone, ViT)
    assert (backbone.embed_dim, len(backbone.blocks), backbone.heads, backbone.patch_size) == (width, depth, heads, 16)
    # per block: 12 D^2 + 13 D; patch embedding, class token and final norm besides
    count = depth * (12 * width**2 + 13 * width) + 3 * 16**2 * width + width + width + 2 * width
    assert sum(p.numel() for p in backbone.parameters()) == count


@pytest.mark.parametrize(("image_size", "patch_size"), [(28, 4), (32, 4), (64, 4), (96, 16), (224, 16)])
def test_default_patch_size(image_size: int, patch_size: int) -> None:
    assert vit(image_size=image_size).patch_size == patch_size


def test_shapes() -> None:
    backbone = vit(channels=3)
    x = images(channels=3)
    assert backbone.num_patches == 49
    assert backbone(x).shape == (3, 96)
    assert backbone.forward_tokens(x).shape == (3, 50, 96)
    assert backbone.feature_map(x).shape == (3, 96, 7, 7)
    assert [m.shape for m in backbone.attention_maps(x)] == [(3, 3, 50, 50)] * 4


def test_feature_map_is_row_major() -> None:
    backbone = vit()
    tokens, feature_map = backbone.forward_tokens(images()), backbone.feature_map(images())
    for row in range(7):
        for column in range(7):
            assert torch.equal(feature_map[:, :, row, column], tokens[:, 1 + 7 * row + column])


def test_patch_tokens_equal_a_linear_map_of_each_patch() -> None:
    backbone = vit(channels=3)
    x = images(channels=3)
    weight, bias = backbone.patch_embed.weight.detach().numpy(), backbone.patch_embed.bias.detach().numpy()
    tokens = backbone.patch_tokens(x).detach().numpy()
    for row in range(7):
        for column in range(7):
            patch = x.numpy()[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            # sums of 48 products of numbers near 1 in float64
            np.testing.assert_allclose(
                tokens[:, 7 * row + column], np.einsum("bcij,dcij->bd", patch, weight) + bias, atol=1e-12
            )


def test_pool() -> None:
    x = images()
    cls, mean = vit(pool="cls"), vit(pool="mean")
    tokens = cls.forward_tokens(x)
    assert torch.equal(cls(x), tokens[:, 0])
    assert torch.equal(mean(x), tokens[:, 1:].mean(1))


def test_keeping_every_patch_equals_the_whole_image() -> None:
    backbone = vit()
    keep = torch.arange(49).expand(3, -1)
    assert torch.equal(backbone.forward_tokens(images(), keep=keep), backbone.forward_tokens(images()))


def test_dropped_patches_do_not_matter_and_order_follows_keep() -> None:
    backbone, x = vit(), images()
    keep = torch.tensor([[0, 5, 48], [1, 2, 3], [46, 7, 30]])
    tokens = backbone.forward_tokens(x, keep=keep)
    changed = x.clone()
    changed[0, :, 4:8, 4:8] += 100  # patch 8, which no image keeps
    assert torch.equal(backbone.forward_tokens(changed, keep=keep), tokens)
    changed[0, :, 0:4, 0:4] += 100  # patch 0
    assert not torch.allclose(backbone.forward_tokens(changed, keep=keep)[0], tokens[0])
    flipped = backbone.forward_tokens(x, keep=keep.flip(1))
    # attention sums three keys in another order: a few units of float64
    assert torch.allclose(flipped[:, 1:].flip(1), tokens[:, 1:], atol=1e-12, rtol=0)


def test_mask_token_replaces_content_but_not_position() -> None:
    backbone, x = vit(), images()
    token = torch.linspace(-1, 1, 96, dtype=torch.float64)
    mask = torch.zeros(3, 49, dtype=torch.bool)
    mask[:, [8, 9]] = True
    prepared = backbone.prepare(x, mask=mask, mask_token=token)
    code = grid_code(96, (7, 7), (7, 7)).double()
    assert torch.allclose(prepared[:, 1 + 8], token + code[8], atol=1e-12)
    assert torch.equal(prepared[:, 1 + 10], backbone.prepare(x)[:, 1 + 10])
    changed = x.clone()
    changed[:, :, 4:8, 4:8] += 100  # patch 8
    assert torch.equal(
        backbone.forward_tokens(changed, mask=mask, mask_token=token),
        backbone.forward_tokens(x, mask=mask, mask_token=token),
    )
    none = torch.zeros_like(mask)
    assert torch.equal(backbone.forward_tokens(x, mask=none, mask_token=token), backbone.forward_tokens(x))


def test_mask_token_receives_the_gradient_of_masked_places_only() -> None:
    backbone = vit()
    token = torch.zeros(1, 1, 96, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(3, 49, dtype=torch.bool)
    mask[1, 4] = True
    prepared = backbone.prepare(images(), mask=mask, mask_token=token)
    (gradient,) = torch.autograd.grad(prepared.sum(), token)
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_attention_maps_are_what_the_blocks_use() -> None:
    backbone, x = vit(), images()
    maps = backbone.attention_maps(x)
    stream = backbone.prepare(x)
    for block, attention in zip(backbone.blocks, maps, strict=True):
        assert isinstance(block, Block)
        # softmax rows of 50 terms: rounding of 50 units of float64
        assert (attention.sum(-1) - 1).abs().max() < 1e-13
        values = block.qkv(block.norm1(stream))[..., 2 * 96 :].unflatten(2, (3, 32)).transpose(1, 2)
        mixed = stream + block.proj((attention @ values).transpose(1, 2).flatten(2))
        expected = mixed + block.mlp(block.norm2(mixed))
        stream = block(stream)
        assert torch.allclose(stream, expected, atol=1e-11, rtol=0)  # two orders of the same float64 sums


def test_embeddings_do_not_depend_on_batch_mates() -> None:
    backbone, x = vit(), images()
    for i in range(3):
        # other batch shapes may take other matrix kernels: float64 sums in another order
        assert torch.allclose(backbone(x[i : i + 1]), backbone(x)[i : i + 1], atol=1e-12, rtol=0)


def test_axis_code_by_hand() -> None:
    # w = (1, 0.01) for width 4: [sin 1, sin .01, cos 1, cos .01]
    expected = [0.841470984808, 0.009999833334, 0.540302305868, 0.999950000417]
    assert torch.allclose(axis_code(torch.tensor([1.0]), 4)[0], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_grid_code_first_half_is_the_column() -> None:
    code = grid_code(8, (2, 2), (2, 2))
    one = torch.tensor([0.841470984808, 0.009999833334, 0.540302305868, 0.999950000417, 0, 0, 1, 1])
    assert torch.allclose(code[1], one, atol=1e-7)  # float32
    assert torch.allclose(code[2], one.roll(4), atol=1e-7)


def test_positions_of_another_grid_share_the_coordinates() -> None:
    # 3 patches over 6: centers at 0.5, 2.5, 4.5 of the reference grid
    code = grid_code(8, (3, 3), (6, 6))
    expected = axis_code(torch.tensor([0.5, 2.5, 4.5]), 4).float()
    assert torch.equal(code[:3, :4], expected)
    assert torch.equal(code[::3, 4:], expected)


@pytest.mark.parametrize("position_code", ["fixed", "learned"])
@pytest.mark.parametrize("size", [12, 16, 28, 40])
def test_other_image_sizes_run(position_code: str, size: int) -> None:
    backbone = vit(position_code=position_code)
    assert backbone.forward_tokens(images(size=size)).shape == (3, 1 + (size // 4) ** 2, 96)


def test_rectangular_images_run() -> None:
    assert vit().feature_map(images()[:, :, :12]).shape == (3, 96, 3, 7)


def test_learned_positions() -> None:
    backbone = vit(position_code="learned")
    assert backbone.position_embed is not None
    assert torch.equal(backbone.positions((7, 7)), backbone.position_embed[0])
    with torch.no_grad():  # bicubic weights sum to one, and reproduce a line away from the border
        rows = torch.arange(7, dtype=torch.float64).repeat_interleave(7)
        backbone.position_embed[0] = rows[:, None]
    stretched = backbone.positions((14, 14)).unflatten(0, (14, 14))
    expected = (torch.arange(14, dtype=torch.float64) + 0.5) / 2 - 0.5
    assert torch.allclose(stretched[4:10, 0, 0], expected[4:10], atol=1e-12)
    assert torch.allclose(stretched[:, 0], stretched[:, 13], atol=1e-12)
    backbone(images(size=12)).sum().backward()
    assert backbone.position_embed.grad is not None
    assert backbone.position_embed.grad.abs().sum() > 0


def test_fixed_positions_are_no_state() -> None:
    backbone = vit()
    before = set(backbone.state_dict())
    backbone(images())
    assert set(backbone.state_dict()) == before
    assert not any("position" in key for key in before)
    assert torch.equal(copy.deepcopy(backbone)(images()), backbone(images()))
    single = copy.deepcopy(backbone).float()  # the codes follow the precision of the weights
    assert single(images().float()).dtype == torch.float32


def test_residual_stream_stays_float32_under_autocast() -> None:
    backbone = vit().float()
    dtypes = []
    for block in backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        backbone(images().float())
    assert dtypes == [torch.float32] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image_size": 30}, "patch_size"),
        ({"patch_size": 5}, "patch_size"),
        ({"pool": "max"}, "pool.*cls, mean.*'max'"),
        ({"position_code": "none"}, "position_code.*fixed, learned.*'none'"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vit(**arguments)


def test_images_that_patches_do_not_tile_are_refused() -> None:
    with pytest.raises(ConfigError, match="local_size"):
        vit()(images(size=14))


def test_frozen_patch_embedding() -> None:
    backbone = vit()
    backbone.freeze_patch_embedding()
    backbone(images()).sum().backward()
    assert backbone.patch_embed.weight.grad is None
    assert backbone.cls_token.grad is not None


def test_without_a_class_token() -> None:
    backbone, x = vit(class_token=False, pool="mean"), images()
    assert "cls_token" not in backbone.state_dict()
    tokens = backbone.forward_tokens(x)
    assert tokens.shape == (3, 49, 96)
    assert torch.equal(backbone(x), tokens.mean(1))
    assert torch.equal(backbone.feature_map(x)[:, :, 1, 2], tokens[:, 9])
    assert torch.equal(tokens, backbone.encode(backbone.patch_tokens(x) + grid_code(96, (7, 7), (7, 7)).double()))
    with pytest.raises(ConfigError, match="pool"):
        vit(class_token=False)


def test_a_dropped_class_token_stays_away_when_rebuilt() -> None:
    backbone = vit()
    backbone.drop_class_token()
    rebuilt = build_backbone(backbone.name, **backbone.arguments).double()
    rebuilt.load_state_dict(backbone.state_dict())
    assert torch.equal(rebuilt(images()), backbone(images()))
    assert torch.equal(backbone(images()), vit(class_token=False, pool="mean")(images()))
    with pytest.raises(ConfigError, match="class_token"):
        require_vit(backbone, "MAE")
    assert require_vit(backbone, "I-JEPA", class_token=False) is backbone


def test_invalid_tokens_are_attended_by_none() -> None:
    backbone, x = vit(), images()
    keep = torch.tensor([[0, 5, 48, 1], [1, 2, 3, 9], [46, 7, 30, 20]])
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[1, 3:] = False
    tokens = backbone.encode(backbone.prepare(x, keep=keep), valid)
    # the same float64 sums beside terms of exactly zero
    close = {"atol": 1e-12, "rtol": 0}
    assert torch.allclose(tokens[[0, 2]], backbone.forward_tokens(x[[0, 2]], keep=keep[[0, 2]]), **close)
    assert torch.allclose(tokens[1:2, :3], backbone.forward_tokens(x[1:2], keep=keep[1:2, :2]), **close)


@pytest.mark.slow
def test_equals_timm() -> None:
    timm = pytest.importorskip("timm.models.vision_transformer")
    ours = vit()
    theirs: nn.Module = timm.VisionTransformer(
        img_size=28, patch_size=4, in_chans=1, num_classes=0, embed_dim=96, depth=4, num_heads=3
    )
    names = {"mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2", "patch_embed": "patch_embed.proj"}
    state = {}
    for key, value in ours.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)
        state[key.replace(".qkv", ".attn.qkv")] = value
    for block in range(4):
        for part in ("weight", "bias"):
            state[f"blocks.{block}.attn.proj.{part}"] = state.pop(f"blocks.{block}.proj.{part}")
    code = grid_code(96, (7, 7), (7, 7)).double()
    state["pos_embed"] = torch.cat([torch.zeros(1, 96, dtype=torch.float64), code])[None]
    theirs.double().load_state_dict(state)
    theirs.eval()
    # the same float64 sums, in another order
    assert torch.allclose(ours.forward_tokens(images()), theirs.forward_features(images()), atol=1e-11, rtol=0)
