"""What a trial folder says, read tolerantly: a torn file becomes a stated problem, never a crash."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ssl_bench.errors import StoreError
from ssl_bench.records import MetricRow
from ssl_bench.results.store import content_hash, read_csv, read_json

STATUSES = ("done", "running", "pending", "skipped", "failed", "diverged", "collapsed", "unreadable")
BROKEN = ("failed", "diverged", "collapsed", "unreadable")  # these end a trial badly and are counted
PROGRESS = "progress"  # "step steps" of a pretraining under way
LOCK = ".lock"  # held by the one process that works on a trial
VOID = ("diverged", "collapsed")  # the backbone itself is bad: figures measured on it are not averaged


def is_locked(folder: Path) -> bool:
    """Whether a process works on a trial right now."""
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True


def progress(folder: Path) -> tuple[int, int] | None:
    """Step and number of steps of a pretraining under way; None if nothing is known."""
    try:
        step, steps = (folder / PROGRESS).read_text().split()
        return int(step), int(steps)
    except (OSError, ValueError):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial folder.

    `status` is one of STATUSES; `config` is `trial.json` (empty if unreadable), `pretrain` is
    `pretrain.json` (empty before pretraining has ended), `rows` maps the key of each protocol of the
    trial to its readable metric rows (files of protocols that the study no longer has are passed over),
    and `missing` maps the others to the reason.
    """

    folder: Path
    status: str
    reason: str
    stage: str = ""
    step: int | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pretrain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, tuple[MetricRow, ...]] = dataclasses.field(default_factory=dict)
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> str:
        """The trial's content hash, which names its folder."""
        return self.folder.name

    def curve(self) -> dict[str, list[tuple[float, float]]]:
        """Training curves by name, each a list of (epoch, value); blank and non-finite cells left out.

        An absent or torn `curve.csv` gives no curves: the table does not depend on it.
        """
        try:
            lines = read_csv(self.folder / "curve.csv")
        except StoreError:
            return {}
        curves: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            epoch = _number(line.get("epoch"))
            for name, cell in line.items():
                value = _number(cell)
                if name not in ("epoch", "step") and epoch is not None and value is not None:
                    curves.setdefault(name, []).append((epoch, value))
        return curves


def read_trials(study: Path | str) -> list[TrialRecord]:
    """Every trial of a study folder, ordered by id.

    Raises:
        StoreError: If the study folder has no `trials` folder.
    """
    folder = Path(study) / "trials"
    if not folder.is_dir():
        raise StoreError(
            f"A study folder must hold trials, but {folder} does not exist. "
            f"Run the study first: ssl-bench run experiments/{Path(study).name}.yaml"
        )
    folders = (path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith("."))
    # a folder with neither file was made by a runner that died before it wrote anything
    return [read_trial(path) for path in folders if (path / "trial.json").exists() or (path / "status.json").exists()]


def read_trial(folder: Path | str) -> TrialRecord:
    """One trial folder as far as it can be read."""
    folder = Path(folder)
    try:
        config = _object(folder / "trial.json")
        _identity(config, folder)
    except StoreError as error:
        return TrialRecord(folder=folder, status="unreadable", reason=str(error))
    status, reason, stage, step = "pending", "", "", None
    try:
        if (folder / "status.json").exists():
            state = _object(folder / "status.json")
            status, reason, stage = (str(state.get(key) or "") for key in ("status", "reason", "stage"))
            step = state.get("step")
            if status not in STATUSES:
                status, reason = "unreadable", f"status.json must hold one of {', '.join(STATUSES)}, got {status!r}."
    except StoreError as error:
        status, reason = "unreadable", str(error)
    pretrain: Mapping[str, Any] = {}
    try:
        if (folder / "pretrain.json").exists():
            pretrain = _object(folder / "pretrain.json")
    except StoreError as error:
        reason = "; ".join(filter(None, (reason, str(error))))
    rows, missing = _metric_rows(folder, config, status, reason)
    return TrialRecord(
        folder=folder,
        status=status,
        reason=reason,
        stage=stage,
        step=step,
        config=config,
        pretrain=pretrain,
        rows=rows,
        missing=missing,
    )


def protocol_key(name: str, arguments: Mapping[str, Any]) -> str:
    """Stem of a protocol's rows file: its name, and a hash of arguments that differ from its defaults."""
    return f"{name}-{content_hash(dict(arguments))[:6]}" if arguments else name


def _metric_rows(
    folder: Path, config: Mapping[str, Any], status: str, reason: str
) -> tuple[dict[str, tuple[MetricRow, ...]], dict[str, str]]:
    rows: dict[str, tuple[MetricRow, ...]] = {}
    missing: dict[str, str] = {}
    for protocol in config.get("protocols", ()):
        key = protocol_key(protocol["name"], protocol.get("arguments") or {})
        path = folder / "rows" / f"{key}.json"
        if not path.exists():
            missing[key] = reason or ("not run" if status == "done" else "")
            continue
        try:
            rows[key] = tuple(_read_row_file(path))
        except StoreError as error:
            missing[key] = str(error)
    return rows, missing


def _read_row_file(path: Path) -> list[MetricRow]:
    content = read_json(path)
    try:
        rows = [MetricRow(**item) for item in content]
        keys = [(row.metric, row.split) for row in rows]
        if len(set(keys)) < len(keys):
            raise ValueError("a metric stands there twice")
        for row in rows:
            if row.value is not None and not math.isfinite(row.value):
                raise ValueError(f"{row.metric} is not finite")
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"{path.parent.parent.name}/rows/{path.name} must be a list of metric rows, got: {error}. "
            "Delete it and run the study again: only that protocol is repeated."
        ) from error
    return rows


def _identity(config: Mapping[str, Any], folder: Path) -> None:
    try:
        names = [config[part]["name"] for part in ("dataset", "method", "backbone")]
        numbers = [config["budget"]["epochs"], config["seed"]]
        protocols = [protocol["name"] for protocol in config.get("protocols", ())]
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{folder.name}/trial.json lacks {error}. Delete the folder and run the study again."
        ) from error
    if not all(isinstance(name, str) for name in names + protocols) or not all(
        isinstance(number, int | float) for number in numbers
    ):
        raise StoreError(f"{folder.name}/trial.json has a wrong type. Delete the folder and run the study again.")


def _object(path: Path) -> Mapping[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise StoreError(f"{path} must hold a JSON object, got {type(content).__name__}. Delete it and run again.")
    return content


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
