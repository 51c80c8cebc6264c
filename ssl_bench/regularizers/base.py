"""The contract of a regularizer, and how its term joins a method's loss.

Shapes: B images on this rank, N over all ranks, V views of an image, D width of the features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ssl_bench.distributed import gather_with_grad
from ssl_bench.errors import ConfigError
from ssl_bench.losses.common import at_least_float32
from ssl_bench.records import Batch, LossOutput
from ssl_bench.registry import Entry, Registry

LAYERS = {"embedding": "backbone", "projection": "projector"}  # and the module of a method whose output they are

REGULARIZERS: Registry[type[Regularizer]] = Registry("regularizer", "ssl_bench.regularizers")
register_regularizer = REGULARIZERS.register


class Regularizer:
    """A differentiable term on a method's features. Keyword-only constructor arguments are its schema.

    Class attributes:
        layer: Features it acts on unless the study says otherwise: "embedding" (backbone) or "projection".
    """

    registry_entry: ClassVar[Entry]
    layer: ClassVar[str] = "projection"

    def __call__(self, views: tuple[Tensor, ...]) -> Tensor:
        """Value of the term, a scalar to minimize.

        Args:
            views: Features of every view over all ranks, (N, D) each, in at least float32.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AttachedRegularizer:
    """A regularizer with its place in a study: what it weighs, where it looks, and from which epoch on."""

    name: str
    term: Regularizer
    weight: float
    layer: str
    start_epoch: int


def regularized_loss(
    loss: Callable[[], LossOutput], owner: nn.Module, regularizers: Sequence[AttachedRegularizer], batch: Batch
) -> LossOutput:
    """The loss plus every regularizer's weighted term, each computed on the features of the global batch.

    Features are read off the forward passes that the loss makes itself; passes without gradient, such as a
    momentum encoder's, are left out. The terms are the same on every rank, so their mean over ranks is theirs.

    Args:
        loss: Computes the method's own loss.
        owner: The method, whose `backbone` and `projector` are listened to.
        regularizers: Those of the trial.
        batch: The present batch.

    Raises:
        ConfigError: If the loss never passes whole views through the layer.
    """
    active = [r for r in regularizers if batch.epoch >= r.start_epoch]
    features: dict[str, list[Tensor]] = {r.layer: [] for r in active}
    handles = [_record(_module(owner, layer), rows) for layer, rows in features.items()]
    try:
        output = loss()
    finally:
        for handle in handles:
            handle.remove()
    views = {layer: _views(rows, len(batch), owner, layer) for layer, rows in features.items()}
    terms = {f"reg_{r.name}": r.term(views[r.layer]) for r in active}
    total = output.total
    for r in active:
        total = total + r.weight * terms[f"reg_{r.name}"]
    return LossOutput(total, **output.terms, **terms)


def check_layers(owner: nn.Module, regularizers: Sequence[AttachedRegularizer]) -> None:
    """Raise ConfigError if a method lacks the layer that a regularizer looks at."""
    for regularizer in regularizers:
        _module(owner, regularizer.layer)


def _module(owner: nn.Module, layer: str) -> nn.Module:
    module = getattr(owner, LAYERS[layer], None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"A regularizer on the {layer} needs a method with a `{LAYERS[layer]}`, but {type(owner).__name__} has "
            "none. Set the regularizer's `layer: embedding`."
        )
    return module


def _record(module: nn.Module, rows: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    def keep(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            rows.append(output)

    return module.register_forward_hook(keep)


def _views(rows: list[Tensor], num: int, owner: nn.Module, layer: str) -> tuple[Tensor, ...]:
    """One (N, D) tensor a view; views that were concatenated for one pass are taken apart."""
    if not rows or any(row.ndim != 2 or len(row) % num for row in rows):
        raise ConfigError(
            f"A regularizer on the {layer} needs a loss that passes whole views through `{LAYERS[layer]}`, but that of "
            f"{type(owner).__name__} does not. Choose another layer or method."
        )
    return tuple(at_least_float32(gather_with_grad(view)) for row in rows for view in row.split(num))


def build_regularizers(specs: Sequence[Mapping[str, object]]) -> list[AttachedRegularizer]:
    """Regularizers from a trial's plain data: name, weight, layer, start_epoch, arguments."""
    return [
        AttachedRegularizer(
            name=str(spec["name"]),
            term=REGULARIZERS.get(str(spec["name"]))(**spec["arguments"]),  # type: ignore[arg-type]
            weight=float(spec["weight"]),  # type: ignore[arg-type]
            layer=str(spec["layer"]),
            start_epoch=int(spec["start_epoch"]),  # type: ignore[call-overload]
        )
        for spec in specs
    ]
