"""A view is a function of (seed, epoch, sample index, view): no bit of it depends on anything else."""

import pytest
import torch

from ssl_bench.records import Batch
from ssl_bench.views import ViewPipeline, build_views, pipeline

CASES = [
    ("simclr", 32, 3, {}),
    ("simclr", 28, 1, {}),
    ("simclr", 33, 3, {"interpolation": "bilinear", "blur_probability": 0.5, "solarize_probability": 0.3}),
    ("simclr", 1, 3, {}),
    ("simclr", 3, 3, {}),
    ("simclr", 32, 3, {"hue": 0}),
    ("simclr_asymmetric", 112, 3, {}),
    ("dino_multicrop", 32, 3, {"num_local": 1, "local_size": 13}),
    ("supervised", 32, 3, {}),
    ("mae", 32, 3, {}),
    ("eval", 32, 3, {}),
]


def make(name: str, size: int, channels: int, overrides: dict) -> ViewPipeline:
    return build_views(
        name, image_size=size, channels=channels, mean=(0.4,) * channels, std=(0.3,) * channels, overrides=overrides
    )


def batch_of(size: int, channels: int) -> Batch:
    num = 17 if size <= 33 else 8
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8, generator=g)
    return Batch(images, torch.randperm(1000, generator=g)[:num], epoch=1, seed=7)


def part(batch: Batch, places: torch.Tensor) -> Batch:
    return Batch(batch.images[places], batch.index[places], batch.epoch, batch.seed)


def assert_same(views: tuple, expected: tuple) -> None:
    for view, other in zip(views, expected, strict=True):
        assert torch.equal(view, other)


@pytest.mark.parametrize(("name", "size", "channels", "overrides"), CASES)
def test_views_do_not_depend_on_batch_composition_or_order(name, size, channels, overrides):
    views = make(name, size, channels, overrides)
    batch = batch_of(size, channels)
    expected = views(batch).views
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    groups = [shuffled, torch.arange(1, len(batch)), torch.tensor([3, 3, 3]), *torch.arange(len(batch)).split(2)]
    groups += list(torch.arange(len(batch)).split(1))
    for places in groups:
        assert_same(views(part(batch, places)).views, tuple(view[places] for view in expected))


@pytest.mark.parametrize(("name", "size", "channels", "overrides"), CASES)
def test_views_do_not_depend_on_chunks_or_threads(name, size, channels, overrides, monkeypatch):
    views = make(name, size, channels, overrides)
    batch = batch_of(size, channels)
    expected = views(batch).views
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(views(batch).views, expected)
    finally:
        torch.set_num_threads(before)
    for samples in (1, 7):
        monkeypatch.setattr(pipeline, "CHUNK_PIXELS", samples * size**2)
        assert_same(views(batch).views, expected)


@pytest.mark.parametrize(("name", "size", "channels", "overrides"), CASES)
def test_masked_form_for_accelerators_equals_the_subset_form(name, size, channels, overrides):
    views = make(name, size, channels, overrides)
    batch = batch_of(size, channels)
    with torch.no_grad():
        masked = tuple(views._view(batch, v, subset=False) for v in range(views.num_views))
    assert_same(masked, views(batch).views)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "size", "channels", "overrides"), CASES)
def test_views_are_the_same_on_an_accelerator(name, size, channels, overrides):
    views = make(name, size, channels, overrides)
    batch = batch_of(size, channels)
    torch.set_float32_matmul_precision("high")
    try:
        on_device = views(batch.to("cuda")).views
    finally:
        torch.set_float32_matmul_precision("highest")
    for view, other in zip(on_device, views(batch).views, strict=True):
        # the bound of tests/unit/views/test_pipeline.py: both sides round like torchvision and we do
        torch.testing.assert_close(view.cpu(), other, rtol=0, atol=36 * max(size, 8) * 2.0**-24 * 1.8**3 * 5)


def test_seed_epoch_index_and_view_each_change_the_view():
    views = make("simclr", 32, 3, {})
    batch = batch_of(32, 3)
    first, second = views(batch).views
    assert not torch.equal(first, second)
    others = [
        Batch(batch.images, batch.index, batch.epoch, batch.seed + 1),
        Batch(batch.images, batch.index, batch.epoch + 1, batch.seed),
        Batch(batch.images, batch.index + 1, batch.epoch, batch.seed),
    ]
    for other in others:
        changed = (views(other).views[0] != first).flatten(1).any(1)
        assert changed.all()


def test_a_view_does_not_depend_on_how_many_follow_it():
    batch = batch_of(32, 3)
    few, many = (make("dino_multicrop", 32, 3, {"num_local": n})(batch).views for n in (1, 4))
    assert_same(few, many[:3])


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_views_ignore_autocast_and_reduced_precision_and_leave_state_alone(precision):
    views = make("simclr", 32, 3, {})
    batch = batch_of(32, 3)
    expected = views(batch).views
    random_state = torch.get_rng_state()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = views(batch)
            assert torch.get_float32_matmul_precision() == precision
            assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_same(got.views, expected)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(got.images, batch_of(32, 3).images)
    assert not any(view.requires_grad for view in got.views)
