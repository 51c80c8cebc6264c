"""Fixed descriptors of images: wavelet scattering, oriented gradients, local standard deviation.

Nothing here is learned or has gradient. Shapes: images (B, C, H, W), descriptors (B, F).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.losses.common import full_precision


def _grid(radius: int) -> tuple[Tensor, Tensor]:
    side = torch.arange(-radius, radius + 1, dtype=torch.float64)
    y, x = torch.meshgrid(side, side, indexing="ij")
    return y, x


def morlet_bank(scale: int, orientations: int) -> Tensor:
    """Morlet wavelets of one dyadic scale, (2 L, 1, k, k): real parts, then imaginary parts.

    A Gaussian of width 0.8 * 2^scale along the wave and L / 4 times that across it, cut at 2.5 widths, times
    a wave of frequency (3 pi / 4) / 2^scale; its mean is taken out, so that constant images give 0.
    """
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / orientations
    y, x = _grid(math.ceil(2.5 * sigma * max(1.0, 1 / slant)))
    waves = []
    for k in range(orientations):
        angle = math.pi * k / orientations
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        envelope = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
        wave = torch.polar(envelope, frequency * along)
        waves.append((wave - envelope * (wave.sum() / envelope.sum())) * slant / (2 * math.pi * sigma**2))
    bank = torch.stack(waves)
    return torch.cat([bank.real, bank.imag])[:, None].float()


def _modulus(x: Tensor, bank: Tensor, stride: int) -> Tensor:
    """Modulus of each map of (n, c, h, w) by each wavelet, borders replicated: (n, c L, h', w')."""
    maps = F.pad(x.flatten(0, 1)[:, None], (bank.shape[-1] // 2,) * 4, mode="replicate")
    real, imaginary = F.conv2d(maps, bank, stride=stride).chunk(2, dim=1)
    return torch.hypot(real, imaginary).reshape(len(x), -1, *real.shape[2:])


def _average(x: Tensor, *, sigma: float, stride: int) -> Tensor:
    """Gaussian means of each map (h, w) at every `stride`-th place, weights normalized at the borders."""
    rows, columns = (
        torch.softmax(-(places[::stride, None] - places).square() / (2 * sigma**2), dim=1)
        for places in (torch.arange(side, device=x.device, dtype=x.dtype) for side in x.shape[-2:])
    )
    return rows @ x @ columns.T


class Scattering(nn.Module):
    """Wavelet scattering of orders 0, 1 and 2 with two scales: 1 + 2 L + L^2 maps a channel at a quarter of the side.

    Source: Bruna & Mallat 2013; filters as in kymatio, but cut off in space, and other borders.

    Args:
        orientations: L.
    """

    fine: Tensor
    coarse: Tensor

    def __init__(self, orientations: int = 8) -> None:
        super().__init__()
        self.register_buffer("fine", morlet_bank(0, orientations), persistent=False)
        self.register_buffer("coarse", morlet_bank(1, orientations), persistent=False)

    @torch.no_grad()
    @full_precision
    def forward(self, images: Tensor) -> Tensor:
        """Averaged moduli, (B, C, H, W) -> (B, F)."""
        x = images.flatten(0, 1)[:, None]
        first = _modulus(x, self.fine, 1)
        halves = torch.cat([_modulus(x, self.coarse, 2), _modulus(first, self.coarse, 2)], dim=1)
        maps = [_average(torch.cat([x, first], dim=1), sigma=1.6, stride=4), _average(halves, sigma=0.8, stride=2)]
        return torch.cat(maps, dim=1).reshape(len(images), -1)


@torch.no_grad()
@full_precision
def oriented_gradients(images: Tensor, *, bins: int = 24, cell: int = 8) -> Tensor:
    """Mean gradient magnitude by orientation (without sign) in square cells of each channel, (B, F).

    Sobel gradients; each magnitude is shared linearly between the two nearest of `bins` orientations.
    """
    x = F.pad(images.flatten(0, 1)[:, None], (1,) * 4, mode="replicate")
    sobel = x.new_tensor([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    gradient = F.conv2d(x, torch.stack([sobel, sobel.T])[:, None])
    magnitude = gradient.norm(dim=1, keepdim=True)  # (n, 1, H, W)
    place = torch.atan2(gradient[:, 1:], gradient[:, :1]) * (bins / math.pi)
    below = place.floor()
    votes = x.new_zeros(len(x), bins, *magnitude.shape[2:])
    for offset, share in ((0, 1 - (place - below)), (1, place - below)):
        votes.scatter_(1, (below.long() + offset) % bins, magnitude * share)
    return F.avg_pool2d(votes, min(cell, *images.shape[2:])).reshape(len(images), -1)


@torch.no_grad()
@full_precision
def local_std(images: Tensor, *, side: int = 3) -> Tensor:
    """Standard deviation in the window around each pixel, borders reflected, (B, F)."""
    x = F.pad(images, (side // 2,) * 4, mode="reflect")
    mean = F.avg_pool2d(x, side, stride=1)
    return (F.avg_pool2d(x.square(), side, stride=1) - mean.square()).clamp(min=0).add(1e-8).sqrt().flatten(1)
