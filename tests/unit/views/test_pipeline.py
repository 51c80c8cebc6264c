"""The pipeline: whole views against a loop of torchvision's operations, large images, errors, description."""

import dataclasses
import json
import pickle

import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torchvision.transforms.v2 import InterpolationMode

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.random import sample_keys
from ssl_bench.records import Batch
from ssl_bench.views import VIEW_RECIPES, ViewPipeline, ViewSpec, build_views
from ssl_bench.views import parameters as draw

MEAN, STD = (0.49, 0.48, 0.44), (0.2, 0.21, 0.26)


def smooth_bytes(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Colored bytes with structure at several scales."""
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(batch, channels, max(1, height // 8), max(1, width // 8), generator=g)
    coarse = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    fine = torch.rand(batch, channels, height, width, generator=g)
    return ((0.7 * coarse + 0.3 * fine) * 255).round().to(torch.uint8)


def make(name: str, image_size: int, channels: int = 3, **overrides) -> ViewPipeline:
    mean, std = MEAN[:channels], STD[:channels]
    return build_views(name, image_size=image_size, channels=channels, mean=mean, std=std, overrides=overrides)


def batch_of(images, seed: int = 0, epoch: int = 0, first: int = 0) -> Batch:
    num = len(images[0]) if isinstance(images, tuple) else len(images)
    return Batch(images, torch.arange(first, first + num), epoch, seed)


def one_view_by_torchvision(image: torch.Tensor, key: torch.Tensor, spec: ViewSpec) -> torch.Tensor:
    """The view of one image, one float operation of torchvision after the other, from the drawn parameters."""
    u = {name: float(value) for name, value in draw.named(draw.draw_numbers(key)).items()}
    mode = InterpolationMode.BICUBIC if spec.interpolation == "bicubic" else InterpolationMode.BILINEAR
    x = image / 255
    height, width = x.shape[1:]
    if spec.pad:
        x = TF.pad(x, [spec.pad])
        top = int(u["top"] * (height + 2 * spec.pad - spec.size + 1))
        left = int(u["left"] * (width + 2 * spec.pad - spec.size + 1))
        x = TF.crop(x, top, left, spec.size, spec.size)
    elif spec.crop_scale is not None:
        box = draw.random_resized_crop(key, height, width, spec.crop_scale, spec.crop_ratio)[:, 0].int().tolist()
        x = TF.resized_crop(x, *box, [spec.size, spec.size], mode, antialias=True).clamp(0, 1)
    if u["flip"] < spec.flip_probability:
        x = TF.horizontal_flip(x)
    if u["jitter"] < spec.jitter_probability:
        strengths = {name: getattr(spec, name) for name in ("brightness", "contrast", "saturation", "hue")}
        for name in sorted(strengths, key=lambda name: u[f"{name}_place"]):
            s = strengths[name]
            if not s:
                continue
            low, high = (-s, s) if name == "hue" else (max(0.0, 1 - s), 1 + s)
            x = getattr(TF, f"adjust_{name}")(x, low + (high - low) * u[name])
    if u["gray"] < spec.gray_probability:
        x = TF.rgb_to_grayscale(x, 3)
    if u["blur"] < spec.blur_probability:
        low, high = spec.blur_sigma
        x = TF.gaussian_blur(x, [spec.blur_kernel] * 2, [low + (high - low) * u["blur_sigma"]] * 2)
    if u["solarize"] < spec.solarize_probability:
        x = TF.solarize(x, spec.solarize_threshold)
    channels = len(x)
    return TF.normalize(x, list(MEAN[:channels]), list(STD[:channels]))


@pytest.mark.parametrize(
    ("name", "size", "channels", "overrides"),
    [
        ("simclr", 32, 3, {}),
        ("simclr", 28, 1, {}),
        ("simclr", 33, 3, {"interpolation": "bilinear", "blur_probability": 0.5, "blur_kernel": 5}),
        ("simclr", 32, 3, {"hue": 0.0, "contrast": 0.0}),
        ("simclr", 32, 3, {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.5}),
        ("simclr_asymmetric", 32, 3, {}),
        ("simclr_asymmetric", 112, 3, {}),
        ("dino_multicrop", 32, 3, {"num_local": 2}),
        ("swav_multicrop", 28, 1, {"num_local": 2, "local_size": 14}),
        ("strong_weak", 32, 3, {}),
        ("simclr_three", 32, 3, {}),
        ("simclr_and_image", 32, 3, {}),
        ("strong_multiview", 28, 1, {"num_views": 2}),
        ("vicreg_symmetric", 32, 3, {}),
        ("mae", 32, 3, {}),
        ("simmim", 32, 3, {}),
        ("ijepa", 32, 3, {}),
        ("diet", 32, 3, {}),
        ("supervised", 32, 3, {}),
        ("supervised", 28, 1, {}),
        ("eval", 32, 3, {}),
    ],
)
def test_views_equal_torchvisions_operations_one_image_at_a_time(name, size, channels, overrides):
    num = 40 if size <= 33 else 12
    pipeline = make(name, size, channels, **overrides)
    batch = batch_of(smooth_bytes(num, channels, size, size), seed=5, epoch=3, first=100)
    views = pipeline(batch).views
    assert len(views) == pipeline.num_views
    for v, (view, spec) in enumerate(zip(views, pipeline.specs, strict=True)):
        assert view.dtype == torch.float32
        assert view.shape == (num, channels, spec.size, spec.size)
        assert view.is_contiguous()
        expected = torch.stack(
            [
                one_view_by_torchvision(batch.images[i], sample_keys(5, 3, batch.index[i : i + 1], f"view{v}"), spec)
                for i in range(num)
            ]
        )
        # tests/unit/views/test_operations.py bounds each operation; the crop's sampling positions dominate with
        # 36 * size * U (U = 2**-24), amplified by three blends of factor <= 1.8 and by 1 / std <= 5
        torch.testing.assert_close(view, expected, rtol=0, atol=36 * size * 2.0**-24 * 1.8**3 * 5)


def test_images_of_another_size_are_resized():
    for name in ("eval", "mae", "simclr"):
        view = make(name, 16)(batch_of(smooth_bytes(3, 3, 20, 31))).views[0]
        assert view.shape == (3, 3, 16, 16)
        assert torch.isfinite(view).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", sorted(VIEW_RECIPES))
def test_tiny_images_and_empty_batches(name, channels, size):
    pipeline = make(name, size, channels)
    for batch_size in (0, 1, 3):
        views = pipeline(batch_of(smooth_bytes(batch_size, channels, size, size))).views
        for view, side in zip(views, pipeline.view_sizes, strict=True):
            assert view.shape == (batch_size, channels, side, side)
            assert torch.isfinite(view).all()


def test_constant_images_stay_constant():
    images = torch.full((8, 3, 32, 32), 77, dtype=torch.uint8)
    for view in make("dino_multicrop", 32, num_local=1)(batch_of(images)).views:
        spread = view.amax((2, 3)) - view.amin((2, 3))
        # interpolation weights sum to one within 64 U; three blends and 1 / std amplify
        assert spread.max() < 64 * 2.0**-24 * 1.8**3 * 5


@pytest.mark.parametrize("name", ["simclr", "mae", "dino_multicrop", "supervised"])
def test_large_images_are_cropped_in_workers_as_on_the_device(name):
    pipeline = make(name, 128)
    image = smooth_bytes(1, 3, 150, 190)
    off = dict.fromkeys(("jitter_probability", "gray_probability", "blur_probability", "solarize_probability"), 0.0)
    geometry = tuple(dataclasses.replace(spec, **off) for spec in pipeline.specs)
    on_device = ViewPipeline("geometry", geometry, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    for index in range(6):
        crops = pipeline.crop_in_worker(image[0], index, 2, 9)
        assert tuple(crop.shape[1] for crop in crops) == pipeline.view_sizes
        views = on_device(Batch(image, torch.tensor([index]), 2, 9)).views
        for crop, view in zip(crops, views, strict=True):
            assert crop.dtype == torch.uint8
            # bytes are rounded after each of the two passes, by half a level, the first times the sum of absolute
            # bicubic weights (below 1.3), and torchvision's byte weights are fixed-point: under 1.5 levels
            torch.testing.assert_close(crop / 255, view[0], rtol=0, atol=1.5 / 255)


def test_cropped_images_get_the_rest_on_the_device():
    pipeline = make("simclr_asymmetric", 112)
    images = smooth_bytes(5, 3, 130, 120)
    crops = [pipeline.crop_in_worker(images[i], i, 0, 0) for i in range(5)]
    batch = batch_of(tuple(torch.stack(view) for view in zip(*crops, strict=True)))
    views = pipeline(batch).views
    for v, spec in enumerate(pipeline.specs):
        rest = dataclasses.replace(spec, crop_scale=None, flip_probability=0.0)
        expected = torch.stack(
            [
                one_view_by_torchvision(batch.images[v][i], sample_keys(0, 0, torch.tensor([i]), f"view{v}"), rest)
                for i in range(5)
            ]
        )
        # no interpolation: roundings of the mean over 112 * 112 pixels dominate (pairwise sums, about 30),
        # of the blur (11 * 11 products) and of the hue (102), amplified as above
        torch.testing.assert_close(views[v], expected, rtol=0, atol=(30 + 121 + 102) * 2.0**-24 * 1.8**3 * 5)


def test_evaluation_view_of_a_large_image_is_resize_and_center_crop():
    pipeline = make("eval", 112)
    image = smooth_bytes(1, 3, 140, 201)[0]
    (crop,) = pipeline.crop_in_worker(image, 0, 0, 0)
    expected = TF.center_crop(TF.resize(image, [128], InterpolationMode.BICUBIC, antialias=True), [112, 112])
    assert torch.equal(crop, expected)
    (view,) = pipeline(batch_of((crop[None],))).views
    normalized = TF.normalize(crop / 255, list(MEAN), list(STD))
    # scaling, subtraction and division round once or twice on each side, at most 5 in magnitude
    torch.testing.assert_close(view[0], normalized, rtol=0, atol=6 * 5 * 2.0**-24)


def test_small_padded_crop_in_worker_keeps_the_size():
    (crop,) = make("supervised", 32).crop_in_worker(smooth_bytes(1, 3, 50, 41)[0], 3, 0, 0)
    assert crop.shape == (3, 32, 32)


def test_pipeline_pickles_for_workers():
    pipeline = make("simclr", 112)
    image = smooth_bytes(1, 3, 120, 130)[0]
    again = pickle.loads(pickle.dumps(pipeline.crop_in_worker))
    for a, b in zip(pipeline.crop_in_worker(image, 1, 0, 0), again(image, 1, 0, 0), strict=True):
        assert torch.equal(a, b)


def test_one_channel_skips_color_and_says_so():
    description = make("simclr", 28, 1).describe()
    assert set(description["skipped"]) == {"saturation", "hue", "grayscale"}
    assert all("one channel" in reason for reason in description["skipped"].values())
    assert description["specs"][0]["hue"] == 0
    assert make("simclr", 28, 3).describe()["skipped"] == {}
    assert make("mae", 28, 1).describe()["skipped"] == {}


@pytest.mark.parametrize("size", [28, 32, 96, 112, 224])
@pytest.mark.parametrize("name", sorted(VIEW_RECIPES))
def test_recipes_describe_themselves(name, size):
    pipeline = make(name, size)
    description = pipeline.describe()
    assert description["name"] == name
    assert json.loads(json.dumps(description)) == description
    rebuilt = tuple(
        ViewSpec(**{k: tuple(x) if isinstance(x, list) else x for k, x in spec.items()})
        for spec in description["specs"]
    )
    assert rebuilt == pipeline.specs
    assert pipeline.num_views == len(pipeline.view_sizes)
    if size <= 96:
        assert all(spec.blur_probability == 0 for spec in pipeline.specs)


def test_recipes_follow_their_sources():
    small, large = make("simclr", 32).specs[0], make("simclr", 224).specs[0]
    assert (small.brightness, small.contrast, small.saturation, small.hue) == (0.4, 0.4, 0.4, 0.1)
    assert (large.brightness, large.contrast, large.saturation, large.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (large.blur_probability, large.blur_kernel, large.blur_sigma) == (0.5, 23, (0.1, 2.0))
    assert (small.jitter_probability, small.gray_probability, small.crop_scale) == (0.8, 0.2, (0.08, 1.0))
    first, second = make("simclr_asymmetric", 224).specs
    assert (first.blur_probability, first.solarize_probability) == (1.0, 0.0)
    assert (second.blur_probability, second.solarize_probability) == (0.1, 0.2)
    assert (first.brightness, first.contrast, first.saturation, first.hue) == (0.4, 0.4, 0.2, 0.1)
    crops = make("dino_multicrop", 224)
    assert crops.view_sizes == (224, 224, *[96] * 8)
    assert [spec.crop_scale for spec in crops.specs[1:3]] == [(0.4, 1.0), (0.05, 0.4)]
    assert crops.specs[2].blur_probability == 0.5
    assert make("mae", 224).specs[0].crop_scale == (0.2, 1.0)
    (diet,) = make("diet", 224).specs
    assert (diet.jitter_probability, diet.brightness, diet.hue, diet.blur_probability) == (0.3, 0.4, 0.2, 0.2)
    many = make("strong_multiview", 32).specs
    assert many == (many[0],) * 4
    assert (many[0].brightness, many[0].hue, many[0].gray_probability) == (0.8, 0.2, 0.2)
    assert make("simclr_three", 224).specs == (large,) * 3
    assert make("simclr_and_image", 224).specs == (large, large, *make("eval", 224).specs)
    assert (make("supervised", 32).specs[0].pad, make("supervised", 224).specs[0].pad) == (4, 0)


def test_overrides_apply():
    pipeline = make("dino_multicrop", 32, num_local=2, local_size=14, crop_scale=[0.2, 1], blur_probability=0)
    assert pipeline.view_sizes == (32, 32, 14, 14)
    assert [spec.crop_scale for spec in pipeline.specs] == [(0.2, 1)] * 2 + [(0.05, 0.4)] * 2
    assert make("dino_multicrop", 32, num_local=0).num_views == 2
    assert make("strong_multiview", 32, num_views=6).num_views == 6
    assert make("swav_multicrop", 32, local_crop_scale=[0.1, 0.3]).specs[2].crop_scale == (0.1, 0.3)
    assert make("simclr", 32, blur_probability=0.5).specs[1].blur_probability == 0.5


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("simclrr", {}, "Did you mean 'simclr'"),
        ("simclr", {"blur_probabilty": 0}, "Did you mean 'blur_probability'"),
        ("simclr", {"num_local": 2}, "Unknown setting 'num_local'"),
        ("simclr", {"size": 16}, "Unknown setting 'size'"),
        ("simclr", {"crop_scale": [0.5, 0.2]}, "crop_scale"),
        ("simclr", {"crop_scale": [0.5]}, "pairs of numbers"),
        ("simclr", {"crop_scale": [0.0, 1.0]}, "crop_scale"),
        ("simclr", {"crop_ratio": [0, 1]}, "crop_ratio"),
        ("simclr", {"hue": 0.7}, "hue"),
        ("simclr", {"brightness": -1}, "brightness"),
        ("simclr", {"flip_probability": 1.5}, "flip_probability"),
        ("simclr", {"flip_probability": "often"}, "must be numbers"),
        ("simclr", {"interpolation": "nearest"}, "interpolation"),
        ("simclr", {"blur_probability": 1, "blur_kernel": 4}, "odd"),
        ("simclr", {"blur_probability": 1, "blur_kernel": 65}, "twice the size"),
        ("simclr", {"blur_probability": 1, "blur_sigma": [0, 1]}, "blur_sigma"),
        ("simclr", {"solarize_threshold": 128}, "solarize_threshold"),
        ("simclr", {"pad": 4}, "crop_scale"),
        ("dino_multicrop", {"num_local": -1}, "num_local"),
        ("dino_multicrop", {"num_views": 3}, "Unknown setting 'num_views'"),
        ("strong_multiview", {"num_views": 1}, "num_views"),
        ("strong_multiview", {"num_views": 2.0}, "num_views"),
        ("dino_multicrop", {"local_size": 0}, "at least 1 pixel"),
    ],
)
def test_wrong_settings_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(name, 32, **overrides)


def test_wrong_channels_are_refused():
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        build_views("eval", image_size=32, channels=2, mean=(0.5, 0.5), std=(1.0, 1.0))
    with pytest.raises(ConfigError, match="mean"):
        build_views("eval", image_size=32, channels=3, mean=(0.5,), std=(1.0,))


def test_wrong_batches_are_refused():
    pipeline = make("simclr", 32)
    with pytest.raises(DataError, match="uint8"):
        pipeline(batch_of(torch.rand(2, 3, 32, 32)))
    with pytest.raises(DataError, match=r"\(B, 3, H, W\)"):
        pipeline(batch_of(smooth_bytes(2, 1, 32, 32)))
    with pytest.raises(DataError, match="one crop a view"):
        pipeline(batch_of((smooth_bytes(2, 3, 32, 32),)))
