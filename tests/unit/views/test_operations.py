"""Each operation against torchvision's on float tensors, given the same parameters.

Values lie in [0, 1], so one float32 rounding is at most U = 2**-24. Both sides round differently; every tolerance
counts the roundings on the longest path of both.
"""

import colorsys

import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torchvision.transforms.v2 import InterpolationMode

from ssl_bench.views import operations as ops

U = 2.0**-24


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def colors(batch: int = 6, size: int = 9) -> torch.Tensor:
    """Planes (3, B, H, W) with noise, and with grays, primaries, ties and extremes in the first rows."""
    planes = noise(3, batch, size, size)
    special = [(0, 0, 0), (1, 1, 1), (0.5, 0.5, 0.5), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)]
    special += [(0.3, 0.3, 0.7), (0.7, 0.3, 0.3), (0.3, 0.7, 0.3), (0.7, 0.7, 0.3), (0.3, 0.7, 0.7), (0.7, 0.3, 0.7)]
    for place, color in enumerate(special):
        planes[:, :, place // size, place % size] = torch.tensor(color)[:, None].float()
    return planes


def samples(planes: torch.Tensor) -> list[torch.Tensor]:
    return list(planes.transpose(0, 1))


def assert_close(planes: torch.Tensor, expected: list[torch.Tensor], tolerance: float) -> None:
    torch.testing.assert_close(planes, torch.stack(expected, 1), rtol=0, atol=tolerance)


def test_to_planes_is_value_over_255():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    # the reciprocal and the product round once each
    torch.testing.assert_close(ops.to_planes(images)[0, 0], images[0, 0].double().div(255).float(), rtol=0, atol=2 * U)


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 32, 32), (28, 28, 12), (17, 40, 16), (9, 5, 24), (96, 96, 41), (1, 1, 4), (2, 3, 1)],
)
def test_resized_crop_equals_torchvision(height, width, size, bicubic):
    batch = 24
    images = random_bytes(batch, 3, height, width)
    u = noise(4, batch, seed=1)
    h, w = (1 + torch.floor(u[0] * height)), (1 + torch.floor(u[1] * width))
    h[0], w[0] = height, width
    h[1], w[1] = 1, 1
    top, left = torch.floor(u[2] * (height - h + 1)), torch.floor(u[3] * (width - w + 1))
    flip = (torch.arange(batch) % 2).float()
    out = ops.resized_crop(images, torch.stack([top, left, h, w]), flip, size, bicubic=bicubic)
    mode = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    expected = []
    for b in range(batch):
        box = [int(p[b]) for p in (top, left, h, w)]
        crop = TF.resized_crop(images[b] / 255, *box, [size, size], mode, antialias=True).clamp(0, 1)
        expected.append(TF.horizontal_flip(crop) if flip[b] else crop)
    # a sampling position below 2**7 rounds to 2**-18 * 2 in float32, three times on each side; a filter's slope is
    # below 1.5 and up to 8 taps move, in each of two axes
    assert_close(out, expected, max(height, width) * 2 * U * 6 * 1.5 * 2)


def test_resized_crop_of_whole_image_is_the_image():
    images = random_bytes(3, 1, 13, 13)
    zero = torch.zeros(3)
    for bicubic in (False, True):
        out = ops.resized_crop(images, torch.stack([zero, zero, zero + 13, zero + 13]), zero, 13, bicubic=bicubic)
        assert torch.equal(out, ops.to_planes(images))


def test_resize_matrix_rows_sum_to_one_and_stay_in_the_crop():
    start, length = torch.tensor([0.0, 5.0, 31.0]), torch.tensor([32.0, 11.0, 1.0])
    for bicubic in (False, True):
        matrix = ops.resize_matrix(start, length, torch.zeros(3), 32, 20, bicubic=bicubic)
        # 32 weights below 1.2 are added: 32 roundings of the sum and one of each quotient
        torch.testing.assert_close(matrix.sum(2), torch.ones(3, 20), rtol=0, atol=64 * U)
        assert not matrix[1, :, :5].any()
        assert not matrix[1, :, 16:].any()
        assert torch.equal(matrix[2, :, 31], torch.ones(20))


def test_luma_and_grayscale_equal_torchvision():
    planes = colors()
    expected = [TF.rgb_to_grayscale(x)[0] for x in samples(planes)]
    # three products and two sums on each side
    torch.testing.assert_close(ops.luma(planes), torch.stack(expected), rtol=0, atol=10 * U)
    assert torch.equal(ops.luma(planes[:1]), planes[0])


@pytest.mark.parametrize("factor", [0.0, 0.2, 0.9, 1.0, 1.7])
@pytest.mark.parametrize(
    ("name", "channels"),
    [("brightness", 1), ("brightness", 3), ("contrast", 1), ("contrast", 3), ("saturation", 3)],
)
def test_blend_equals_torchvision(name, channels, factor):
    planes = colors()[:channels].contiguous()
    batch = planes.shape[1]
    expected = [getattr(TF, f"adjust_{name}")(x, factor) for x in samples(planes)]
    f, one = torch.full((batch,), factor), torch.ones(batch)
    shares = {"brightness": (None, None), "contrast": (None, one), "saturation": (one, None)}[name]
    out = ops.blend_(planes.clone(), f, *shares)
    # products and sums of magnitude below 2: luma 5, mean 81 additions, blend 4, on each side
    assert_close(out, expected, 2 * (5 + 81 + 4) * 2 * U if name == "contrast" else 2 * (5 + 4) * 2 * U)
    mixed = ops.blend_(planes.clone(), f, *(torch.zeros(batch) if s is None else s for s in shares))
    assert_close(mixed, expected, 2 * (5 + 81 + 4) * 2 * U)


def test_blend_takes_each_samples_own_operation():
    planes = colors(4)
    factor = torch.tensor([0.5, 1.5, 0.3, 1.0])
    gray, mean = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    out = ops.blend_(planes.clone(), factor, gray, mean)
    x = samples(planes)
    expected = [TF.adjust_brightness(x[0], 0.5), TF.adjust_contrast(x[1], 1.5), TF.adjust_saturation(x[2], 0.3), x[3]]
    assert_close(out, expected, 2 * (5 + 81 + 4) * 2 * U)  # as in the test of a single operation
    assert torch.equal(out[:, 3], planes[:, 3])  # factor 1 changes no bit


@pytest.mark.parametrize("shift", [-0.5, -0.31, -0.1, 0.0, 0.04, 0.2, 0.5])
def test_hue_equals_torchvision(shift):
    planes = colors()
    out = ops.shift_hue_(planes.clone(), torch.full((planes.shape[1],), shift))
    # torchvision holds the hue as a fraction of a turn: about 5 roundings of 1 turn = 6 sixths, each sixth moving a
    # channel by at most 1; ours holds it in sixths times chroma, below 9, with about 8 roundings
    assert_close(out, [TF.adjust_hue(x, shift) for x in samples(planes)], (5 * 6 + 8 * 9) * U)


def test_hue_equals_the_definition_in_hsv():
    planes = colors(2, 5).double()
    shifts = torch.tensor([0.37, -0.22], dtype=torch.float64)
    expected = torch.empty_like(planes)
    for b, shift in enumerate(shifts.tolist()):
        for place in range(25):
            i, j = divmod(place, 5)
            h, s, v = colorsys.rgb_to_hsv(*planes[:, b, i, j].tolist())
            expected[:, b, i, j] = torch.tensor(colorsys.hsv_to_rgb((h + shift) % 1.0, s, v), dtype=torch.float64)
    # both sides in float64: tens of roundings of 2**-53 times at most 9
    torch.testing.assert_close(ops.shift_hue_(planes.clone(), shifts), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("size", "kernel"), [(32, 3), (9, 9), (96, 9), (50, 23), (2, 3), (1, 1)])
def test_blur_equals_torchvision(size, kernel):
    sigmas = [0.1, 0.3, 1.0, 2.0, 7.0]
    planes = noise(3, len(sigmas), size, size + 3 if size > 2 else size)
    out = ops.gaussian_blur(planes, torch.tensor(sigmas), kernel)
    expected = [TF.gaussian_blur(x, [kernel, kernel], [s, s]) for x, s in zip(samples(planes), sigmas, strict=True)]
    # a sum of K (ours, twice) and of K * K (torchvision's) products whose weights add up to one; tap errors 4 U
    assert_close(out, expected, (2 * kernel + kernel * kernel + 8) * U)


def test_solarize_equals_torchvision():
    planes = colors()
    planes[0, 0, 0, 0] = 0.5
    assert_close(ops.solarize(planes, 0.5), [TF.solarize(x, 0.5) for x in samples(planes)], 0.0)


def test_operations_take_empty_batches():
    empty = torch.zeros(0)
    planes = torch.zeros(3, 0, 8, 8)
    images = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    assert ops.resized_crop(images, torch.zeros(4, 0), empty, 5, bicubic=True).shape == (3, 0, 5, 5)
    assert ops.blend_(planes.clone(), empty, empty, empty).shape == planes.shape
    assert ops.shift_hue_(planes.clone(), empty).shape == planes.shape
    assert ops.solarize(planes, 0.5).shape == planes.shape
