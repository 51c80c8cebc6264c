"""What plug-ins exist, read from source without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssl_bench.errors import RegistryError
from ssl_bench.registry import Registry

PACKAGES = {
    "method": "ssl_bench.methods",
    "dataset": "ssl_bench.data.datasets",
    "backbone": "ssl_bench.nn.backbones",
    "protocol": "ssl_bench.evaluation.protocols",
    "regularizer": "ssl_bench.regularizers",
}
CATALOG: dict[str, Registry[object]] = {kind: Registry(kind, package) for kind, package in PACKAGES.items()}


def changed_versions(trial: Mapping[str, Any]) -> list[str]:
    """What a stored trial (the content of trial.json) was made with and has another version now, or is gone."""
    parts = [(kind, trial[kind]) for kind in ("dataset", "method", "backbone")]
    parts += [("method", {"name": n, "version": v}) for n, v in trial["method"].get("extends", {}).items()]
    parts += [("regularizer", part) for part in trial["method"].get("regularizers", ())]
    parts += [("protocol", part) for part in trial["protocols"]]
    found = []
    for kind, part in parts:
        try:
            version = CATALOG[kind].entry(part["name"]).version
        except RegistryError:
            found.append(f"{kind} {part['name']} is gone")
            continue
        if version != part["version"]:
            found.append(f"{kind} {part['name']} was version {part['version']} and is {version}")
    return found
