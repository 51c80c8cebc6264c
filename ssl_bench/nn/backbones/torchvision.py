"""Any classification model of torchvision, by name, without its last linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from ssl_bench.errors import ConfigError, RegistryError, did_you_mean
from ssl_bench.nn.backbone import Backbone, register_backbone


@register_backbone("torchvision", version=1)
class Torchvision(Backbone):
    """A torchvision classifier whose last linear layer is removed: the embedding is that layer's input.

    The stem stays torchvision's own; `resnet18` and `resnet50` have the stem for small images.

    Args:
        in_channels: Image channels. Other than 3, the first convolution is drawn anew, or, with `pretrained`
            and one channel, its weights are summed over the colors.
        image_size: Side of the images in pixels.
        model: torchvision's name, such as "regnet_y_400mf" or "vit_b_16".
        pretrained: Start from torchvision's default published weights (downloads them).
    """

    net: Any

    def __init__(self, *, in_channels: int, image_size: int, model: str, pretrained: bool = False) -> None:
        super().__init__()
        names = torchvision.models.list_models(module=torchvision.models)
        if model not in names:
            raise RegistryError(f"Unknown torchvision model {model!r}.{did_you_mean(model, names)}")
        vit = model.startswith("vit_")
        arguments = {"image_size": image_size} if vit else {}
        try:
            net = torchvision.models.get_model(model, weights="DEFAULT" if pretrained else None, **arguments)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"torchvision cannot build {model!r} for {image_size} px: {error}.") from error
        linears = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        if not linears or any(name.lower().startswith("aux") for name, _ in net.named_children()):
            raise ConfigError(
                f"The torchvision model {model!r} must end in one linear classifier, but it has none or several. "
                "Choose another backbone."
            )
        name, classifier = linears[-1]
        net.set_submodule(name, nn.Identity())
        self.embed_dim = classifier.in_features
        if in_channels != 3:
            _adapt_stem(net, in_channels, pretrained)
        self.fixed_size = image_size if vit else None
        if isinstance(net, VisionTransformer):
            self.kind = "vit"
        self.net = net

    def check_image_size(self, image_size: int) -> None:
        """Refuse a size that a vision transformer was not built for."""
        if self.fixed_size not in (None, image_size):
            raise ConfigError(
                f"torchvision's ViT takes only the {self.fixed_size} px it was built for, got {image_size}. Choose "
                "another backbone, or views of one size."
            )

    def freeze_patch_embedding(self) -> None:
        """Keep the random patch projection of a ViT fixed (MoCo v3)."""
        self.net.conv_proj.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings, (B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.net(images)
        return embedding


def _adapt_stem(net: nn.Module, in_channels: int, pretrained: bool) -> None:
    name, old = next((name, module) for name, module in net.named_modules() if isinstance(module, nn.Conv2d))
    if pretrained and in_channels != 1:
        raise ConfigError(f"Pretrained torchvision models take 1 or 3 channels, got {in_channels}. Train from scratch.")
    new = nn.Conv2d(
        in_channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    with torch.no_grad():
        if pretrained:
            new.weight.copy_(old.weight.sum(1, keepdim=True))
        else:
            nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        if new.bias is not None and old.bias is not None:
            new.bias.copy_(old.bias)
    net.set_submodule(name, new)
