"""The images themselves: the baseline every learned embedding should beat."""

from __future__ import annotations

from torch import Tensor

from ssl_bench.nn.backbone import Backbone, register_backbone


@register_backbone("pixels", version=1)
class Pixels(Backbone):
    """Normalized pixels, flattened: no parameters.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels.
    """

    kind = "pixels"

    def __init__(self, *, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.embed_dim = in_channels * image_size**2

    def feature_map(self, images: Tensor) -> Tensor:
        """The images, unchanged."""
        return images

    def forward(self, images: Tensor) -> Tensor:
        """Flattened pixels, (B, C, H, W) -> (B, C H W)."""
        return images.flatten(1)
