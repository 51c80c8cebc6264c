"""ScatSimCLR's encoder: a fixed wavelet scattering, then a trainable residual adapter."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.errors import ConfigError
from ssl_bench.nn.backbone import Backbone, register_backbone
from ssl_bench.nn.scattering import Scattering2d

# residual blocks -> channels of the first convolution, and (channels, blocks) of each stage
ADAPTERS: Mapping[int, tuple[int, tuple[tuple[int, int], ...]]] = {
    8: (32, ((64, 4), (128, 4))),
    12: (256, ((128, 4), (64, 4), (128, 4))),
    16: (256, ((128, 6), (64, 4), (128, 6))),
    30: (256, ((128, 30),)),
    45: (256, ((128, 15), (64, 15), (128, 15))),
}


def _convolution(in_channels: int, out_channels: int, side: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, side, padding=side // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    ]


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(in_channels, out_channels, 3),
            nn.ReLU(inplace=True),
            *_convolution(out_channels, out_channels, 3),
        )
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(in_channels, out_channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


@register_backbone("scatnet", version=1)
class ScatNet(Backbone):
    """Scattering maps of each image channel, a 3x3 convolution, residual blocks of stride 1, 4x4 average pool; 2048-d.

    Source: Kinakh et al. 2021, arXiv 2108.13939, and its code vkinakh/scatsimclr. The batch norm over the scattering
    maps that the code constructs is not there, as the code never applies it. The scattering has no parameters and
    runs in float32, also under autocast.

    Args:
        in_channels: Image channels.
        image_size: Side of the images in pixels, at least 2^scales; images of other sizes are refused.
        scales: J of the scattering; the maps have 1 / 2^J of the image's side.
        orientations: L of the scattering.
        num_blocks: Residual blocks of the adapter: 8, 12, 16, 30 or 45.
    """

    def __init__(
        self, *, in_channels: int, image_size: int, scales: int = 2, orientations: int = 16, num_blocks: int = 30
    ) -> None:
        super().__init__()
        if num_blocks not in ADAPTERS:
            raise ConfigError(
                f"`num_blocks` of scatnet must be one of {', '.join(map(str, ADAPTERS))}, got {num_blocks}. "
                "Correct the backbone's arguments."
            )
        self.image_size = image_size
        self.scattering = Scattering2d(image_size, scales=scales, orientations=orientations)
        channels, stages = ADAPTERS[num_blocks]
        layers = [*_convolution(in_channels * self.scattering.num_maps, channels, 3), nn.ReLU(inplace=True)]
        for width, blocks in stages:
            for _ in range(blocks):
                layers.append(_Block(channels, width))
                channels = width
        self.adapter = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.embed_dim = 16 * channels

    def check_image_size(self, image_size: int) -> None:
        """Only the size for which the filters were made."""
        if image_size != self.image_size:
            raise ConfigError(
                f"scatnet takes images of the size it is built for, {self.image_size} px, got views of {image_size}. "
                "Choose views of one size, or another backbone."
            )

    def feature_map(self, images: Tensor) -> Tensor:
        """Output of the last block, (B, C, S, S) -> (B, 128, S / 2^J, S / 2^J)."""
        features: Tensor = self.adapter(self.scattering(images))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features, (B, C, S, S) -> (B, 2048)."""
        return self.pool(self.feature_map(images)).flatten(1)  # type: ignore[no-any-return]
