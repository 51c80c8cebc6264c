"""The study file: strict, with errors that name the nearest valid key or name. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ssl_bench.config.catalog import CATALOG
from ssl_bench.errors import ConfigError, RegistryError, did_you_mean


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetSpec(_Strict):
    """A dataset and its constructor arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class BackboneSpec(_Strict):
    """A backbone and its constructor arguments; "timm:NAME" and "torchvision:NAME" reach those libraries."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class MethodSpec(_Strict):
    """A method and what differs from its class's defaults.

    `backbone` replaces the study's backbones for this method; `recipe` and `views` set single keys of the
    class's recipe for the dataset's family and of its view recipe.
    """

    name: str
    backbone: str | BackboneSpec | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    views: dict[str, Any] = Field(default_factory=dict)


class ProtocolSpec(_Strict):
    """An evaluation protocol and its constructor arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Budget(_Strict):
    """How long every method trains. None takes the recipe's own figure."""

    epochs: int | None = Field(default=None, ge=1)
    global_batch_size: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)


class StudySpec(_Strict):
    """Datasets x methods x backbones x seeds, one budget, and the protocols that judge them.

    `devices` is the number of processes of one trial; it changes no number, nor does `num_workers`.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    note: str = ""
    datasets: list[DatasetSpec] = Field(min_length=1)
    methods: list[MethodSpec] = Field(min_length=1)
    backbones: list[BackboneSpec] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    budget: Budget = Budget()
    protocols: list[ProtocolSpec] = Field(min_length=1)
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    devices: int = Field(default=1, ge=1)
    accumulate_grad_batches: int = Field(default=1, ge=1)
    num_workers: int = Field(default=4, ge=0)
    log_every_n_steps: int = Field(default=10, ge=1)
    online_knn_epochs: int | None = Field(default=None, ge=1)
    loggers: list[Literal["wandb"]] = Field(default_factory=list)

    @field_validator("datasets", "methods", "backbones", "protocols", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, str | dict):
            value = [value]
        return (
            [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @model_validator(mode="after")
    def _known_names(self) -> StudySpec:
        for kind, specs in self._named():
            for spec in specs:
                CATALOG[kind].entry(spec.name.split(":")[0])
        for what, values in (("seeds", self.seeds),):
            repeated = {value for value in values if values.count(value) > 1}
            if repeated:
                raise ConfigError(f"`{what}` must be distinct, got {sorted(repeated)} more than once.")
        return self

    def _named(self) -> Iterable[tuple[str, Iterable[Any]]]:
        yield "dataset", self.datasets
        yield "method", self.methods
        yield "backbone", self.backbones
        own = [spec.backbone for spec in self.methods if spec.backbone is not None]
        yield "backbone", [BackboneSpec(name=b) if isinstance(b, str) else b for b in own]
        yield "protocol", self.protocols


def load_study(path: Path | str, overrides: Iterable[str] = ()) -> StudySpec:
    """Read a study file.

    Args:
        path: YAML file.
        overrides: "key.path=value" strings, values in YAML, that replace single entries.

    Raises:
        ConfigError: With the file, the key and what would be right.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"A study file must be readable, got {error.strerror} for {path}. Check the path.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} must be valid YAML, got: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold a mapping with name, datasets, methods, ..., got {type(content).__name__}."
        )
    for override in overrides:
        _apply(content, override)
    return parse_study(content, where=str(path))


def parse_study(content: Mapping[str, Any], *, where: str = "study") -> StudySpec:
    """Validate a study given as plain data; `where` names it in errors."""
    try:
        return StudySpec.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, where) for problem in error.errors())) from error
    except (RegistryError, ConfigError) as error:
        raise ConfigError(f"{error} (in {where})") from error


def _explain(problem: Any, where: str) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        model = _model_at(problem["loc"])
        return f"Unknown key {place!r} in {where}.{did_you_mean(str(problem['loc'][-1]), model.model_fields)}"
    got = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
    return f"{place} in {where}: {problem['msg']}{got}."


def _model_at(location: tuple[Any, ...]) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {
        "datasets": DatasetSpec,
        "methods": MethodSpec,
        "backbones": BackboneSpec,
        "protocols": ProtocolSpec,
        "budget": Budget,
    }
    model: type[BaseModel] = StudySpec
    for part in location[:-1]:
        model = BackboneSpec if part in ("backbone", "BackboneSpec") else models.get(part, model)
    return model


def _apply(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"An override must read key.path=value, got {override!r}.")
    *parents, last = key.split(".")
    place: Any = content
    for part in parents:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"The override {override!r} goes through {part!r}, which is no mapping.")
    place[last] = yaml.safe_load(text)
