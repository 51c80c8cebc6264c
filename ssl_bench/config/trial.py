"""One trial: everything that decides its numbers, and the hash of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ssl_bench.results.store import canonical_json, content_hash
from ssl_bench.results.trial import protocol_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """A protocol, its version and the arguments that differ from its defaults."""

    name: str
    version: int
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Stem of its rows file."""
        return protocol_key(self.name, self.arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """A pretraining run and the protocols that judge it, as plain JSON data.

    Arguments are those that differ from the plug-in's defaults. The identity covers what changes the
    numbers of pretraining; `protocols`, `devices`, `num_workers`, `log_every_n_steps`,
    `online_knn_epochs`, `eigenmode_steps`, `loggers`, `note` and `skip` (why the trial can't run, or "") do not
    belong to it.
    `init_from` is the id of the trial whose final weights it starts from, or "".
    """

    dataset: Mapping[str, Any]
    method: Mapping[str, Any]
    backbone: Mapping[str, Any]
    recipe: Mapping[str, Any] | None
    views: Mapping[str, Any] | None
    budget: Mapping[str, Any]
    seed: int
    precision: str
    init_from: str = ""
    accumulate_grad_batches: int = 1
    protocols: tuple[ProtocolConfig, ...] = ()
    devices: int = 1
    num_workers: int = 0
    log_every_n_steps: int = 10
    online_knn_epochs: int | None = None
    eigenmode_steps: int | None = None
    loggers: tuple[str, ...] = ()
    note: str = ""
    skip: str = ""

    @property
    def id(self) -> str:
        """Content hash of the identity; names the trial's folder."""
        parts = ("name", "version", "arguments", "regularizers", "extends")
        method = {key: self.method[key] for key in parts if key in self.method}
        recipe = {key: value for key, value in (self.recipe or {}).items() if key != "source"}
        views = {key: value for key, value in (self.views or {}).items() if key != "overrides"}  # the specs have them
        identity = {
            "dataset": dict(self.dataset),
            "method": method,
            "backbone": dict(self.backbone),
            "recipe": recipe,
            "views": views,
            "budget": dict(self.budget),
            "seed": self.seed,
            "precision": self.precision,
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }
        return content_hash(identity | ({"init_from": self.init_from} if self.init_from else {}))

    @property
    def label(self) -> str:
        """What a person calls this trial."""
        terms = "".join(f" + {r['name']}" for r in self.method.get("regularizers", ()))
        start = " (continued)" if self.init_from else ""
        return (
            f"{self.method['name']}{terms}{start} / {self.backbone['name']} / {self.dataset['name']} / seed {self.seed}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives an equal trial back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialConfig:
        """The trial of `to_json`'s data."""
        fields = dict(data)
        fields["protocols"] = tuple(ProtocolConfig(**protocol) for protocol in fields["protocols"])
        fields["loggers"] = tuple(fields["loggers"])
        return cls(**fields)

    def same_as(self, data: Mapping[str, Any]) -> bool:
        """Whether stored data is this very trial, protocols and notes included."""
        return canonical_json(self.to_json()) == canonical_json(dict(data))
