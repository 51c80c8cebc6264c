"""Batch styles standardization: the operation against numpy's full spectrum, and its place in the pipeline."""

import numpy as np
import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.random import sample_keys, uniform
from ssl_bench.records import Batch
from ssl_bench.views import ViewPipeline, build_views
from ssl_bench.views import operations as ops

# float64 transforms of fewer than 2^8 values below 2^5, with unit errors of 2^-53
EXACT = {"rtol": 0, "atol": 1e-11}
# float32 transforms of 2^10 values in [0, 1]: sums below 2^10, a few units of 2^-24 each way
CLOSE = {"rtol": 0, "atol": 2e-4}


def standardize(planes: torch.Tensor, k: int, area: float) -> torch.Tensor:
    return ops.standardize_styles(planes, planes[:, k], torch.tensor(area, dtype=planes.dtype))


def random_planes(channels: int, num: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(channels, num, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def oracle(image: np.ndarray, style: np.ndarray, area: float) -> np.ndarray:
    """One channel, bin by bin of the full spectrum."""
    height, width = image.shape
    own, other = np.fft.fft2(image), np.fft.fft2(style)
    half = np.sqrt(area) / 2
    for a in range(height):
        for b in range(width):
            if area > 0 and min(a, height - a) / height <= half and min(b, width - b) / width <= half:
                own[a, b] = abs(other[a, b]) * np.exp(1j * np.angle(own[a, b]))
    result = np.fft.ifft2(own)
    assert abs(result.imag).max() < 1e-9
    return result.real


@pytest.mark.parametrize("area", [0.0, 0.02, 0.3, 0.77, 1.0])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 7), (6, 9), (9, 6)])
def test_operation_equals_the_full_spectrum(height, width, area):
    planes = random_planes(2, 3, height, width)
    got = standardize(planes, 1, area)
    for c in range(2):
        for i in range(3):
            expected = torch.from_numpy(oracle(planes[c, i].numpy(), planes[c, 1].numpy(), area))
            torch.testing.assert_close(got[c, i], expected, **EXACT)


def test_the_mean_alone():
    ramp = torch.arange(16, dtype=torch.float64).view(4, 4)
    diagonal = torch.diag(torch.tensor([1, 2, 3, 4], dtype=torch.float64))
    got = standardize(torch.stack([ramp, diagonal])[None], 0, 0.01)
    torch.testing.assert_close(got[0, 1], diagonal + 6.875, **EXACT)
    torch.testing.assert_close(got[0, 0], ramp, **EXACT)


def test_the_whole_spectrum():
    planes = random_planes(3, 4, 8, 8)
    got = standardize(planes, 2, 1.0)
    before, after = torch.fft.fft2(planes), torch.fft.fft2(got)
    torch.testing.assert_close(after.abs(), before[:, 2:3].abs().expand(3, 4, 8, 8), **EXACT)
    torch.testing.assert_close(torch.sgn(after), torch.sgn(before), **EXACT)
    torch.testing.assert_close(got[:, 2], planes[:, 2], **EXACT)


def test_no_spectrum_equal_images_and_repetition_change_nothing():
    planes = random_planes(3, 4, 7, 8)
    torch.testing.assert_close(standardize(planes, 1, 0.0), planes, **EXACT)
    equal = planes[:, :1].expand(3, 4, 7, 8)
    torch.testing.assert_close(standardize(equal, 3, 0.4), equal, **EXACT)
    once = standardize(planes, 1, 0.4)
    torch.testing.assert_close(standardize(once, 1, 0.4), once, **EXACT)


def test_a_black_image_takes_amplitudes_at_phase_zero():
    planes = random_planes(1, 2, 8, 8)
    planes[:, 0] = 0
    got = standardize(planes, 1, 1.0)
    expected = np.fft.ifft2(abs(np.fft.fft2(planes[0, 1].numpy()))).real
    torch.testing.assert_close(got[0, 0], torch.from_numpy(expected), **EXACT)


def make(name: str, channels: int = 3, size: int = 32, **overrides) -> ViewPipeline:
    return build_views(
        name, image_size=size, channels=channels, mean=(0.4,) * channels, std=(0.3,) * channels, overrides=overrides
    )


def batch_of(num: int = 9, channels: int = 3, size: int = 32, epoch: int = 0) -> Batch:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8, generator=g)
    return Batch(images, torch.arange(40, 40 + num), epoch=epoch, seed=7)


def style_of(batch: Batch, v: int, low: float, high: float) -> tuple[int, float]:
    """Place of the style image and share of the spectrum."""
    keys = sample_keys(batch.seed, batch.epoch, batch.index, f"view{v}/style")
    k = min(range(len(batch)), key=lambda i: int(keys[i]))
    return k, low + (high - low) * float(uniform(keys[k : k + 1], 1, "area"))


@pytest.mark.parametrize(("name", "channels"), [("mae", 3), ("supervised", 3), ("eval", 1)])
def test_style_comes_after_the_crop(name, channels):
    batch = batch_of(channels=channels)
    plain = make(name, channels)(batch).views
    styled = make(name, channels, style_area=[0.1, 0.9])(batch).views
    for v, (before, after) in enumerate(zip(plain, styled, strict=True)):
        k, area = style_of(batch, v, 0.1, 0.9)
        planes = (before * 0.3 + 0.4).transpose(0, 1)
        expected = (standardize(planes, k, area).clamp(0, 1) - 0.4) / 0.3
        torch.testing.assert_close(after.transpose(0, 1), expected, **CLOSE)


def test_style_comes_before_the_colors():
    """Solarization at threshold 0 inverts the standardized pixels."""
    batch = batch_of()
    before = make("mae", style_area=[0.5, 0.5])(batch).views[0] * 0.3 + 0.4
    after = make("mae", style_area=[0.5, 0.5], solarize_probability=1.0, solarize_threshold=0.0)(batch).views[0]
    torch.testing.assert_close(after * 0.3 + 0.4, 1 - before, rtol=0, atol=1e-6)


def test_styles_differ_between_views_and_epochs():
    batches = [batch_of(epoch=epoch) for epoch in range(6)]
    chosen = {style_of(batch, v, 0, 1) for batch in batches for v in range(2)}
    assert len({k for k, _ in chosen}) > 3
    assert len({area for _, area in chosen}) == len(chosen)


def test_a_batch_of_one_keeps_its_pixels():
    batch = batch_of(1)
    plain, styled = make("mae")(batch).views[0], make("mae", style_area=[0.02, 1.0])(batch).views[0]
    torch.testing.assert_close(styled, plain, **CLOSE)


def test_crops_from_workers_and_local_crops_are_standardized():
    views = make("dino_multicrop", num_local=1, local_size=12, style_area=[0.2, 0.4])
    batch = batch_of()
    assert [view.shape[-1] for view in views(batch).views] == [32, 32, 12]
    crops = [views.crop_in_worker(image, int(i), 0, 7) for image, i in zip(batch.images, batch.index, strict=True)]
    cropped = Batch(tuple(map(torch.stack, zip(*crops, strict=True))), batch.index, 0, 7)
    plain = make("dino_multicrop", num_local=1, local_size=12)
    for styled, other in zip(views(cropped).views, plain(cropped).views, strict=True):
        assert (styled - other).abs().max() > 0.1


def test_description_names_the_style_only_where_it_is_on():
    plain = make("simclr").describe()
    assert all("style_area" not in spec for spec in plain["specs"])
    styled = make("simclr", style_area=[0.02, 1.0]).describe()
    assert [spec.pop("style_area") for spec in styled["specs"]] == [[0.02, 1.0]] * 2
    assert styled == plain


@pytest.mark.parametrize("value", [[0.5, 0.2], [-0.1, 0.5], [0.0, 1.5], 0.5])
def test_values_out_of_range_are_refused(value):
    with pytest.raises(ConfigError, match=r"style_area|ranges"):
        make("simclr", style_area=value)
