"""Build a method from its name and the facts of its data: the one place where blanks are filled in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.base import METHODS, SSLMethod
from ssl_bench.nn.backbone import Backbone
from ssl_bench.random import derive_seed
from ssl_bench.regularizers.base import build_regularizers, check_layers


def build_method(
    name: str,
    backbone: Backbone,
    *,
    seed: int,
    facts: Mapping[str, int],
    arguments: Mapping[str, Any],
    regularizers: Sequence[Mapping[str, Any]] = (),
) -> SSLMethod:
    """Construct a method whose initial weights are a function of the seed alone.

    Args:
        name: Registry name.
        backbone: The network to pretrain (built by the caller, seeded by `derive_seed(seed, "backbone")`).
        seed: Seed of the run.
        facts: `num_classes`, `num_samples` and `num_views`; those the constructor declares without a
            default are passed on.
        arguments: The method's own keyword arguments, complete.
        regularizers: Terms added to its loss, as in a trial's `method.regularizers`.

    Raises:
        ConfigError: If an argument is not one of the constructor's, or a regularizer finds no layer.
    """
    cls = METHODS.get(name)
    parameters = inspect.signature(cls.__init__).parameters
    filled = {
        key: value
        for key, value in facts.items()
        if key in parameters and parameters[key].default is inspect.Parameter.empty
    }
    unknown = [key for key in arguments if key not in parameters or key in ("self", "backbone")]
    if unknown:
        known = ", ".join(key for key in parameters if key not in ("self", "backbone"))
        raise ConfigError(f"Method {name!r} takes the arguments {known or 'none'}, got {', '.join(unknown)}.")
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "method"))
        method = cls(backbone, **{**filled, **arguments})
    method.regularizers = build_regularizers(regularizers)
    check_layers(method, method.regularizers)
    return method
