import itertools

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError, RegistryError
from ssl_bench.nn.backbone import BACKBONES, build_backbone

CASES = [
    ("conv4", 28, {}, "cnn", 512),
    ("conv4", 32, {"width": 4}, "cnn", 128),
    ("resnet18", 32, {}, "cnn", 512),
    ("scatnet", 32, {"orientations": 4, "num_blocks": 8}, "cnn", 2048),
    ("scatnet", 96, {"scales": 3, "orientations": 2, "num_blocks": 12}, "cnn", 2048),
    ("pixels", 8, {}, "pixels", 64),
    ("timm:resnet18", 32, {}, "cnn", 512),
    ("timm:mobilenetv3_small_050", 32, {}, "cnn", 1024),
    ("timm:vit_tiny_patch16_224", 32, {}, "vit", 192),
    ("timm:vit_tiny_patch16_224", 28, {"patch_size": 7}, "vit", 192),
    ("torchvision:resnet18", 32, {}, "cnn", 512),
    ("torchvision:mobilenet_v3_small", 32, {}, "cnn", 1024),
    ("torchvision:vit_b_16", 32, {}, "vit", 768),
]


@pytest.mark.parametrize(("name", "size", "arguments", "kind", "embed_dim"), CASES)
@pytest.mark.parametrize("channels", [1, 3])
def test_embedding_has_the_declared_width_for_any_channels(name, size, arguments, kind, embed_dim, channels):
    backbone = build_backbone(name, in_channels=channels, image_size=size, **arguments).eval()
    embedding = backbone(torch.randn(2, channels, size, size))
    width = embed_dim * channels if kind == "pixels" else embed_dim
    assert backbone.kind == kind
    assert embedding.shape == (2, width)
    assert backbone.embed_dim == width
    rebuilt = build_backbone(backbone.name, **backbone.arguments)
    assert {k: v.shape for k, v in rebuilt.state_dict().items()} == {
        k: v.shape for k, v in backbone.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("conv4", 28, (128, 4, 4)),
        ("resnet18", 32, (512, 4, 4)),
        ("scatnet", 28, (128, 7, 7)),
        ("pixels", 8, (3, 8, 8)),
        ("timm:resnet18", 64, (512, 2, 2)),
        ("timm:vit_tiny_patch16_224", 64, (192, 4, 4)),
        ("timm:swin_tiny_patch4_window7_224", 64, (768, 2, 2)),
    ],
)
def test_feature_map_is_channels_first(name, size, shape):
    backbone = build_backbone(name, in_channels=3, image_size=size).eval()
    assert backbone.feature_map(torch.randn(1, 3, size, size)).shape == (1, *shape)


def test_timm_tokens_keep_their_place_in_the_map():
    backbone = build_backbone("timm:vit_tiny_patch16_224", in_channels=1, image_size=48).eval()
    images = torch.randn(1, 1, 48, 48)
    tokens = backbone.net.forward_features(images)
    torch.testing.assert_close(backbone.feature_map(images)[0, :, 1, 2], tokens[0, 1 + 1 * 3 + 2])


def test_timm_embedding_is_what_its_classifier_would_see():
    backbone = build_backbone("timm:resnet18", in_channels=3, image_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(backbone(images), backbone.feature_map(images).mean((2, 3)))


def test_torchvision_embedding_is_the_input_of_the_removed_classifier():
    import torchvision

    torch.manual_seed(0)
    reference = torchvision.models.resnet18(weights=None).eval()
    backbone = build_backbone("torchvision:resnet18", in_channels=3, image_size=64).eval()
    state = {f"net.{key}": value for key, value in reference.state_dict().items() if not key.startswith("fc.")}
    backbone.load_state_dict(state)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(reference.fc(backbone(images)), reference(images))


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pool"), [(28, 3, 1, nn.Identity), (32, 3, 1, nn.Identity), (64, 3, 1, nn.MaxPool2d),
                                           (96, 7, 2, nn.MaxPool2d)]
)  # fmt: skip
def test_resnet_stem_follows_the_image_size(size, kernel, stride, pool):
    backbone = build_backbone("resnet18", in_channels=3, image_size=size)
    stem = backbone.net.conv1
    assert (stem.kernel_size, stem.stride, stem.padding) == ((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2)
    assert isinstance(backbone.net.maxpool, pool)


def test_conv4_pools_a_quarter_of_the_map_into_each_cell():
    backbone = build_backbone("conv4", in_channels=1, image_size=28, width=2).eval()
    images = torch.randn(2, 1, 28, 28)
    cells = backbone.feature_map(images).unflatten(2, (2, 2)).unflatten(4, (2, 2)).mean((3, 5))
    torch.testing.assert_close(backbone(images), cells.flatten(1))


@pytest.mark.parametrize("prefix", ["timm", "torchvision"])
def test_unknown_models_name_the_nearest(prefix):
    with pytest.raises(RegistryError, match="resnet18"):
        build_backbone(f"{prefix}:resnet1", in_channels=3, image_size=32)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:vit_b_16"])
def test_vision_transformers_refuse_sizes_they_cannot_tile_or_were_not_built_for(name):
    with pytest.raises(ConfigError):
        build_backbone(name, in_channels=3, image_size=28)
    backbone = build_backbone(name, in_channels=3, image_size=32)
    backbone.check_image_size(32)
    with pytest.raises(ConfigError, match="built for"):
        backbone.check_image_size(16)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:vit_b_16"])
def test_patch_embedding_can_be_frozen(name):
    backbone = build_backbone(name, in_channels=3, image_size=32)
    backbone.freeze_patch_embedding()
    frozen = {key for key, p in backbone.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("patch_embed" in key or "conv_proj" in key for key in frozen)


def test_torchvision_models_without_a_single_classifier_are_refused():
    with pytest.raises(ConfigError, match="linear classifier"):
        build_backbone("torchvision:squeezenet1_0", in_channels=3, image_size=64)


def test_wrong_arguments_name_the_backbone():
    with pytest.raises(ConfigError, match="conv4"):
        build_backbone("conv4", in_channels=1, image_size=28, depth=3)


@pytest.mark.parametrize("name", BACKBONES.names())
def test_every_backbone_documents_itself(name):
    assert BACKBONES.entry(name).summary


@pytest.mark.parametrize(
    ("num_blocks", "widths"),
    [
        (8, [32] + [64] * 4 + [128] * 4),
        (12, [256] + [128] * 4 + [64] * 4 + [128] * 4),
        (16, [256] + [128] * 6 + [64] * 4 + [128] * 6),
        (30, [256] + [128] * 30),
        (45, [256] + [128] * 15 + [64] * 15 + [128] * 15),
    ],
)
def test_scatnet_adapters(num_blocks, widths):
    backbone = build_backbone("scatnet", in_channels=3, image_size=32, orientations=2, num_blocks=num_blocks)
    convolution, blocks = backbone.adapter[0], backbone.adapter[3:]
    assert convolution.in_channels == 3 * (1 + 4 + 4)
    assert [convolution.out_channels] + [block.residual[0].out_channels for block in blocks] == widths
    shortcuts = [not isinstance(block.shortcut, nn.Identity) for block in blocks]
    assert shortcuts == [a != b for a, b in itertools.pairwise(widths)]


def test_scatnet_takes_the_published_defaults_and_one_size():
    backbone = build_backbone("scatnet", in_channels=3, image_size=32)
    assert backbone.adapter[0].in_channels == 867
    assert len(backbone.adapter) == 3 + 30
    with pytest.raises(ConfigError, match=r"built for, 32 px, got views of 14\."):
        backbone.check_image_size(14)
    with pytest.raises(ConfigError, match="one of 8, 12, 16, 30, 45, got 10"):
        build_backbone("scatnet", in_channels=3, image_size=32, num_blocks=10)
