"""A small convolutional network for CPU-sized studies."""

from __future__ import annotations

from torch import Tensor, nn

from ssl_bench.nn.backbone import Backbone, register_backbone


@register_backbone("conv4", version=1)
class Conv4(Backbone):
    """Four 3x3 convolution blocks (convolution, batch norm, ReLU); 2x2 average pool; 512-d at width 16.

    The first three blocks halve the image, so that 28 px end in 4x4 maps.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels, at least 8.
        width: Channels of the first block; each next one doubles.
    """

    def __init__(self, *, in_channels: int, image_size: int, width: int = 16) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = in_channels
        for depth in range(4):
            out = width * 2**depth
            blocks += [
                nn.Conv2d(channels, out, 3, stride=2 if depth < 3 else 1, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
            ]
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.embed_dim = channels * 4

    def feature_map(self, images: Tensor) -> Tensor:
        """Output of the last block, (B, C, H, W) -> (B, 8 width, ceil(H / 8), ceil(W / 8))."""
        features: Tensor = self.blocks(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features, (B, C, H, W) -> (B, 32 width)."""
        return self.pool(self.feature_map(images)).flatten(1)  # type: ignore[no-any-return]
