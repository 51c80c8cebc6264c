"""The pixel baseline is the image itself, row by row."""

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods import METHODS
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import build_backbone


def build(backbone):
    return build_method("raw_pixels", backbone, seed=0, facts={}, arguments={})


def test_embedding_is_the_flattened_image():
    backbone = build_backbone("pixels", in_channels=2, image_size=3)
    method = build(backbone)
    images = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    rows = [[float(x) for channel in image for row in channel for x in row] for image in images]
    assert backbone.embed_dim == 18
    assert torch.equal(method.embed(images), torch.tensor(rows))
    assert torch.equal(backbone.feature_map(images), images)
    assert list(method.parameters()) == []


def test_it_brings_its_own_backbone_and_refuses_others():
    assert METHODS.get("raw_pixels").fixed_backbone == "pixels"
    assert not METHODS.get("raw_pixels").trainable
    with pytest.raises(ConfigError, match="pixels"):
        build(build_backbone("conv4", in_channels=1, image_size=8))
