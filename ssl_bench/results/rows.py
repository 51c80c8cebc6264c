"""The long form of a study: one measured number a row, with everything needed to trust it.

Where a fact comes from: the identity from `trial.json`; cost, hardware and versions from
`pretrain.json`; figures from `rows/<protocol>.json`. `family` and `uses_labels` are taken from
`method` in `trial.json`, else from `pretrain.json`, else from the registry's metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_bench.errors import RegistryError, StoreError
from ssl_bench.records import MetricRow
from ssl_bench.registry import Registry
from ssl_bench.results.store import canonical_json, content_hash, csv_text, read_csv, read_json
from ssl_bench.results.trial import TrialRecord, protocol_key, read_trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of `rows.csv`.

    `regularizers` names the terms added to the method's loss, "a + b". `variant` is blank unless
    trials of one (dataset, method, regularizers, backbone, epochs) differ in more than the seed; then
    it names what differs. `protocol_variant` does the same for a protocol's version and arguments.
    `value` is raw (fractions, seconds); None means there is none, and `reason` or `note` says why.
    `status` is the trial's, or "missing" where a finished trial lacks the row.
    """

    row_id: str = ""
    study: str = ""
    trial: str = ""
    dataset: str = ""
    method: str = ""
    regularizers: str = ""
    variant: str = ""
    family: str = ""
    method_version: int | None = None
    uses_labels: bool | None = None
    backbone: str = ""
    seed: int | None = None
    epochs: float | None = None
    global_batch_size: int | None = None
    precision: str = ""
    protocol: str = ""
    protocol_variant: str = ""
    protocol_version: int | None = None
    metric: str = ""
    split: str = ""
    value: float | None = None
    higher_is_better: bool | None = None
    n_test: int | None = None
    selected_on: str = ""
    note: str = ""
    status: str = ""
    reason: str = ""
    seconds: float | None = None
    images_per_second: float | None = None
    peak_memory_mb: float | None = None
    parameters: int | None = None
    backbone_parameters: int | None = None
    recipe_source: str = ""
    trial_note: str = ""
    commit: str = ""
    torch_version: str = ""
    lightning_version: str = ""
    versions: str = ""
    hardware: str = ""
    details: str = ""

    @property
    def cell(self) -> tuple[str, str, str, str, str, float]:
        """What the seeds of one leaderboard row share: dataset, method, regularizers, variant, backbone, epochs."""
        epochs = -1.0 if self.epochs is None else self.epochs
        return (self.dataset, self.method, self.regularizers, self.variant, self.backbone, epochs)

    @property
    def trial_status(self) -> str:
        """Status of the row's trial: a finished one may lack this row."""
        return "done" if self.status == "missing" else self.status

    @property
    def column(self) -> str:
        """Leaderboard column of the figure: `protocol/metric`, the split added unless it is test."""
        protocol = f"{self.protocol}[{self.protocol_variant}]" if self.protocol_variant else self.protocol
        return f"{protocol}/{self.metric}" + ("" if self.split == "test" else f"@{self.split}")


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def collect_rows(study: Path | str, trials: Sequence[TrialRecord] | None = None) -> list[Row]:
    """All rows of a study folder in one fixed order, whatever the file system's.

    Args:
        study: The study folder; its optional `study.json` gives the study's `name`.
        trials: Its trials, if they are read already.

    Raises:
        StoreError: If the folder holds no trials.
    """
    trials = read_trials(study) if trials is None else trials
    name = str(study_facts(study).get("name") or Path(study).resolve().name)
    variants = _variants({trial.id: _setting(trial.config) for trial in trials if trial.config}, _group(trials))
    rows = [row for trial in trials for row in _rows_of_trial(trial, name, variants.get(trial.id, ""))]
    rows = _with_protocol_variants(rows, trials)
    return [_with_id(row) for row in sorted(rows, key=_order)]


def study_facts(study: Path | str) -> Mapping[str, Any]:
    """The optional `study.json`: `name` and the `command` that produced the study, for the footers."""
    path = Path(study) / "study.json"
    if not path.exists():
        return {}
    facts = read_json(path)
    return facts if isinstance(facts, dict) else {}


def rows_text(rows: Iterable[Row]) -> str:
    """The text of `rows.csv`; `parse_rows` gives exactly the same rows back."""
    return csv_text(COLUMNS, ({name: _to_cell(value) for name, value in vars(row).items()} for row in rows))


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a `rows.csv`.

    Raises:
        StoreError: If a column is missing or a cell has a wrong type.
    """
    try:
        return [Row(**{name: _FROM_CELL[kind](line[name]) for name, kind in _KINDS.items()}) for line in read_csv(path)]
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"{path} must be a rows.csv of this version, got {error}. Rebuild it: ssl-bench leaderboard STUDY"
        ) from error


def _rows_of_trial(trial: TrialRecord, study: str, variant: str) -> list[Row]:
    config, pretrain = trial.config, trial.pretrain
    if not config:
        return [Row(study=study, trial=trial.id, status=trial.status, reason=trial.reason)]
    method, recipe = config["method"], config.get("recipe") or {}
    versions = pretrain.get("versions") or {}
    base = Row(
        study=study,
        trial=trial.id,
        dataset=config["dataset"]["name"],
        method=method["name"],
        regularizers=_regularizers(config),
        variant=variant,
        family=_method_fact(trial, "family") or "",
        method_version=method.get("version"),
        uses_labels=_method_fact(trial, "uses_labels"),
        backbone=config["backbone"]["name"],
        seed=config["seed"],
        epochs=float(config["budget"]["epochs"]),
        global_batch_size=recipe.get("global_batch_size"),
        precision=str(config.get("precision") or ""),
        status=trial.status,
        reason=trial.reason,
        seconds=_float(pretrain.get("seconds")),
        images_per_second=_float(pretrain.get("images_per_second")),
        peak_memory_mb=_float(pretrain.get("peak_memory_mb")),
        parameters=pretrain.get("parameters"),
        backbone_parameters=pretrain.get("backbone_parameters"),
        recipe_source=str(recipe.get("source") or ""),
        trial_note="; ".join(str(note) for note in (config.get("note"), *(pretrain.get("notes") or ())) if note),
        commit=str(pretrain.get("commit") or ""),
        torch_version=str(versions.get("torch") or ""),
        lightning_version=str(versions.get("lightning") or ""),
        versions=canonical_json(versions) if versions else "",
        hardware=_text(pretrain.get("hardware", "")),
    )
    # protocol_variant holds the protocol's key until _with_protocol_variants turns it into words
    rows = [
        _metric_row(dataclasses.replace(base, protocol_variant=key), row)
        for key, group in trial.rows.items()
        for row in group
    ]
    names = {protocol_key(p["name"], p.get("arguments") or {}): p["name"] for p in config.get("protocols", ())}
    missing_status = "missing" if trial.status == "done" else trial.status
    rows += [
        dataclasses.replace(base, protocol=names[key], protocol_variant=key, status=missing_status, reason=reason)
        for key, reason in trial.missing.items()
    ]
    return rows or [base]


def _metric_row(base: Row, row: MetricRow) -> Row:
    return dataclasses.replace(
        base,
        protocol=row.protocol,
        protocol_version=row.protocol_version,
        metric=row.metric,
        split=row.split,
        value=None if row.value is None else float(row.value),
        higher_is_better=row.higher_is_better,
        n_test=row.n_test,
        selected_on=row.selected_on,
        note=row.note,
        details=canonical_json(row.details) if row.details else "",
    )


def _method_fact(trial: TrialRecord, key: str) -> Any:
    method = trial.config["method"]
    for source in (method, trial.pretrain):
        if key in source:
            return source[key]
    try:
        return Registry[Any]("method", "ssl_bench.methods").entry(method["name"]).metadata.get(key)
    except RegistryError:  # a method of a package that is not installed here: the row stays without the fact
        return None


def _setting(config: Mapping[str, Any]) -> dict[str, Any]:
    """What defines the experiment apart from the seed, as dotted keys."""
    kept = {key: config.get(key) for key in ("dataset", "method", "backbone", "recipe", "precision")}
    kept["views"] = (config.get("views") or {}).get("overrides") or {}
    flat = _flatten(kept)
    flat["regularizers"] = " + ".join(_term(r) for r in flat.pop("method.regularizers", ()))
    flat["continued"] = bool(config.get("init_from"))
    return {key: value for key, value in flat.items() if key not in _NOT_A_SETTING}


def _regularizers(config: Mapping[str, Any]) -> str:
    return " + ".join(regularizer["name"] for regularizer in config["method"].get("regularizers", ()))


def _term(regularizer: Mapping[str, Any]) -> str:
    settings = _flatten({key: regularizer[key] for key in ("weight", "layer", "start_epoch", "arguments")})
    shown = {_short(key): value for key, value in settings.items() if (key, value) != ("start_epoch", 0)}
    return f"{regularizer['name']}({', '.join(f'{key}={_text(value)}' for key, value in shown.items())})"


_NOT_A_SETTING = ("recipe.source", "recipe.epochs", "method.family", "method.uses_labels")


def _flatten(obj: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(obj, Mapping):
        return {key: value for name in obj for key, value in _flatten(obj[name], f"{prefix}{name}.").items()}
    return {prefix[:-1]: obj}


def _group(trials: Sequence[TrialRecord]) -> dict[str, tuple[Any, ...]]:
    return {
        trial.id: (
            *(trial.config[part]["name"] for part in ("dataset", "method", "backbone")),
            _regularizers(trial.config),
            trial.config["budget"]["epochs"],
        )
        for trial in trials
        if trial.config
    }


def _variants(settings: Mapping[str, Mapping[str, Any]], groups: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """For each id, the text that tells its setting from the others of its group; blank if they are equal."""
    members: dict[tuple[Any, ...], list[str]] = {}
    for identity, group in groups.items():
        members.setdefault(group, []).append(identity)
    texts = {}
    for ids in members.values():
        keys = sorted({key for identity in ids for key in settings[identity]})
        values = {key: {canonical_json(settings[identity].get(key)) for identity in ids} for key in keys}
        differing = [key for key in keys if len(values[key]) > 1]
        for identity in ids:
            texts[identity] = ", ".join(
                f"{_short(key)}={_text(settings[identity].get(key, 'default'))}" for key in differing
            )
    return texts


def _short(key: str) -> str:
    for prefix in ("method.arguments.", "arguments.", "recipe."):
        key = key.removeprefix(prefix)
    return key


def _with_protocol_variants(rows: Sequence[Row], trials: Sequence[TrialRecord]) -> list[Row]:
    arguments = {
        protocol_key(protocol["name"], protocol.get("arguments") or {}): protocol.get("arguments") or {}
        for trial in trials
        for protocol in trial.config.get("protocols", ())
    }
    settings = {
        str(index): _flatten({"version": row.protocol_version, "arguments": arguments[row.protocol_variant]})
        for index, row in enumerate(rows)
        if row.metric
    }
    texts = _variants(settings, {index: (rows[int(index)].protocol,) for index in settings})
    return [dataclasses.replace(row, protocol_variant=texts.get(str(index), "")) for index, row in enumerate(rows)]


def _order(row: Row) -> tuple[Any, ...]:
    seed = -1 if row.seed is None else row.seed
    return (*row.cell, seed, row.trial, row.protocol, row.protocol_variant, row.metric, row.split)


def _with_id(row: Row) -> Row:
    return dataclasses.replace(row, row_id=content_hash({**vars(row), "row_id": ""}))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _to_cell(value: Any) -> Any:
    return ("false", "true")[value] if isinstance(value, bool) else value


def _bool_or_none(cell: str) -> bool | None:
    return None if cell == "" else {"true": True, "false": False}[cell]


_KINDS: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(Row)}
_FROM_CELL: dict[str, Any] = {
    "str": str,
    "int | None": lambda cell: None if cell == "" else int(cell),
    "float | None": lambda cell: None if cell == "" else float(cell),
    "bool | None": _bool_or_none,
}
