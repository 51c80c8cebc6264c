"""A view with batch styles depends on the set of the global batch, not on its order, ranks or chunks."""

import contextlib

import pytest
import torch

from ssl_bench import distributed as D
from ssl_bench.records import Batch
from ssl_bench.views import ViewPipeline, build_views, pipeline
from tests.distributed_harness import run_on_ranks

# standardized pixels are transformed and transformed back in batches of other sizes, whose kernels may round
# differently: 2^10 values in [0, 1] in float32 and color operations of slope below 10, over std 0.3
CLOSE = {"rtol": 0, "atol": 1e-3}


def make() -> ViewPipeline:
    overrides = {"style_area": [0.02, 1.0], "solarize_probability": 0.0}
    return build_views("simclr", image_size=32, channels=3, mean=(0.4,) * 3, std=(0.3,) * 3, overrides=overrides)


def batch_of(num: int = 8) -> Batch:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8, generator=g)
    return Batch(images, torch.randperm(1000, generator=g)[:num], epoch=1, seed=7)


def part(batch: Batch, places: torch.Tensor) -> Batch:
    return Batch(batch.images[places], batch.index[places], batch.epoch, batch.seed)


def assert_close(views: tuple, expected: tuple) -> None:
    for view, other in zip(views, expected, strict=True):
        torch.testing.assert_close(view, other, **CLOSE)


def test_order_and_chunks_do_not_matter(monkeypatch):
    views, batch = make(), batch_of()
    expected = views(batch).views
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    assert_close(views(part(batch, order)).views, tuple(view[order] for view in expected))
    monkeypatch.setattr(pipeline, "CHUNK_PIXELS", 3 * 32**2)
    assert_close(views(batch).views, expected)


def test_masked_form_for_accelerators_equals_the_subset_form():
    views, batch = make(), batch_of()
    with torch.no_grad():
        masked = tuple(views._view(batch, v, subset=False) for v in range(views.num_views))
    assert_close(masked, views(batch).views)


def test_composition_of_the_batch_matters():
    views, batch = make(), batch_of()
    whole = views(batch).views[0]
    parts = torch.cat([views(part(batch, places)).views[0] for places in torch.arange(len(batch)).split(2)])
    assert (whole - parts).abs().max() > 0.1


def on_rank(rank, world_size, shares):
    with D.uneven_batches() if len(set(map(len, shares))) > 1 else contextlib.nullcontext():
        return make()(part(batch_of(), torch.tensor(shares[rank]))).views


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 0, 3], [1, 7, 4], [2, 5]]])
def test_ranks_together_make_the_views_of_one_process(shares):
    ranks = run_on_ranks(len(shares), on_rank, shares)
    places = torch.tensor([place for share in shares for place in share])
    expected = tuple(view[places] for view in make()(batch_of()).views)
    assert_close(tuple(torch.cat(views) for views in zip(*ranks, strict=True)), expected)
