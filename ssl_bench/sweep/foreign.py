"""Judge a backbone that was not trained here with the same protocols."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ssl_bench.data import load_dataset
from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import PROTOCOLS
from ssl_bench.nn.backbone import Backbone, build_backbone
from ssl_bench.nn.backbone_io import FACTS, load_backbone
from ssl_bench.random import derive_seed
from ssl_bench.sweep.stages import device


def evaluate_backbone(
    backbone: str, *, weights: Path | None, dataset_name: str, protocols: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """Rows of each protocol for one backbone.

    Args:
        backbone: Folder with an exported backbone, or a backbone's name ("timm:NAME", "torchvision:NAME" too).
        weights: Safetensors file for a named backbone; without it the weights are random, from the seed.
        dataset_name: Dataset.
        protocols: Protocols, with their default arguments.
        seed: Seed of the protocols and of random weights.

    Raises:
        ConfigError: If the weights do not fit the backbone.
    """
    judges = [PROTOCOLS.get(name)() for name in protocols]
    dataset = load_dataset(dataset_name)
    network = _network(backbone, weights, dataset, seed)
    with tempfile.TemporaryDirectory() as folder:
        context = EvaluationContext(network, dataset, work_dir=Path(folder), seed=seed, device=device())
        return [dataclasses.asdict(row) for judge in judges for row in judge.run(context)]


def _network(backbone: str, weights: Path | None, dataset: Any, seed: int) -> Backbone:
    if (Path(backbone) / FACTS).exists():
        if weights is not None:
            raise ConfigError("`--weights` belongs to a backbone given by name; an exported folder holds its own.")
        return load_backbone(Path(backbone))
    torch.manual_seed(derive_seed(seed, "backbone"))
    network = build_backbone(backbone, in_channels=dataset.channels, image_size=dataset.image_size)
    if weights is not None:
        try:
            network.load_state_dict(load_file(weights))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{weights} must hold the tensors of {backbone!r}, got: {error}") from error
    return network
