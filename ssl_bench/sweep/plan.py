"""From a study to its trials: class defaults filled in, every argument checked before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ssl_bench.config import ProtocolConfig, StudySpec, TrialConfig
from ssl_bench.config.study import BackboneSpec, DatasetSpec, MethodSpec
from ssl_bench.data import DATASETS, Dataset, load_dataset
from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.evaluation.protocol import PROTOCOLS
from ssl_bench.methods import METHODS, SSLMethod
from ssl_bench.nn.backbone import BACKBONES
from ssl_bench.records import Recipe
from ssl_bench.views import build_views

HARNESS_FILLED = ("num_classes", "num_samples", "num_views")


def plan(study: StudySpec) -> list[TrialConfig]:
    """Every trial of a study, in the order they stand there.

    A baseline without training has no recipe, views or epochs; one with its own backbone runs once a
    dataset, with the first seed, since nothing in it is random.

    Raises:
        ConfigError: If any argument, recipe or view setting is wrong, or two entries are the same trial.
    """
    protocols = tuple(_protocol(spec.name, spec.arguments) for spec in study.protocols)
    trials: dict[str, TrialConfig] = {}
    for dataset_spec in study.datasets:
        dataset = _dataset(dataset_spec)
        for spec in study.methods:
            cls = METHODS.get(spec.name)
            backbones, seeds = _backbones(spec, cls, study), study.seeds
            if cls.fixed_backbone:
                seeds = seeds[:1]
            for backbone in backbones:
                for seed in seeds:
                    trial = _trial(study, dataset, dataset_spec, spec, backbone, seed, protocols)
                    if trial.id in trials:
                        raise ConfigError(
                            f"Every trial of a study must differ, but {trial.label} stands there twice. Remove one, or "
                            "give one other arguments."
                        )
                    trials[trial.id] = trial
    return list(trials.values())


def _backbones(spec: MethodSpec, cls: type[SSLMethod], study: StudySpec) -> list[BackboneSpec]:
    if cls.fixed_backbone:
        return [BackboneSpec(name=cls.fixed_backbone)]
    if spec.backbone is not None:
        return [BackboneSpec(name=spec.backbone) if isinstance(spec.backbone, str) else spec.backbone]
    return study.backbones


def _trial(
    study: StudySpec,
    dataset: Dataset,
    dataset_spec: DatasetSpec,
    spec: MethodSpec,
    backbone: BackboneSpec,
    seed: int,
    protocols: tuple[ProtocolConfig, ...],
) -> TrialConfig:
    cls = METHODS.get(spec.name)
    entry = METHODS.entry(spec.name)
    arguments = {**cls.default_arguments(dataset.family), **spec.arguments}
    where = f"method {entry.name!r}"
    arguments = check_arguments(cls.__init__, arguments, where, skip=("backbone", *HARNESS_FILLED))
    backbone_name, _, model = backbone.name.partition(":")
    backbone_entry = BACKBONES.entry(backbone_name)
    backbone_arguments = {**({"model": model} if model else {}), **backbone.arguments}
    backbone_arguments = check_arguments(
        BACKBONES.get(backbone_name).__init__,
        backbone_arguments,
        f"backbone {backbone.name!r}",
        skip=("in_channels", "image_size"),
    )
    recipe: dict[str, Any] | None = None
    views: dict[str, Any] | None = None
    budget: dict[str, Any] = {"epochs": 0}
    if cls.trainable:
        settings = {**spec.recipe}
        if study.budget.global_batch_size is not None:
            settings.setdefault("global_batch_size", study.budget.global_batch_size)
        if study.budget.epochs is not None:
            settings.setdefault("epochs", study.budget.epochs)
        full = _recipe(cls.default_recipe(dataset.family), settings, where)
        pipeline = build_views(
            full.views,
            image_size=dataset.image_size,
            channels=dataset.channels,
            mean=dataset.mean,
            std=dataset.std,
            overrides=spec.views,
        )
        recipe, views = dataclasses.asdict(full), {**pipeline.describe(), "overrides": spec.views}
        budget = {"epochs": full.epochs, "max_steps": study.budget.max_steps}
    elif spec.recipe or spec.views:
        raise ConfigError(f"{where} trains nothing, so it takes no recipe or views. Remove them.")
    return TrialConfig(
        dataset={
            "name": DATASETS.entry(dataset_spec.name).name,
            "version": DATASETS.entry(dataset_spec.name).version,
            "arguments": dataset_spec.arguments,
        },
        method={
            "name": entry.name,
            "version": entry.version,
            "arguments": plain(arguments),
            "family": entry.metadata.get("family", ""),
            "uses_labels": cls.uses_labels,
        },
        backbone={
            "name": backbone_entry.name,
            "version": backbone_entry.version,
            "arguments": plain(backbone_arguments),
        },
        recipe=plain(recipe),
        views=plain(views),
        budget=budget,
        seed=seed,
        precision=study.precision,
        accumulate_grad_batches=study.accumulate_grad_batches if cls.trainable else 1,
        protocols=protocols,
        devices=study.devices if cls.trainable else 1,
        num_workers=study.num_workers,
        log_every_n_steps=study.log_every_n_steps,
        online_knn_epochs=study.online_knn_epochs if cls.trainable else None,
        loggers=tuple(study.loggers),
        note=study.note,
    )


def _dataset(spec: DatasetSpec) -> Dataset:
    cls = DATASETS.get(spec.name)
    check_arguments(cls.__init__, spec.arguments, f"dataset {spec.name!r}", skip=("root",))
    return load_dataset(spec.name, **spec.arguments)


def _protocol(name: str, arguments: Mapping[str, Any]) -> ProtocolConfig:
    cls = PROTOCOLS.get(name)
    entry = PROTOCOLS.entry(name)
    checked = check_arguments(cls.__init__, arguments, f"protocol {name!r}")
    return ProtocolConfig(name=entry.name, version=entry.version, arguments=plain(checked))


def _recipe(default: Recipe, settings: Mapping[str, Any], where: str) -> Recipe:
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    hints = typing.get_type_hints(Recipe)
    values = {}
    for key, value in settings.items():
        if key not in fields:
            raise ConfigError(f"Unknown recipe key {key!r} of {where}.{did_you_mean(key, fields)}")
        values[key] = _convert(hints[key], value, f"recipe.{key} of {where}")
    return dataclasses.replace(default, **values)


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], where: str, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check arguments against a constructor's keyword-only parameters and their types.

    Args:
        function: The constructor.
        arguments: Given values.
        where: Names the plug-in in errors.
        skip: Parameters that the harness fills in itself.

    Returns:
        The arguments, converted to the declared types.

    Raises:
        ConfigError: If a name is unknown, a value has the wrong type, or a required one is missing.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in skip
    }
    hints = typing.get_type_hints(function)
    for key in arguments:
        if key not in parameters:
            raise ConfigError(f"Unknown argument {key!r} of {where}.{did_you_mean(key, parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            raise ConfigError(f"{where} needs the argument {key!r}. State it under `arguments` in the study.")
    return {key: _convert(hints.get(key, Any), value, f"{key} of {where}") for key, value in arguments.items()}


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType | type) or hint is not Any:
        try:
            return TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"{where}: {problem['msg']}, got {value!r}.") from error
    return value


def plain(value: Any) -> Any:
    """Tuples as lists, mappings as dicts: what JSON gives back."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if hasattr(value, "__fspath__") else value
