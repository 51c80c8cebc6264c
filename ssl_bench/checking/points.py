"""The single-process points of "when a method counts as working".

1 builds and round-trips its configuration through YAML
2 loss finite in float32 and bfloat16 autocast; exactly the declared parameters receive gradient; no label needed
3 equals its oracle (the method's test file under tests/reference)
4 two processes equal one (ssl_bench.checking.distributed)
5 stopping and resuming equals the uninterrupted run
6 embeddings do not depend on batch mates; the state dict round-trips
7 a short run beats the untrained backbone under k-NN
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import yaml
from torch import Tensor

from ssl_bench.data.dataset import Dataset, load_dataset
from ssl_bench.errors import SSLBenchError
from ssl_bench.methods import METHODS, SSLMethod
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.random import derive_seed
from ssl_bench.records import Batch, Recipe
from ssl_bench.views import ViewPipeline, build_views

DATASET = "fashion_mnist_mini"
BACKBONE_OF_KIND = {"cnn": "conv4", "vit": "vit_micro", "pixels": "pixels"}


@dataclasses.dataclass(frozen=True)
class PointResult:
    """Outcome of one point: "pass", "fail", or "skip" with the reason in `detail`."""

    point: int
    status: str
    detail: str = ""


def kinds_of(name: str) -> tuple[str, ...]:
    """Backbone kinds on which a method is checked."""
    cls = METHODS.get(name)
    return (cls.fixed_backbone,) if cls.fixed_backbone else cls.backbones


def make_views(name: str, dataset: Dataset) -> tuple[Recipe, ViewPipeline]:
    """The method's recipe for small data and its view pipeline; a baseline gets the evaluation view."""
    cls = METHODS.get(name)
    recipe = cls.default_recipe(dataset.family) if cls.trainable else Recipe(views="eval", source="nothing is trained")
    views = build_views(
        recipe.views, image_size=dataset.image_size, channels=dataset.channels, mean=dataset.mean, std=dataset.std
    )
    return recipe, views


def make_method(name: str, kind: str, dataset: Dataset, num_views: int, seed: int = 0) -> SSLMethod:
    """The method with its default arguments on the small backbone of a kind."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "backbone"))
        backbone = build_backbone(BACKBONE_OF_KIND[kind], in_channels=dataset.channels, image_size=dataset.image_size)
    facts = {
        "num_classes": dataset.num_classes,
        "num_samples": len(dataset.split(dataset.pretrain_split)),
        "num_views": num_views,
    }
    return build_method(
        name, backbone, seed=seed, facts=facts, arguments=METHODS.get(name).default_arguments(dataset.family)
    )


def make_batch(name: str, dataset: Dataset, views: ViewPipeline, num: int = 16, start: int = 0) -> Batch:
    """A batch of `num` real images from `start` on, with views; labels only where the method declares them."""
    store = dataset.split(dataset.pretrain_split)
    index = torch.arange(start, start + num)
    labels = torch.as_tensor(store.labels[start : start + num]) if METHODS.get(name).uses_labels else None
    return views(Batch(images=store.take(index), index=index, epoch=0, seed=0, labels=labels))


def check_builds(name: str, dataset: Dataset) -> str:
    """Point 1; on the meta device too, as a study builds a method to check its arguments before anything runs."""
    recipe, views = make_views(name, dataset)
    for kind in kinds_of(name):
        make_method(name, kind, dataset, views.num_views)
        with torch.device("meta"):
            make_method(name, kind, dataset, views.num_views)
    arguments = METHODS.get(name).default_arguments(dataset.family)
    stored = yaml.safe_load(
        yaml.safe_dump({"arguments": _plain(arguments), "recipe": _plain(dataclasses.asdict(recipe))})
    )
    assert Recipe(**{key: _tuple(value) for key, value in stored["recipe"].items()}) == recipe, "recipe changed in YAML"
    assert {key: _tuple(value) for key, value in stored["arguments"].items()} == dict(arguments), "arguments changed"
    return f"on {', '.join(kinds_of(name))}"


def check_loss(name: str, dataset: Dataset) -> str:
    """Point 2."""
    _, views = make_views(name, dataset)
    for kind in kinds_of(name):
        method = make_method(name, kind, dataset, views.num_views).train()
        batch = make_batch(name, dataset, views, num=max(16, method.min_global_batch))
        assert method.uses_labels or batch.labels is None
        for autocast in (False, True):
            method.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                total = method.loss(batch.views, batch).total
            assert total.dim() == 0, f"the loss must be a scalar, got shape {tuple(total.shape)}"
            assert torch.isfinite(total), f"loss {float(total)} on {kind} with autocast={autocast}"
            total.backward()
            declared = {parameter_name for group in method.parameter_groups() for parameter_name, _ in group.parameters}
            for parameter_name, p in method.named_parameters():
                has_gradient = p.grad is not None
                if parameter_name in declared:
                    assert has_gradient, f"{parameter_name} receives no gradient on {kind}"
                    assert p.grad is None or torch.isfinite(p.grad).all(), (
                        f"{parameter_name} has a non-finite gradient on {kind}"
                    )
                else:
                    assert not has_gradient, f"{parameter_name} is not declared trainable but receives gradient"
    return "float32 and bfloat16"


def check_embedding(name: str, dataset: Dataset) -> str:
    """Point 6."""
    _recipe, views = make_views(name, dataset)
    store = dataset.split("validation")
    evaluate = build_views(
        "eval", image_size=dataset.image_size, channels=dataset.channels, mean=dataset.mean, std=dataset.std
    )
    images = evaluate(Batch(images=store.take(torch.arange(9)), index=torch.arange(9), epoch=0, seed=0)).views[0]
    for kind in kinds_of(name):
        method = make_method(name, kind, dataset, views.num_views).train()
        embedding = method.embed(images)
        assert method.training, "embed must restore the training mode"
        assert embedding.shape == (9, method.evaluation_backbone.embed_dim), f"embed gave {tuple(embedding.shape)}"
        assert not embedding.requires_grad
        alone = torch.cat([method.embed(image[None]) for image in images])
        # float32 sums of fewer than 2^12 terms in another order: relative 2^12 * 2^-24
        scale = embedding.abs().max().clamp(min=1e-30)
        assert (alone - embedding).abs().max() <= 2.5e-4 * scale, "the embedding depends on batch mates"
        other = make_method(name, kind, dataset, views.num_views, seed=1)
        other.load_state_dict(copy.deepcopy(method.state_dict()))
        assert torch.equal(other.embed(images), embedding), "the state dict does not restore the embedding"
    return "batch-independent"


def run_point(point: int, function: Callable[[str, Dataset], str], name: str, dataset: Dataset) -> PointResult:
    """Run one point; an exception is a failure with its message."""
    try:
        return PointResult(point, "pass", function(name, dataset))
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        kind = "" if isinstance(error, AssertionError | SSLBenchError) else f"{type(error).__name__}: "
        return PointResult(point, "fail", f"{kind}{first}" or type(error).__name__)


def small_dataset() -> Dataset:
    """The embedded dataset every check runs on."""
    return load_dataset(DATASET)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    assert not isinstance(value, Tensor)
    return value


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value
