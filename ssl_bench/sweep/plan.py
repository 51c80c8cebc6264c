"""From a study to its trials: class defaults filled in, every argument checked before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ssl_bench.config import ProtocolConfig, StudySpec, TrialConfig
from ssl_bench.config.study import BackboneSpec, DatasetSpec, MethodSpec, ProtocolSpec, RegularizerSpec, located
from ssl_bench.data import DATASETS, Dataset, load_dataset
from ssl_bench.errors import ConfigError, did_you_mean
from ssl_bench.evaluation.protocol import PROTOCOLS
from ssl_bench.methods import METHODS, SSLMethod
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import BACKBONES, Backbone, build_backbone
from ssl_bench.records import Recipe
from ssl_bench.regularizers import REGULARIZERS
from ssl_bench.views import build_views

HARNESS_FILLED = ("num_classes", "num_samples", "num_views")


def plan(study: StudySpec) -> list[TrialConfig]:
    """Every trial of a study, in the order they stand there.

    A baseline without training has no recipe, views or epochs; one with its own backbone runs once a
    dataset, with the first seed, since nothing in it is random. A method that does not run on one of the
    study's backbones gets a trial that says why it is skipped.

    Raises:
        ConfigError: If any argument, recipe or view setting is wrong, two entries are the same trial, or a
            rule matches nothing.
    """
    protocols = tuple(
        _protocol(spec, f"protocols.{i}.arguments in {study.where}") for i, spec in enumerate(study.protocols)
    )
    keys = [protocol.key for protocol in protocols]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ConfigError(
                f"Every protocol of a study must differ, but {protocols[i].name!r} stands there twice with the same "
                f"arguments (protocols.{i} in {study.where}). Remove one."
            )
    trials: dict[str, TrialConfig] = {}
    used: set[int] = set()
    for i, dataset_spec in enumerate(study.datasets):
        with located(f"datasets.{i}.arguments in {study.where}"):
            dataset, dataset_facts = _dataset(dataset_spec)
        for j, spec in enumerate(study.methods):
            place = f"methods.{j} in {study.where}"
            cls = METHODS.get(spec.name)
            for backbone in _backbones(spec, cls, study):
                numbers = [n for n, rule in enumerate(study.rules) if _applies(study, n, dataset_spec, spec, backbone)]
                used.update(numbers)
                with located(place):
                    trial = _trial(
                        study, dataset, dataset_facts, _with_rules(study, numbers, spec), backbone, protocols
                    )
                for seed in study.seeds[:1] if cls.fixed_backbone else study.seeds:
                    seeded = dataclasses.replace(trial, seed=seed)
                    if spec.init_from:
                        with located(place):
                            seeded = dataclasses.replace(seeded, init_from=_source(seeded, spec.init_from, trials))
                    if seeded.id in trials:
                        raise ConfigError(
                            f"Every trial of a study must differ, but {seeded.label} stands there twice ({place}). "
                            "Remove one, or give one other arguments."
                        )
                    trials[seeded.id] = seeded
    for n in set(range(len(study.rules))) - used:
        raise ConfigError(
            f"Every rule must apply to a trial, but no trial of the study fits rules.{n}.where in {study.where}. "
            "Correct its names, or remove it."
        )
    return list(trials.values())


def _source(trial: TrialConfig, name: str, trials: Mapping[str, TrialConfig]) -> str:
    """Id of the trial that `init_from` names: the same dataset, backbone and seed, itself started from nothing."""
    same = [
        other.id
        for other in trials.values()
        if other.method["name"] == METHODS.entry(name).name
        and not other.init_from
        and not other.method.get("regularizers")
        and (other.dataset, other.backbone, other.seed) == (trial.dataset, trial.backbone, trial.seed)
    ]
    if len(same) != 1:
        raise ConfigError(
            f"`init_from` must name one method that stands before this one in the study and runs on the same backbone, "
            f"got {name!r}, which has {len(same)} such trials on {trial.backbone['name']}. Add or move that method."
        )
    return same[0]


def _applies(study: StudySpec, n: int, dataset: DatasetSpec, method: MethodSpec, backbone: BackboneSpec) -> bool:
    where = study.rules[n].where
    pairs = ((where.dataset, dataset.name), (where.method, method.name), (where.backbone, backbone.name))
    return all(names is None or name in names for names, name in pairs)


def _with_rules(study: StudySpec, numbers: list[int], spec: MethodSpec) -> MethodSpec:
    for rule in (study.rules[n].set for n in numbers):
        spec = spec.model_copy(
            update={key: {**getattr(spec, key), **getattr(rule, key)} for key in ("arguments", "recipe", "views")}
        )
    return spec


def _backbones(spec: MethodSpec, cls: type[SSLMethod], study: StudySpec) -> list[BackboneSpec]:
    if cls.fixed_backbone:
        return [BackboneSpec(name=cls.fixed_backbone)]
    return study.backbones if spec.backbone is None else [spec.backbone]


def _trial(
    study: StudySpec,
    dataset: Dataset,
    dataset_facts: dict[str, Any],
    spec: MethodSpec,
    backbone: BackboneSpec,
    protocols: tuple[ProtocolConfig, ...],
) -> TrialConfig:
    """The trial of the study's first seed."""
    cls = METHODS.get(spec.name)
    entry = METHODS.entry(spec.name)
    where = f"method {entry.name!r}"
    arguments = {**cls.default_arguments(dataset.family), **spec.arguments}
    arguments = check_arguments(cls.__init__, arguments, where, skip=("backbone", *HARNESS_FILLED))
    backbone_facts, network = _backbone(backbone, dataset)
    regularizers = [_regularizer(r, f"regularizer {r.name!r} of {where}") for r in spec.regularizers]
    skip = ""
    if network.kind not in cls.backbones:
        kinds = " or ".join(cls.backbones)
        skip = f"{entry.name} runs on backbones of kind {kinds}, but {backbone.name} is a {network.kind}"
        if spec.backbone is not None:
            raise ConfigError(f"{skip}. Give {where} another `backbone`.")
    # a method that extends another changes its numbers with it
    bases = [vars(base)["registry_entry"] for base in cls.__mro__[1:] if "registry_entry" in vars(base)]
    extends = {base.name: base.version for base in bases}
    recipe: dict[str, Any] | None = None
    views: dict[str, Any] | None = None
    budget: dict[str, Any] = {"epochs": 0}
    if cls.trainable:
        settings = {key: value for key, value in study.budget.model_dump().items() if value is not None}
        max_steps = settings.pop("max_steps", None)
        full = _recipe(cls.default_recipe(dataset.family), {**settings, **spec.recipe}, where)
        if full.warmup_epochs >= full.epochs:
            raise ConfigError(
                f"`warmup_epochs` must be shorter than the training, got {full.warmup_epochs:g} of {full.epochs} "
                f"epochs for {where}. Lower its recipe.warmup_epochs in the study, or raise budget.epochs."
            )
        pipeline = build_views(
            full.views,
            image_size=dataset.image_size,
            channels=dataset.channels,
            mean=dataset.mean,
            std=dataset.std,
            overrides=spec.views,
        )
        for size in sorted(set(pipeline.view_sizes)):
            network.check_image_size(size)
        recipe, views = dataclasses.asdict(full), {**pipeline.describe(), "overrides": spec.views}
        budget = {"epochs": full.epochs, "max_steps": max_steps}
    elif spec.recipe or spec.views or spec.regularizers or spec.init_from:
        raise ConfigError(
            f"{where} trains nothing, so it takes no recipe, views, regularizers or init_from. Remove them."
        )
    if not skip:
        facts = {
            "num_classes": dataset.num_classes,
            "num_samples": 10**6,
            "num_views": len((views or {}).get("specs", ())),
        }
        with torch.device("meta"):  # the constructor's own checks, without data or memory
            build_method(entry.name, network, seed=0, facts=facts, arguments=arguments, regularizers=regularizers)
    return TrialConfig(
        dataset=dataset_facts,
        method={
            "name": entry.name,
            "version": entry.version,
            "arguments": plain(arguments),
            "family": entry.metadata.get("family", ""),
            "uses_labels": cls.uses_labels,
            **({"regularizers": plain(regularizers)} if regularizers else {}),
            **({"extends": extends} if extends else {}),
        },
        backbone=backbone_facts,
        recipe=plain(recipe),
        views=plain(views),
        budget=budget,
        seed=study.seeds[0],
        precision=study.precision,
        accumulate_grad_batches=study.accumulate_grad_batches if cls.trainable else 1,
        protocols=protocols,
        devices=study.devices if cls.trainable else 1,
        num_workers=study.num_workers,
        log_every_n_steps=study.log_every_n_steps,
        online_knn_epochs=study.online_knn_epochs if cls.trainable else None,
        eigenmode_steps=study.eigenmode_steps if cls.trainable else None,
        loggers=tuple(study.loggers) if cls.trainable else (),
        note=study.note,
        skip=skip,
    )


def _dataset(spec: DatasetSpec) -> tuple[Dataset, dict[str, Any]]:
    cls = DATASETS.get(spec.name)
    entry = DATASETS.entry(spec.name)
    arguments = check_arguments(cls.__init__, spec.arguments, f"dataset {spec.name!r}", skip=("root",))
    dataset = load_dataset(spec.name, **arguments)
    facts: dict[str, Any] = {"name": entry.name, "version": entry.version, "arguments": plain(arguments)}
    if not dataset.content_is_fixed:
        facts["fingerprint"] = dataset.fingerprint
    return dataset, facts


def _backbone(spec: BackboneSpec, dataset: Dataset) -> tuple[dict[str, Any], Backbone]:
    """A backbone's part of the identity, and the network without memory or weights."""
    name, _, model = spec.name.partition(":")
    entry = BACKBONES.entry(name)
    arguments = {**({"model": model} if model else {}), **spec.arguments}
    arguments = check_arguments(
        BACKBONES.get(name).__init__, arguments, f"backbone {spec.name!r}", skip=("in_channels", "image_size")
    )
    unloaded = {**arguments, "pretrained": False} if "pretrained" in arguments else arguments
    with torch.device("meta"):
        network = build_backbone(name, in_channels=dataset.channels, image_size=dataset.image_size, **unloaded)
    return {"name": entry.name, "version": entry.version, "arguments": plain(arguments)}, network


def _regularizer(spec: RegularizerSpec, where: str) -> dict[str, Any]:
    entry = REGULARIZERS.entry(spec.name)
    cls = REGULARIZERS.get(spec.name)
    arguments = check_arguments(cls.__init__, spec.arguments, where)
    return {
        "name": entry.name,
        "version": entry.version,
        "weight": spec.weight,
        "layer": spec.layer or cls.layer,
        "start_epoch": spec.start_epoch,
        "arguments": arguments,
    }


def _protocol(spec: ProtocolSpec, place: str) -> ProtocolConfig:
    entry = PROTOCOLS.entry(spec.name)
    with located(place):
        cls = PROTOCOLS.get(spec.name)
        arguments = check_arguments(cls.__init__, spec.arguments, f"protocol {spec.name!r}")
        try:
            cls(**arguments)  # its own checks, before anything trains
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
    return ProtocolConfig(name=entry.name, version=entry.version, arguments=plain(arguments))


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
        The arguments that differ from their defaults, converted to the declared types: stating a default
        makes no other trial.

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
    converted = {key: _convert(hints.get(key, Any), value, f"{key} of {where}") for key, value in arguments.items()}
    return {key: value for key, value in converted.items() if value != parameters[key].default}


def _convert(hint: Any, value: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error.errors()[0]['msg']}, got {value!r}.") from error


def plain(value: Any) -> Any:
    """Tuples as lists, mappings as dicts: what JSON gives back."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if hasattr(value, "__fspath__") else value
