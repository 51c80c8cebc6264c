"""A trained backbone as files: tensors in safetensors, everything else in JSON. No pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ssl_bench.errors import StoreError
from ssl_bench.nn.backbone import Backbone, build_backbone
from ssl_bench.results.store import read_json, write_bytes, write_json

WEIGHTS, FACTS = "backbone.safetensors", "backbone.json"


def save_backbone(backbone: Backbone, folder: Path, **facts: Any) -> str:
    """Write backbone.safetensors and backbone.json atomically.

    Args:
        backbone: Network built by `build_backbone`.
        folder: Where to write.
        facts: Anything else to keep in the JSON file, such as the channel means of its data.

    Returns:
        The SHA-256 of the weights file, which identifies the backbone in caches and rows.
    """
    data = save_tensors({name: value.contiguous().cpu() for name, value in backbone.state_dict().items()})
    digest = hashlib.sha256(data).hexdigest()
    write_bytes(folder / WEIGHTS, data)
    write_json(
        folder / FACTS,
        {
            "name": backbone.name,
            "arguments": backbone.arguments,
            "embed_dim": backbone.embed_dim,
            "sha256": digest,
            **facts,
        },
    )
    return digest


def read_facts(folder: Path) -> dict[str, Any]:
    """The JSON beside the weights.

    Raises:
        StoreError: If it is missing or torn.
    """
    facts: dict[str, Any] = read_json(folder / FACTS)
    return facts


def load_backbone(folder: Path) -> Backbone:
    """Rebuild a backbone from `save_backbone`'s files; the weights must be those the JSON names.

    Raises:
        StoreError: If a file is missing, torn, or does not fit the other.
    """
    facts = read_facts(folder)
    try:
        data = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise StoreError(f"{WEIGHTS} must stand beside {FACTS} in {folder}, got: {error}. Pretrain again.") from error
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise StoreError(
            f"{WEIGHTS} in {folder} must have the SHA-256 that {FACTS} names, got another: the file is torn or was "
            "replaced. Pretrain again."
        )
    backbone = build_backbone(facts["name"], **facts["arguments"])
    backbone.load_state_dict(load_tensors(data))
    return backbone
