"""The contract of a backbone: images (B, C, H, W) -> embedding (B, D), with enough kept to rebuild it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ssl_bench.errors import ConfigError
from ssl_bench.registry import Entry, Registry

BACKBONES: Registry[type[Backbone]] = Registry("backbone", "ssl_bench.nn.backbones")
register_backbone = BACKBONES.register


class Backbone(nn.Module):
    """A network whose output is the embedding that is kept and evaluated.

    Subclasses set `embed_dim`, and take keyword arguments `in_channels` and `image_size` (pixels, the
    side of the square images it is built for) before their own.

    Attributes:
        name: Registry name.
        kind: "cnn" or "vit" ("pixels" for the baseline without a network).
        embed_dim: Width D of the embedding.
        arguments: Everything `build_backbone` needs to build it again.
    """

    registry_entry: ClassVar[Entry]
    kind: str = "cnn"
    embed_dim: int

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.arguments: dict[str, Any] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings, (B, C, H, W) -> (B, D)."""
        raise NotImplementedError

    def check_image_size(self, image_size: int) -> None:
        """Raise ConfigError if the network cannot take square images of this size; any size by default."""

    def feature_map(self, images: Tensor) -> Tensor:
        """Last spatial features, (B, C, H, W) -> (B, F, h, w): patch tokens of a ViT, last stage of a CNN."""
        raise NotImplementedError(f"{type(self).__name__} has no spatial features.")


def build_backbone(name: str, *, in_channels: int, image_size: int, **arguments: Any) -> Backbone:
    """Build a backbone by registry name; "timm:NAME" and "torchvision:NAME" reach those libraries.

    Raises:
        RegistryError: If the name is unknown.
        ConfigError: If an argument does not fit the backbone.
    """
    if ":" in name:
        name, model = name.split(":", 1)
        arguments = {"model": model, **arguments}
    cls = BACKBONES.get(name)
    try:
        backbone = cls(in_channels=in_channels, image_size=image_size, **arguments)  # type: ignore[call-arg]
    except TypeError as error:
        raise ConfigError(f"Backbone {name!r} does not take these arguments: {error}. Given: {arguments}.") from error
    backbone.name = BACKBONES.entry(name).name
    backbone.arguments = {"in_channels": in_channels, "image_size": image_size, **arguments}
    return backbone
