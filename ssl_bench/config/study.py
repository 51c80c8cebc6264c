"""The study file: strict, with errors that name the nearest valid key or name. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

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


class RegularizerSpec(_Strict):
    """A term added to a method's loss: its weight, the layer it looks at, and the epoch it starts in.

    `layer` is "embedding" (the backbone's output) or "projection"; None takes the regularizer's own.
    """

    name: str
    weight: float = Field(gt=0)
    layer: Literal["embedding", "projection"] | None = None
    start_epoch: int = Field(default=0, ge=0)
    arguments: dict[str, Any] = Field(default_factory=dict)


class MethodSpec(_Strict):
    """A method and what differs from its class's defaults.

    `backbone` replaces the study's backbones for this method; `recipe` and `views` set single keys of the
    class's recipe for the dataset's family and of its view recipe. `regularizers` are added to its loss.
    `init_from` names another method of the study: each trial starts from the end of that method's trial on
    the same dataset, backbone and seed.
    """

    name: str
    backbone: BackboneSpec | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    views: dict[str, Any] = Field(default_factory=dict)
    regularizers: list[RegularizerSpec] = Field(default_factory=list)
    init_from: str = ""

    @field_validator("backbone", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class ProtocolSpec(_Strict):
    """An evaluation protocol and its constructor arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class RuleWhere(_Strict):
    """The trials a rule applies to: those with one of the names under every key given."""

    dataset: list[str] | None = None
    method: list[str] | None = None
    backbone: list[str] | None = None

    @field_validator("dataset", "method", "backbone", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RuleSet(_Strict):
    """What a rule sets: single keys, as under a method."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    views: dict[str, Any] = Field(default_factory=dict)


class Rule(_Strict):
    """An override for some combinations, such as one method on one dataset; later rules win."""

    where: RuleWhere
    set: RuleSet


class Budget(_Strict):
    """How long every method trains. None takes the recipe's own figure."""

    epochs: int | None = Field(default=None, ge=1)
    global_batch_size: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)


class SlurmSettings(_Strict):
    """What a trial's job asks of Slurm; none of it changes a number.

    `time_minutes` is the limit of one job; a trial that needs longer saves a checkpoint `signal_seconds` before
    it and is requeued. `gpus` False asks for no GPU. `poll_seconds` is how often the runner looks at the queue.
    """

    partition: str | None = None
    time_minutes: int = Field(default=240, ge=1)
    nodes: int = Field(default=1, ge=1)
    gpus: bool = True
    cpus_per_task: int = Field(default=4, ge=1)
    memory: str | None = None
    constraint: str | None = None
    account: str | None = None
    qos: str | None = None
    array_parallelism: int = Field(default=256, ge=1)
    signal_seconds: int = Field(default=90, ge=1)
    poll_seconds: float = Field(default=10.0, gt=0)


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
    rules: list[Rule] = Field(default_factory=list)
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    devices: int = Field(default=1, ge=1)
    accumulate_grad_batches: int = Field(default=1, ge=1)
    num_workers: int = Field(default=4, ge=0)
    log_every_n_steps: int = Field(default=10, ge=1)
    online_knn_epochs: int | None = Field(default=None, ge=1)
    eigenmode_steps: int | None = Field(default=None, ge=1)
    loggers: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    slurm: SlurmSettings = SlurmSettings()
    _where: str = PrivateAttr(default="study")

    @field_validator("datasets", "methods", "backbones", "protocols", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, str | dict):
            value = [value]
        return (
            [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value
        )

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if repeated:
            raise ValueError(f"seeds must be distinct, {repeated} stand there more than once")
        return seeds

    @property
    def where(self) -> str:
        """The file, for errors."""
        return self._where

    def named(self) -> Iterator[tuple[str, str, str]]:
        """Every name of a plug-in: its place, kind and the name itself."""
        for key, specs in (("datasets", self.datasets), ("methods", self.methods), ("backbones", self.backbones),
                           ("protocols", self.protocols)):  # fmt: skip
            for i, spec in enumerate(specs):
                yield f"{key}.{i}", key.removesuffix("s"), spec.name  # type: ignore[attr-defined]
        for i, method in enumerate(self.methods):
            if method.backbone is not None:
                yield f"methods.{i}.backbone", "backbone", method.backbone.name
            for k, regularizer in enumerate(method.regularizers):
                yield f"methods.{i}.regularizers.{k}", "regularizer", regularizer.name
        for i, rule in enumerate(self.rules):
            for kind, names in rule.where.model_dump(exclude_none=True).items():
                for name in names:
                    yield f"rules.{i}.where.{kind}", kind, name


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
    except UnicodeDecodeError as error:
        raise ConfigError(f"A study file must be YAML text in UTF-8, got {error} in {path}.") from error
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
        study = StudySpec.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, where) for problem in error.errors())) from error
    study._where = where
    for place, kind, name in study.named():
        with located(f"{place} in {where}"):
            CATALOG[kind].entry(name.split(":")[0])
    return study


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Add the place in the study to an error raised inside."""
    try:
        yield
    except (ConfigError, RegistryError) as error:
        raise ConfigError(f"{error} ({place})") from error


def _explain(problem: Any, where: str) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        model = _model_at(problem["loc"])
        return f"Unknown key {place!r} in {where}.{did_you_mean(str(problem['loc'][-1]), model.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    got = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
    return f"{message}{got} ({place} in {where})."


def _model_at(location: tuple[Any, ...]) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {
        "datasets": DatasetSpec,
        "methods": MethodSpec,
        "backbones": BackboneSpec,
        "protocols": ProtocolSpec,
        "budget": Budget,
        "slurm": SlurmSettings,
        "rules": Rule,
        "where": RuleWhere,
        "set": RuleSet,
        "backbone": BackboneSpec,
        "regularizers": RegularizerSpec,
    }
    model: type[BaseModel] = StudySpec
    for part in location[:-1]:
        model = models.get(part, model)
    return model


def _apply(content: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"An override must read key.path=value, got {override!r}.")
    *parents, last = key.split(".")
    place: Any = content
    try:
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(last) if isinstance(place, list) else last] = yaml.safe_load(text)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"An override must go through mappings and positions of lists, such as methods.0.recipe.base_lr=0.1, got "
            f"{override!r}."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of an override must be YAML, got {override!r}: {error}") from error
