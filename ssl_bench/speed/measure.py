"""`ssl-bench speed`: ratios of the harness to bare floors on this machine, within one run.

Every figure is the median of several repeats; the things compared take turns, so that a drift of the machine
meets all of them. Denormals are flushed on both sides.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from ssl_bench.checking.points import make_method, make_views, small_dataset
from ssl_bench.data import Dataset, PretrainDataModule
from ssl_bench.evaluation.protocols.knn import knn_rankings
from ssl_bench.optim import apply_schedule, build_optimizer
from ssl_bench.records import Batch
from ssl_bench.training import build_trainer
from ssl_bench.views import build_views

STEP_METHODS = ("simclr", "vicreg", "byol")
STEP_BATCHES = 30


@dataclasses.dataclass(frozen=True)
class Figure:
    """One thing measured: median, fastest and slowest in `unit`, and its ratio to the floor of its table."""

    table: str
    name: str
    unit: str
    median: float
    low: float
    high: float
    ratio: float


def measure(repeats: int) -> list[Figure]:
    """All figures on this process's threads."""
    torch.set_flush_denormal(True)
    dataset = small_dataset()
    return [*views_figures(repeats), *step_figures(dataset, repeats), *knn_figures(repeats)]


def in_turn(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each function's figures over the repeats, after one turn that does not count."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, function in runs.items():
            value = function()
            if repeat:
                figures[name].append(value)
    return figures


def table(title: str, unit: str, figures: dict[str, list[float]], floor: str) -> list[Figure]:
    """Figures with their ratios to the one named `floor`."""
    base = statistics.median(figures[floor])
    return [
        Figure(title, name, unit, statistics.median(v), min(v), max(v), statistics.median(v) / base)
        for name, v in figures.items()
    ]


def rate(function: Callable[[], Any], count: int) -> float:
    """Items a second of one call that handles `count` items."""
    began = time.perf_counter()
    function()
    return count / (time.perf_counter() - began)


def views_figures(repeats: int, size: int = 32) -> list[Figure]:
    """Two SimCLR views of color images (blur on), images a second, against torchvision one image at a time."""
    many, few = 512, 64
    images = torch.randint(0, 256, (many, 3, size, size), dtype=torch.uint8)
    batch = Batch(images=images, index=torch.arange(many), epoch=0, seed=0)
    pipeline = build_views(
        "simclr",
        image_size=size,
        channels=3,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        overrides={"blur_probability": 0.5},
    )
    spec = pipeline.specs[0]
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, spec.crop_scale, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(spec.brightness, spec.contrast, spec.saturation, spec.hue)], 0.8),
            v2.RandomGrayscale(spec.gray_probability),
            v2.RandomApply([v2.GaussianBlur(spec.blur_kernel, spec.blur_sigma)], 0.5),
        ]
    )
    finish = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
    pictures = [v2.functional.to_pil_image(image) for image in images[:few]]

    def per_sample(samples: list[Any]) -> Tensor:
        return torch.stack([finish(transform(sample)) for sample in samples for _ in range(2)])

    runs: dict[str, Callable[[], float]] = {
        "torchvision on PIL": lambda: rate(lambda: per_sample(pictures), few),
        "torchvision v2 on tensors": lambda: rate(lambda: per_sample(list(images[:few])), few),
        "ssl_bench": lambda: rate(lambda: pipeline(batch), many),
        "bytes to floats alone, twice": lambda: rate(lambda: (images.float().div(255), images.float().div(255)), many),
    }
    return table(f"two SimCLR views, {size} px", "images/s", in_turn(runs, repeats), "torchvision on PIL")


def step_figures(dataset: Dataset, repeats: int) -> list[Figure]:
    """Milliseconds a training step in the Trainer, views included, against a bare loop over ready-made views."""
    found: list[Figure] = []
    for name in STEP_METHODS:
        runs = {
            "bare loop": partial(_bare_step, name, dataset),
            "in the Trainer, with views": partial(_trainer_step, name, dataset),
        }
        found += table(f"step of {name}, conv4, batch 128", "ms", in_turn(runs, repeats), "bare loop")
    return found


def _bare_step(name: str, dataset: Dataset) -> float:
    recipe, views = make_views(name, dataset)
    method = make_method(name, "cnn", dataset, views.num_views).train()
    optimizer = build_optimizer(method.parameter_groups(), recipe)
    index = torch.arange(recipe.global_batch_size)
    store = dataset.split("train")
    batch = views(Batch(images=store.take(index), index=index, epoch=0, seed=0))
    began = time.perf_counter()
    for step in range(STEP_BATCHES):
        apply_schedule(optimizer, recipe, step, 10 * STEP_BATCHES, STEP_BATCHES)
        optimizer.zero_grad()
        method.loss(batch.views, batch).total.backward()
        optimizer.step()
        method.after_optimizer_step(step + 1, STEP_BATCHES)
    return (time.perf_counter() - began) / STEP_BATCHES * 1e3


def _trainer_step(name: str, dataset: Dataset) -> float:
    recipe, views = make_views(name, dataset)
    method = make_method(name, "cnn", dataset, views.num_views)
    method.recipe = dataclasses.replace(recipe, warmup_epochs=0.0)
    data = PretrainDataModule(dataset, views, global_batch_size=recipe.global_batch_size, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder=Path(folder), max_epochs=1, max_steps=STEP_BATCHES)
        began = time.perf_counter()
        trainer.fit(method, datamodule=data)
    return (time.perf_counter() - began) / STEP_BATCHES * 1e3


def knn_figures(repeats: int, bank: int = 20_000, queries: int = 2_000, width: int = 512) -> list[Figure]:
    """Seconds of exact k-NN (k = 20 and 200) against the bare matrix product."""
    rows, labels, asked = torch.randn(bank, width), torch.randint(0, 10, (bank,)), torch.randn(queries, width)

    def seconds(function: Callable[[], Any]) -> float:
        return 1 / rate(function, 1)

    runs = {
        "bare product": lambda: seconds(lambda: [part @ rows.T for part in asked.split(500)]),
        "k-NN": lambda: seconds(
            lambda: knn_rankings(rows, labels, asked, ks=[20, 200], temperature=0.07, num_classes=10)
        ),
    }
    return table(f"k-NN, bank {bank:,} x {width}, {queries:,} queries", "s", in_turn(runs, repeats), "bare product")
