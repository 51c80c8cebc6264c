"""Wavelet scattering of orders 0, 1 and 2 as maps, with fixed Morlet filters applied in the Fourier domain.

Nothing here is learned. Shapes: images (B, C, S, S); J scales, L orientations, M maps a channel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import full_precision


def gabor(size: int, *, sigma: float, slant: float, angle: float, frequency: float) -> Tensor:
    """A Gaussian times a wave on a periodic grid, (size, size), complex: the sum of its copies two periods around.

    The Gaussian has width `sigma` along the wave and sigma / slant across it, and integrates to 1; the wave runs
    at `angle` to the first axis with `frequency` radians a pixel. The origin is the first entry.
    """
    grid = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    along = grid[:, None] * math.cos(angle) + grid * math.sin(angle)
    across = grid * math.cos(angle) - grid[:, None] * math.sin(angle)
    envelope = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
    wave = torch.polar(envelope * (slant / (2 * math.pi * sigma**2)), frequency * along)
    return wave.view(5, size, 5, size).sum((0, 2))


def morlet(size: int, *, sigma: float, slant: float, angle: float, frequency: float) -> Tensor:
    """A Gabor wave less the multiple of its envelope that takes its mean to 0, (size, size), complex."""
    wave = gabor(size, sigma=sigma, slant=slant, angle=angle, frequency=frequency)
    envelope = gabor(size, sigma=sigma, slant=slant, angle=angle, frequency=0.0)
    return wave - envelope * (wave.sum() / envelope.sum())


def lowest(spectrum: Tensor, octaves: int) -> Tensor:
    """The frequencies -n/2, ..., n/2 - 1 of a spectrum of side N, n = N / 2^octaves, in the order of an FFT."""
    size = spectrum.shape[-1]
    kept = size >> octaves
    keep = torch.cat([torch.arange(kept // 2), torch.arange(size - kept // 2, size)])
    return spectrum[..., keep, :][..., keep]


def subsampled(spectrum: Tensor, octaves: int) -> Tensor:
    """Spectrum of every 2^octaves-th pixel: the mean of the spectrum's aliases."""
    step, size = 1 << octaves, spectrum.shape[-1] >> octaves
    result: Tensor = spectrum.unflatten(-1, (step, size)).unflatten(-3, (step, size)).mean((-4, -2))
    return result


class Scattering2d(nn.Module):
    """M = 1 + L J + L^2 J (J - 1) / 2 maps of side S / 2^J a channel, in the order of kymatio's Scattering2D.

    x * phi, |x * psi_1| * phi, and ||x * psi_1| * psi_2| * phi for scales j2 > j1, with * the circular convolution of
    the image reflected at its borders. psi has scale j = 0, ..., J - 1: width 0.8 * 2^j along and L / 4 times that
    across a wave of frequency (3 pi / 4) / 2^j; phi is a Gaussian of width 0.8 * 2^(J - 1). Each modulus is kept at
    every 2^j-th pixel only, and the filters that act on it there keep the frequencies that this grid has.

    Source: Bruna & Mallat 2013, arXiv 1203.1513; filters, borders, subsampling and order of the maps as in kymatio
    0.3.0, whose filters are rounded (2 * 3.1415 for 2 pi, single precision): the maps agree to a relative 1e-4.

    Args:
        image_size: Side S of the images, at least 2^J.
        scales: J.
        orientations: L.
    """

    phi: Tensor
    psi: Tensor

    def __init__(self, image_size: int, *, scales: int = 2, orientations: int = 8) -> None:
        super().__init__()
        if scales < 1 or orientations < 1 or image_size < 2**scales:
            raise ConfigError(
                "A scattering transform needs at least 1 scale, 1 orientation and images of 2^scales pixels, got "
                f"{scales} scales, {orientations} orientations and {image_size} px. Correct the backbone's arguments."
            )
        self.scales = scales
        self.orientations = orientations
        self.num_maps = 1 + orientations * scales + orientations**2 * scales * (scales - 1) // 2
        step = 2**scales
        size = (image_size // step + 2) * step
        self.padding = ((size - image_size) // 2, (size - image_size + 1) // 2) * 2
        waves = torch.stack(
            [
                morlet(
                    size,
                    sigma=0.8 * 2**j,
                    slant=4 / orientations,
                    angle=(orientations // 2 - 1 - k) * math.pi / orientations,
                    frequency=0.75 * math.pi / 2**j,
                )
                for j in range(scales)
                for k in range(orientations)
            ]
        )
        blur = gabor(size, sigma=0.8 * 2 ** (scales - 1), slant=1.0, angle=0.0, frequency=0.0)
        # both spectra are real, since the filters are their own mirrored conjugates
        spectra = torch.fft.fft2(waves).real.float().unflatten(0, (scales, orientations))
        self.register_buffer("psi", spectra, persistent=False)
        self.register_buffer("phi", torch.fft.fft2(blur).real.float(), persistent=False)

    @full_precision
    def forward(self, images: Tensor) -> Tensor:
        """Maps by channel, (B, C, S, S) -> (B, C M, S', S')."""
        spectrum = torch.fft.fft2(F.pad(images, self.padding, mode="reflect"))[:, :, None]  # (B, C, 1, P, P)
        first_order, second_order = [], []
        for j in range(self.scales):
            for psi in self.psi[j]:
                first = self._modulus(spectrum, psi, 0, j)
                first_order.append(self._average(first, j))
                second_order += [
                    self._average(self._modulus(first, lowest(self.psi[k], j), j, k), k)
                    for k in range(j + 1, self.scales)
                ]
        return torch.cat([self._average(spectrum, 0), *first_order, *second_order], dim=2).flatten(1, 2)

    @staticmethod
    def _modulus(spectrum: Tensor, psi: Tensor, octaves: int, more_octaves: int) -> Tensor:
        """Spectrum of the modulus of the waves psi, taken from a grid of 2^octaves pixels to a coarser one."""
        waves = torch.fft.ifft2(subsampled(spectrum * psi, more_octaves - octaves))
        modulus: Tensor = torch.fft.fft2(waves.abs())
        return modulus

    def _average(self, spectrum: Tensor, octaves: int) -> Tensor:
        """Blurred maps at every 2^J-th pixel, without the border, from spectra on a grid of 2^octaves pixels."""
        blurred = subsampled(spectrum * lowest(self.phi, octaves), self.scales - octaves)
        maps: Tensor = torch.fft.ifft2(blurred).real
        return maps[..., 1:-1, 1:-1]
