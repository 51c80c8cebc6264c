"""What plug-ins exist, read from source without importing torch."""

from __future__ import annotations

from ssl_bench.registry import Registry

PACKAGES = {
    "method": "ssl_bench.methods",
    "dataset": "ssl_bench.data.datasets",
    "backbone": "ssl_bench.nn.backbones",
    "protocol": "ssl_bench.evaluation.protocols",
    "regularizer": "ssl_bench.regularizers",
}
CATALOG: dict[str, Registry[object]] = {kind: Registry(kind, package) for kind, package in PACKAGES.items()}
