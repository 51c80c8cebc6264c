import cmath
import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.nn.scattering import Scattering2d

# Weighted sums of kymatio 0.3.0's maps (torch frontend, 2026-12) of `pattern`: (side, J, L) -> one value a map.
# The weights are 1/n, ..., n/n over a map's n entries, row by row.
KYMATIO = {
    (12, 2, 4): [
        1.318396, 1.010139, 0.876004, 0.793667, 0.90375, 1.591308, 0.704294, 1.096548, 1.291835, 0.091931, 0.08701,
        0.094317, 0.082417, 0.08151, 0.084414, 0.093783, 0.068343, 0.091246, 0.104195, 0.155551, 0.107656, 0.067156,
        0.118502, 0.052732, 0.059436,
    ],
    (20, 3, 3): [
        0.464453, 0.540396, 0.367001, 0.591917, 0.519532, 0.512392, 0.878937, 0.245398, 0.406121, 0.326098, 0.059236,
        0.076556, 0.042021, 0.041624, 0.030977, 0.022213, 0.041192, 0.060549, 0.033359, 0.044301, 0.085342, 0.039537,
        0.031437, 0.038599, 0.028188, 0.033879, 0.039058, 0.0415, 0.063259, 0.032436, 0.028225, 0.072882, 0.116242,
        0.06268, 0.069034, 0.071598, 0.071696,
    ],
    (9, 1, 5): [3.194468, 1.406296, 1.495795, 1.305472, 1.442727, 1.762905],
}  # fmt: skip


def pattern(side):
    y, x = torch.meshgrid(*[torch.arange(side, dtype=torch.float64)] * 2, indexing="ij")
    return torch.sin(0.9 * x + 0.05 * y * y) + 0.3 * torch.cos(2.1 * y) + ((x - y).abs() < 2)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("side", "scales", "orientations"), sorted(KYMATIO))
def test_maps_equal_kymatios(side, scales, orientations):
    maps = Scattering2d(side, scales=scales, orientations=orientations)(pattern(side).float()[None, None])[0].double()
    weights = torch.arange(1, maps[0].numel() + 1).view_as(maps[0]) / maps[0].numel()
    sums = (maps * weights).sum((1, 2))
    # each of kymatio's filters is divided by 2 * 3.1415 in place of 2 pi, and a map of order n has n + 1 of them
    first, second = scales * orientations, orientations**2 * scales * (scales - 1) // 2
    order = torch.tensor([0] + [1] * first + [2] * second)
    expected = torch.tensor(KYMATIO[side, scales, orientations], dtype=torch.float64)
    expected = expected * (2 * 3.1415 / (2 * math.pi)) ** (order + 1)
    # the values have 6 decimals; float32 sums of a few hundred terms of order 1 add less than 1e-5
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-5)


def reflected(image, size):
    """Mirror at the border pixels to a square of this side, the smaller half of the border before the image."""
    side, before = len(image), (size - len(image)) // 2

    def source(i):
        i = abs(i - before)
        return i if i < side else 2 * (side - 1) - i

    return [[image[source(y)][source(x)] for x in range(size)] for y in range(size)]


def gabor_at(y, x, sigma, slant, angle, frequency):
    along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
    envelope = math.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    return envelope * cmath.exp(1j * frequency * along)


def periodic(function, size):
    wraps = [w * size for w in (-2, -1, 0, 1, 2)]
    return [[sum(function(y + v, x + w) for v in wraps for w in wraps) for x in range(size)] for y in range(size)]


def convolved(image, kernel):
    size = range(len(image))
    return [
        [
            sum(image[v][w] * kernel[(y - v) % len(image)][(x - w) % len(image)] for v in size for w in size)
            for x in size
        ]
        for y in size
    ]


def test_one_scale_equals_direct_convolution():
    side, orientations, size = 6, 3, 10
    image = pattern(side)
    padded = reflected(image.tolist(), size)
    blur = periodic(lambda y, x: gabor_at(y, x, 0.8, 1.0, 0.0, 0.0), size)
    layers = [padded]
    for k in range(orientations):
        shape = (0.8, 4 / orientations, (orientations // 2 - 1 - k) * math.pi / orientations)
        wave = periodic(lambda y, x, shape=shape: gabor_at(y, x, *shape, 0.75 * math.pi), size)
        envelope = periodic(lambda y, x, shape=shape: gabor_at(y, x, *shape, 0.0), size)
        share = sum(map(sum, wave)) / sum(map(sum, envelope))
        wavelet = [[a - share * b for a, b in zip(*rows, strict=True)] for rows in zip(wave, envelope, strict=True)]
        layers.append([[abs(value) for value in row] for row in convolved(padded, wavelet)])
    expected = [[[value.real for value in row[2:-2:2]] for row in convolved(x, blur)[2:-2:2]] for x in layers]
    got = Scattering2d(side, scales=1, orientations=orientations).double()(image[None, None])[0]
    # the filters' spectra are rounded to float32: 2 filters, sums of 100 terms, 200 * 2^-24 = 1.2e-5 of the largest
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1.2e-5)


@pytest.mark.parametrize(("scales", "orientations", "maps"), [(2, 8, 81), (2, 16, 289), (3, 8, 217)])
def test_number_of_maps(scales, orientations, maps):
    scattering = Scattering2d(32, scales=scales, orientations=orientations)
    assert scattering.num_maps == maps
    side = 32 >> scales
    assert scattering(torch.zeros(1, 3, 32, 32)).shape == (1, 3 * maps, side, side)


def test_maps_of_a_channel_stand_together():
    scattering, images = Scattering2d(12, orientations=4), noise(2, 3, 12, 12)
    alone = torch.cat([scattering(images[:, c : c + 1]) for c in range(3)], dim=1)
    torch.testing.assert_close(scattering(images), alone)


def test_constant_images_have_order_0_only():
    maps = Scattering2d(16, orientations=4)(torch.full((1, 1, 16, 16), 3.0))[0]
    torch.testing.assert_close(maps[0], torch.full((4, 4), 3.0))
    assert maps[1:].abs().max() < 1e-5  # float32 rounding of 3 summed over the filter


def test_a_shift_changes_the_maps_less_than_the_pixels():
    scattering, images = Scattering2d(32), noise(4, 1, 33, 33)

    def change(function):
        before, after = function(images[..., :32, :32]), function(images[..., :32, 1:])
        return (after - before).norm() / before.norm()

    assert change(scattering) < 0.5 * change(lambda x: x)


def test_no_gradient_is_lost_and_none_is_infinite_on_flat_images():
    images = torch.zeros(1, 1, 8, 8, requires_grad=True)
    Scattering2d(8, orientations=4)(images).sum().backward()
    assert torch.isfinite(images.grad).all()


def test_half_precision_images_are_transformed_in_float32():
    scattering, images = Scattering2d(12, orientations=4), noise(2, 1, 12, 12).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = scattering(images)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, scattering(images.float()))


@pytest.mark.parametrize(("side", "scales", "orientations"), [(3, 2, 8), (8, 0, 8), (8, 2, 0)])
def test_impossible_transforms_are_refused(side, scales, orientations):
    with pytest.raises(ConfigError, match="scattering transform needs"):
        Scattering2d(side, scales=scales, orientations=orientations)
