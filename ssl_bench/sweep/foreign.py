"""Judge a backbone that was not trained here with the same protocols."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ssl_bench.data import DATASETS, load_dataset
from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import PROTOCOLS, Protocol
from ssl_bench.nn.backbone import Backbone, build_backbone
from ssl_bench.nn.backbone_io import FACTS, load_backbone
from ssl_bench.random import derive_seed
from ssl_bench.sweep.plan import check_arguments
from ssl_bench.sweep.stages import device

NESTED = ("state_dict", "model", "model_state_dict")  # where training codes keep the weights in a checkpoint
COUNTER = "num_batches_tracked"  # of batch norm; takes no part in evaluation and is missing in old files


def evaluate_backbone(
    backbone: str,
    *,
    weights: Path | None,
    prefix: str | None,
    dataset_name: str,
    dataset_arguments: Mapping[str, Any],
    protocols: Sequence[str],
    protocol_arguments: Mapping[str, Any],
    seed: int,
) -> list[dict[str, Any]]:
    """Rows of each protocol for one backbone.

    Args:
        backbone: Folder with an exported backbone, or a backbone's name ("timm:NAME", "torchvision:NAME" too).
        weights: Weights file for a named backbone, see `read_weights`; without it the weights are random, from
            the seed.
        prefix: What stands before the backbone's parameter names in the file; None to find it.
        dataset_name: Dataset.
        dataset_arguments: Its arguments.
        protocols: Protocols.
        protocol_arguments: What differs from their defaults, by "protocol.argument".
        seed: Seed of the protocols and of random weights.

    Raises:
        ConfigError: If the weights do not fit the backbone, or the backbone the images.
    """
    judges = [_protocol(name, protocol_arguments) for name in protocols]
    for key in protocol_arguments:
        if key.partition(".")[0] not in protocols:
            raise ConfigError(
                f"An argument of a protocol must read PROTOCOL.KEY=VALUE, with a protocol of {protocols}, got {key!r}."
            )
    where = f"dataset {dataset_name!r}"
    arguments = check_arguments(DATASETS.get(dataset_name).__init__, dataset_arguments, where, skip=("root",))
    dataset = load_dataset(dataset_name, **arguments)
    network = _network(backbone, weights, prefix, dataset, seed)
    with tempfile.TemporaryDirectory() as folder:
        context = EvaluationContext(network, dataset, work_dir=Path(folder), seed=seed, device=device())
        return [dataclasses.asdict(row) for judge in judges for row in judge.run(context)]


def _protocol(name: str, arguments: Mapping[str, Any]) -> Protocol:
    cls = PROTOCOLS.get(name)
    own = {key.partition(".")[2]: value for key, value in arguments.items() if key.partition(".")[0] == name}
    protocol: Protocol = cls(**check_arguments(cls.__init__, own, f"protocol {name!r}"))
    return protocol


def _network(backbone: str, weights: Path | None, prefix: str | None, dataset: Any, seed: int) -> Backbone:
    if Path(backbone).is_dir():
        if not (Path(backbone) / FACTS).exists():
            raise ConfigError(
                f"A folder given as `--backbone` must hold {FACTS}, as a trial's does; {backbone} does not."
            )
        if weights is not None:
            raise ConfigError("`--weights` belongs to a backbone given by name; an exported folder holds its own.")
        network = load_backbone(Path(backbone))
        if network.arguments["in_channels"] != dataset.channels:
            raise ConfigError(
                f"The backbone in {backbone} takes images of {network.arguments['in_channels']} channels, but "
                f"{dataset.name!r} has {dataset.channels}. Choose another dataset."
            )
        network.check_image_size(dataset.image_size)
        return network
    torch.manual_seed(derive_seed(seed, "backbone"))
    network = build_backbone(backbone, in_channels=dataset.channels, image_size=dataset.image_size)
    if weights is not None:
        try:
            network.load_state_dict(fit_weights(read_weights(weights), network, where=str(weights), prefix=prefix))
        except RuntimeError as error:  # shapes
            raise ConfigError(f"{weights} must fit {backbone!r} on {dataset.name!r}, got: {error}") from error
    return network


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a torch checkpoint, read as tensors and plain types only.

    Raises:
        ConfigError: If the file can't be read so, or holds no tensors by name.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"`--weights` must be a file, got {str(path)!r}, which does not exist.") from error
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise ConfigError(f"{path} must be a whole safetensors file or torch checkpoint, got: {error}") from error
    except Exception as error:  # the unpickler refuses whatever is no tensor and no plain type, by several classes
        raise ConfigError(
            f"{path} must hold tensors and plain types only, since reading anything else would run code from the file. "
            "Where you trust it, save the tensors alone, with safetensors.torch.save_file(state_dict, "
            f"'weights.safetensors'). Got: {str(error).splitlines()[0]}"
        ) from error
    for key in NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise ConfigError(f"{path} must hold tensors by name, at its top or under {', '.join(NESTED)}; it holds none.")
    return tensors


def fit_weights(
    tensors: Mapping[str, Tensor], network: Backbone, *, where: str, prefix: str | None = None
) -> dict[str, Tensor]:
    """The state dict of a network, found among a checkpoint's tensors; heads and other parts are left out.

    Args:
        tensors: Names to tensors. The backbone's own names may follow any prefix ("module.encoder.").
        network: The backbone they are for.
        where: Names the file in errors.
        prefix: The prefix, if it is known.

    Raises:
        ConfigError: If no prefix or several give every parameter.
    """
    state = network.state_dict()
    wrapper = "net." if all(name.startswith("net.") for name in state) else ""  # ours around a library's model
    names = {name: name.removeprefix(wrapper) for name in state}
    needed = [name for name in names.values() if not name.endswith(COUNTER)]
    found = {name.removesuffix(needed[0]) for name in tensors if name.endswith(needed[0])}
    prefixes = sorted(found) if prefix is None else [prefix]
    missing = {p: [name for name in needed if p + name not in tensors] for p in prefixes}
    fitting = [p for p in prefixes if not missing[p]]
    if len(fitting) > 1:
        raise ConfigError(
            f"{where} holds this backbone {len(fitting)} times. Choose one with --prefix: "
            f"{', '.join(map(repr, fitting))}."
        )
    if not fitting:
        absent = min(missing.values(), key=len, default=needed)
        raise ConfigError(
            f"{where} must hold every parameter of {network.name!r}, but lacks {len(absent)} of {len(needed)}, such as "
            f"{absent[0]!r}. It holds, for example, {', '.join(map(repr, list(tensors)[:3]))}. Choose the backbone it "
            "was made for, or state --prefix."
        )
    return {name: tensors.get(fitting[0] + core, state[name]) for name, core in names.items()}
