"""torchvision's ResNets, with the CIFAR stem for small images."""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor, nn

from ssl_bench.nn.backbone import Backbone, register_backbone


class ResNet(Backbone):
    """A torchvision ResNet without its classifier.

    Images of at most 64 px get a 3x3 stride-1 padding-1 stem, and at most 32 px no max-pool either
    (SimCLR, appendix B.9 of arXiv 2002.05709); solo-learn's CIFAR stem pads 2, ours pads 1.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels.
        zero_init_residual: Start each residual block as the identity (Goyal et al. 2017).
    """

    model: str = "resnet18"

    def __init__(self, *, in_channels: int, image_size: int, zero_init_residual: bool = False) -> None:
        super().__init__()
        net = getattr(torchvision.models, self.model)(weights=None, zero_init_residual=zero_init_residual)
        if image_size <= 64:
            net.conv1 = nn.Conv2d(in_channels, 64, 3, stride=1, padding=1, bias=False)
        elif in_channels != 3:
            net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        if image_size <= 32:
            net.maxpool = nn.Identity()
        self.embed_dim = net.fc.in_features
        net.fc = nn.Identity()
        self.net = net

    def feature_map(self, images: Tensor) -> Tensor:
        """Output of the last stage, (B, C, H, W) -> (B, D, h, w)."""
        net = self.net
        x = net.maxpool(net.relu(net.bn1(net.conv1(images))))
        features: Tensor = net.layer4(net.layer3(net.layer2(net.layer1(x))))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Average-pooled features, (B, C, H, W) -> (B, D)."""
        return torch.flatten(self.net.avgpool(self.feature_map(images)), 1)


@register_backbone("resnet18", version=1)
class ResNet18(ResNet):
    """ResNet-18 of torchvision (512-d), CIFAR stem for small images."""


@register_backbone("resnet50", version=1)
class ResNet50(ResNet):
    """ResNet-50 of torchvision (2048-d), CIFAR stem for small images."""

    model = "resnet50"
