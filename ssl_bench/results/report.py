"""`report.html`: one self-contained file with a sortable leaderboard, plots and every trial.

Charts are matplotlib's SVG inside the file: an interactive library would add more than 4 MB, and
needs its script to run before anything shows.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_bench.results import tables
from ssl_bench.results.aggregate import Cell, labels
from ssl_bench.results.rows import Row
from ssl_bench.results.tables import Leaderboard
from ssl_bench.results.trial import BROKEN, STATUSES, TrialRecord


def report_html(board: Leaderboard, trials: Sequence[TrialRecord], plots: Mapping[str, bytes]) -> str:
    """The report's text; the same input gives the same bytes.

    Args:
        board: The leaderboard.
        trials: All trials of the study, for their configuration, status and reason.
        plots: SVG files by name, in the order in which they are shown.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ssl_bench.results"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    cells = [cell for table in board.tables.values() for cell in table]
    counts = Counter(trial.status for trial in trials)
    protocols = list(dict.fromkeys(_protocol(column) for column in board.columns))
    return environment.get_template("report.html.j2").render(
        board=board,
        counts=f"{len(trials)} trials: " + ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s]),
        filters=[
            (name, title, sorted({getattr(cell, name) for cell in cells}))
            for name, title in (*_shown(board), ("family", "Family"))
        ],
        protocols=protocols,
        header=_header(board),
        lines=[_line(board, cell, name) for table in board.tables.values() for cell, name in labels(table).items()],
        best=[text for dataset in board.tables for text in tables.best_text(board, dataset)],
        overall_text=tables.overall_text(board.overall) if board.overall else "",
        plots=[(name.replace("_", " "), base64.b64encode(image).decode("ascii")) for name, image in plots.items()],
        footer=tables.footer(board),
        trials=_trials(board, trials),
    )


def _protocol(column: str) -> str:
    return column.split("/", 1)[0]


def _shown(board: Leaderboard) -> list[tuple[str, str]]:
    """Dataset and backbone, unless there is only one."""
    cells = [cell for table in board.tables.values() for cell in table]
    names = (("dataset", "Dataset"), ("backbone", "Backbone"))
    return [(name, title) for name, title in names if len({getattr(cell, name) for cell in cells}) > 1]


def _header(board: Leaderboard) -> list[tuple[str, str, str, int]]:
    text = [(title, "text", "", 1) for title in ("Method", *(title for _, title in _shown(board)), "Family")]
    figures = [
        (tables.column_title(column), "", _protocol(column), int(column in board.headline)) for column in board.columns
    ]
    place = [("Places", "", "", 1)]
    costs = [(title, "", "", 1) for title in ("Epochs", "Seeds", "Time", "Images/s", "Memory", "Parameters")]
    ends = [(title, "text", "", 1) for title in ("Status", "Notes")]
    return [*text, *place, *figures, *costs, *ends]


def _line(board: Leaderboard, cell: Cell, name: str) -> dict[str, Any]:
    cells = [_text(name), *(_text(getattr(cell, key)) for key, _ in _shown(board)), _text(tables.family_text(cell))]
    # smaller is better for a place: negated, so that one click brings the best up as for accuracies
    low_place = -float(board.places[cell][0]) if cell in board.places else None
    cells.append(_number(low_place, tables.place_text(board, cell)))
    for column in board.columns:
        summary = cell.summary(column)
        main, _, interval = tables.figure(summary, column).partition(" [")
        small = f"[{interval}" if interval else ""
        cells.append(_number(summary.mean, main, small) | {"hidden": column not in board.headline})
    cells += [
        _number(cell.epochs, f"{cell.epochs:g}"),
        _number(float(len(cell.trials)), tables.seeds_text(cell) + ":")
        | {"links": [(row.seed, row.trial) for row in cell.trials]},
        _number(cell.cost("seconds"), tables.seconds_text(cell.cost("seconds"))),
        _number(cell.cost("images_per_second"), tables.number_text(cell.cost("images_per_second"))),
        _number(cell.cost("peak_memory_mb"), tables.megabytes_text(cell.cost("peak_memory_mb"))),
        _number(cell.cost("parameters"), tables.count_text(cell.cost("parameters"))),
        _text(cell.status, "text bad" if cell.num_failed else "text"),
        _text("; ".join([tables.recipe_note(cell), *tables.notes(cell)]), "notes"),
    ]
    return {
        "reference": cell.is_reference,
        "dataset": cell.dataset,
        "family": cell.family,
        "backbone": cell.backbone,
        "cells": cells,
    }


def _text(text: str, kind: str = "text") -> dict[str, Any]:
    return {"text": text, "value": text, "kind": kind, "small": "", "hidden": False, "links": ()}


def _number(value: float | None, text: str, small: str = "") -> dict[str, Any]:
    return {"text": text, "value": "" if value is None else repr(value), "kind": "", "small": small, "hidden": False,
            "links": ()}  # fmt: skip


def _trials(board: Leaderboard, trials: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    rows: dict[str, list[Row]] = {}
    for row in board.rows:
        rows.setdefault(row.trial, []).append(row)
    found = []
    for trial in trials:
        own = sorted(rows.get(trial.id, []), key=lambda row: (row.column, row.protocol))
        first = own[0] if own else Row()
        facts = [
            tables.seconds_text(first.seconds) if first.seconds is not None else "",
            f"stopped in {trial.stage} at step {trial.step}"
            if trial.status in BROKEN and trial.step is not None
            else "",
            first.hardware,
            f"commit {first.commit}" if first.commit else "",
            first.trial_note,
        ]
        name = f"{first.method} + {first.regularizers}" if first.regularizers else first.method
        title = f"{first.dataset} · {name} · {first.backbone} · {first.epochs or 0:g} epochs · seed {first.seed}"
        found.append(
            {
                "id": trial.id,
                "title": title + (f" · {first.variant}" if first.variant else "") if first.method else trial.id,
                "order": (
                    first.dataset,
                    name,
                    first.variant,
                    first.backbone,
                    first.epochs or 0,
                    first.seed or 0,
                ),
                "status": trial.status,
                "bad": trial.status in BROKEN,
                "reason": trial.reason,
                "facts": [fact for fact in facts if fact],
                "metrics": [row for row in own if row.protocol],
                "config": _pretty(trial.config) if trial.config else "",
            }
        )
    return sorted(found, key=lambda entry: (entry["order"], entry["id"]))


def _pretty(config: Mapping[str, Any]) -> str:
    """Indented JSON with short lists and objects on one line."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    return re.sub(
        r"([\[{])\n\s+([^\[\]{}]{0,90}?)\n\s+([\]}])", lambda m: m[1] + re.sub(r"\n\s+", " ", m[2]) + m[3], text
    )
