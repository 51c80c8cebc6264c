"""`leaderboard.csv`, `.md` and `.tex`, and `comparisons.csv`: pure functions from rows to text.

The same rows give the same bytes: no clock, no locale, no file order enters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_bench.results.aggregate import (
    FAILED_SCORE,
    Cell,
    OverallTable,
    PairResult,
    columns_of,
    compare_cells,
    compare_regularized,
    headline_columns,
    is_accuracy,
    labels,
    make_cells,
    not_separable_from_best,
    over_datasets,
    places,
    ranking_column,
    sorted_cells,
)
from ssl_bench.results.rows import Row
from ssl_bench.results.statistics import Summary
from ssl_bench.results.store import csv_text
from ssl_bench.results.trial import BROKEN

COSTS = ("seconds", "images_per_second", "peak_memory_mb", "parameters", "backbone_parameters")


@dataclasses.dataclass(frozen=True)
class Leaderboard:
    """Everything the tables, plots and report show, computed once from the rows.

    `tables` holds each dataset's cells in ranking order, `places` the range of places
    that the comparisons in the ranking column leave to each competitor.
    """

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    headline: tuple[str, ...]
    ranking: str | None
    tables: Mapping[str, Sequence[Cell]]
    comparisons: tuple[PairResult, ...]
    places: Mapping[Cell, tuple[int, int]]
    overall: OverallTable | None
    facts: Mapping[str, Any]

    @property
    def study(self) -> str:
        """Name of the study."""
        return self.rows[0].study if self.rows else ""


def make_leaderboard(rows: Sequence[Row], facts: Mapping[str, Any] | None = None) -> Leaderboard:
    """Aggregate, sort and compare.

    Args:
        rows: Rows of one study, in any order.
        facts: The study's `study.json`; its `command` is printed in the footer.
    """
    cells = make_cells(rows)
    columns = columns_of(rows)
    ranking = ranking_column(columns)
    tables = sorted_cells(cells, ranking)
    comparisons: list[PairResult] = []
    ranges: dict[Cell, tuple[int, int]] = {}
    if ranking:
        for table in tables.values():
            pairs = compare_cells(table, ranking)
            ranges |= places(table, pairs)
            comparisons += pairs
    overall = over_datasets(cells, ranking) if ranking else None
    return Leaderboard(
        tuple(sorted(rows, key=lambda row: (row.cell, row.seed or 0, row.row_id))),
        tuple(columns),
        tuple(headline_columns(columns)),
        ranking,
        tables,
        tuple(comparisons) + (overall.comparisons if overall else ()),
        ranges,
        overall,
        facts or {},
    )


def leaderboard_csv(board: Leaderboard) -> str:
    """One line a dataset x method x regularizers x variant x backbone x epochs; raw numbers, never rounded."""
    identity = ["dataset", "method", "regularizers", "variant", "family", "uses_labels", "backbone", "epochs", "status"]
    counts = ["num_seeds", "num_failed", "place_low", "place_high"]
    figures = [f"{column} {part}" for column in board.columns for part in ("mean", "std", "ci_low", "ci_high", "n")]
    facts = ["method_version", "global_batch_size", "precision", "seeds", "commit", "torch_version",
             "lightning_version", "hardware", "recipe", "notes"]  # fmt: skip
    lines = []
    for dataset, table in board.tables.items():
        for cell in table:
            row = cell.rows[0]
            line: dict[str, Any] = {
                "dataset": dataset,
                "method": cell.method,
                "regularizers": cell.regularizers,
                "variant": cell.variant,
                "family": cell.family,
                "uses_labels": None if row.uses_labels is None else str(row.uses_labels).lower(),
                "backbone": cell.backbone,
                "epochs": cell.epochs,
                "status": cell.status,
                "num_seeds": len(cell.trials),
                "num_failed": cell.num_failed,
                "place_low": board.places[cell][0] if cell in board.places else None,
                "place_high": board.places[cell][1] if cell in board.places else None,
                "seeds": _join(cell, "seed"),
                "recipe": recipe_note(cell),
                "notes": "; ".join(notes(cell)),
            }
            for column in board.columns:
                s = cell.summary(column)
                line |= {f"{column} mean": s.mean, f"{column} std": s.std, f"{column} ci_low": s.low,
                         f"{column} ci_high": s.high, f"{column} n": s.n}  # fmt: skip
            line |= {name: cell.cost(name) for name in COSTS}
            line |= {name: _join(cell, name) for name in facts if name not in line}
            lines.append(line)
    return csv_text([*identity, *counts, *figures, *COSTS, *facts], lines)


def comparisons_csv(board: Leaderboard) -> str:
    """Every tested pair of the ranking column, raw numbers."""
    columns = [field.name for field in dataclasses.fields(PairResult)] + ["separable"]
    lines = ({**vars(pair), "separable": str(pair.separable).lower()} for pair in board.comparisons)
    return csv_text(columns, lines)


def leaderboard_md(board: Leaderboard) -> str:
    """The readable leaderboard: percent with intervals, a table a dataset, and how it was computed."""
    parts = [f"# Leaderboard: {_md(board.study)}"]
    if not board.tables:
        parts.append("No trial has a readable identity yet.")
    for dataset, table in board.tables.items():
        names = labels(table)
        parts.append(f"## {_md(dataset)}")
        header = ["#", "Places", "Method", "Family", *(column_title(column) for column in board.headline), "Seeds",
                  "Time", "Images/s", "Memory", "Parameters", "Status"]  # fmt: skip
        lines = []
        place = 0
        for cell in table:
            ranked = bool(board.ranking and cell.summary(board.ranking).n and not cell.is_reference)
            place += ranked
            name = f"*{_md(names[cell])}*" if cell.is_reference else _md(names[cell])
            lines.append(
                [str(place) if ranked else "", place_text(board, cell), name, _md(family_text(cell))]
                + [figure(cell.summary(column), column) for column in board.headline]
                + [seeds_text(cell), seconds_text(cell.cost("seconds"))]
                + [number_text(cell.cost("images_per_second")), megabytes_text(cell.cost("peak_memory_mb"))]
                + [count_text(cell.cost("parameters")), _md(cell.status)]
            )
        parts.append(_md_table(header, lines, left=(2, 3, len(header) - 1)))
        parts += [_md(text) for text in best_text(board, dataset)]
        parts += _regularizer_section(board, table)
        parts += _other_measurements(board, table, names)
    if board.overall:
        parts += _overall_section(board.overall)
    parts += _problem_section(board)
    parts += ["## How to read this", "\n".join(f"- {_md(line)}" for line in footer(board))]
    return "\n\n".join(parts) + "\n"


def leaderboard_tex(board: Leaderboard) -> str:
    """The leaderboard as LaTeX tables with booktabs, one a dataset, to be input where the paper wants them."""
    parts = [f"% {board.study}; needs \\usepackage{{booktabs}}; built from the stored trials, do not edit"]
    for dataset, table in board.tables.items():
        names = labels(table)
        columns = [column for column in board.headline if any(cell.summary(column).n for cell in table)]
        lines = [
            " & ".join([_tex(names[cell]), *(_tex_figure(cell.summary(column), column) for column in columns)])
            for cell in table
        ]
        head = " & ".join(["Method", *(_tex(column_title(column)) for column in columns)])
        seeds = sorted({cell.summary(column).n for cell in table for column in columns} - {0})
        parts += [
            "\\begin{table}",
            f"\\caption{{{_tex(dataset)}: mean $\\pm$ standard deviation over {' or '.join(map(str, seeds))} seeds.}}",
            f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
            *(f"{line} \\\\" for line in lines),
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
        ]
    return "\n".join(parts) + "\n"


def _tex_figure(summary: Summary, column: str) -> str:
    return short_figure(summary, column).replace(" (n = 1)", "").replace("±", "$\\pm$").replace("–", "--")


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def footer(board: Leaderboard) -> list[str]:
    """Sentences on how the tables were computed, from which code, data and command."""
    lines = [
        "Figures are mean ± sample standard deviation over pretraining seeds, with the 95 % Student t interval of the "
        "mean in brackets. One seed has neither: it is marked n = 1 and says nothing about noise.",
    ]
    if board.ranking:
        lines.append(
            f"Sorted by {board.ranking}. Places is the range of places that the data leave to a method, with 95 % "
            "confidence for all of them at once: paired t over shared seeds, Holm-corrected over all pairs of a "
            "dataset (comparisons.csv). Test-set sampling error is not in these intervals; for n images its standard "
            "error is about sqrt(p (1 - p) / n)."
        )
    lines.append(
        "Rows in italics are baselines or use labels; they have no place number. Trials that ended "
        "badly are counted under Seeds: diverged and collapsed ones are never averaged, and one that failed in a later "
        "stage keeps the figures measured before."
    )
    protocols: dict[str, set[str]] = {}
    for row in board.rows:
        if row.metric:
            label = row.column.rsplit("/", 1)[0]
            selection = "nothing was selected" if row.selected_on in ("", "none") else f"selected on {row.selected_on}"
            protocols.setdefault(label, set()).add(
                f"version {row.protocol_version}, {selection}, {row.n_test} {row.split} images"
            )
    lines += [f"{name}: {'; '.join(sorted(texts))}." for name, texts in sorted(protocols.items())]
    recipes: dict[str, set[str]] = {}
    for cell in (cell for table in board.tables.values() for cell in table):
        recipes.setdefault(recipe_note(cell), set()).add(cell.method)
    lines += [f"Pretraining of {', '.join(sorted(recipes[text]))}: {text}." for text in sorted(recipes)]
    for title, name in (("Seeds", "seed"), ("Precision", "precision"), ("Commit", "commit"), ("torch", "torch_version"),
                        ("lightning", "lightning_version"), ("Hardware", "hardware")):  # fmt: skip
        values = {value for row in board.rows if (value := getattr(row, name)) not in ("", None)}
        lines.append(f"{title}: {', '.join(map(str, sorted(values))) or 'not recorded'}.")
    if board.facts.get("command"):
        lines.append(f"Produced by: {board.facts['command']}")
    lines.append(f"Rebuild from the stored trials: ssl-bench leaderboard {board.study}")
    return lines


def overall_text(overall: OverallTable) -> str:
    """What the table over datasets shows and how far it can be trusted."""
    return (
        f"{column_title(overall.column)} on {', '.join(overall.datasets)}; methods and seeds that every dataset has. "
        f"Mean ranks closer than {overall.critical_difference:.2f} (Nemenyi, 5 %) are not separable; "
        f"Iman-Davenport p = {overall.friedman_p:.3g}. Interquartile mean with the 95 % stratified bootstrap interval "
        f"over seeds; a broken run scores {FAILED_SCORE:g}. Accuracies are pooled as they are, not rescaled by chance."
    )


def notes(cell: Cell) -> list[str]:
    """What a reader must know of a cell: why trials ended badly, missing rows, notes of trials and metrics."""
    found = []
    for row in cell.rows:
        if row.status in (*BROKEN, "skipped", "missing") and row.reason:
            where = f" ({row.protocol})" if row.status == "missing" else ""
            found.append(f"seed {row.seed} {row.status}{where}: {row.reason}")
        found += [text for text in (row.trial_note, row.note) if text]
    return list(dict.fromkeys(found))


def recipe_note(cell: Cell) -> str:
    """Where the hyper-parameters come from, as the recipe says."""
    sources = cell.distinct("recipe_source")
    return f"recipe from the card: {'; '.join(sources)}" if sources else "recipe from the card"


def column_title(column: str) -> str:
    """A column for readers: `knn/top1_k20` -> "knn top-1 k20"."""
    return re.sub(r"top(\d)", r"top-\1", column).replace("/", " ").replace("_", " ")


def family_text(cell: Cell) -> str:
    """Family, with a word where the method sees labels."""
    sees_labels = cell.rows[0].uses_labels and cell.family != "supervised"
    return f"{cell.family}, uses labels" if sees_labels else cell.family


def figure(summary: Summary, column: str) -> str:
    """Mean ± std with the interval in brackets; percent for accuracies, four digits otherwise."""
    if summary.mean is None:
        return "–"

    def show(value: float) -> str:
        return f"{100 * value:.1f}" if is_accuracy(column) else f"{value:.4g}"

    if summary.std is None or summary.low is None or summary.high is None:
        return f"{show(summary.mean)} (n = 1)"
    return f"{show(summary.mean)} ± {show(summary.std)} [{show(summary.low)}, {show(summary.high)}]"


def place_text(board: Leaderboard, cell: Cell) -> str:
    """The range of places of a cell, "2–4"; blank for references and cells without a figure."""
    if cell not in board.places:
        return ""
    low, high = board.places[cell]
    return str(low) if low == high else f"{low}–{high}"


def best_text(board: Leaderboard, dataset: str) -> list[str]:
    """A sentence on which methods cannot be told from the best of a dataset; none without comparisons."""
    pairs = [pair for pair in board.comparisons if pair.dataset == dataset]
    best = not_separable_from_best(board.tables[dataset], pairs)
    if best is None:
        return []
    name, rivals = best
    return [f"{dataset}: not separable from {name} at 5 %: {', '.join(rivals) or 'none'}."]


def short_figure(summary: Summary, column: str) -> str:
    """Mean ± std only, for wide tables; the interval stands in the CSV file."""
    return figure(summary, column).split(" [")[0]


def seeds_text(cell: Cell) -> str:
    """Trials that finished of all trials, with the broken ones named: "2/3, 1 failed"."""
    finished = sum(row.trial_status == "done" for row in cell.trials)
    text = f"{finished}/{len(cell.trials)}" if finished < len(cell.trials) else str(finished)
    return f"{text}, {cell.num_failed} failed" if cell.num_failed else text


def seconds_text(seconds: float | None) -> str:
    """A duration with its unit."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:,.4g} h"


def number_text(value: float | None) -> str:
    """A number to three digits, thousands separated."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def megabytes_text(value: float | None) -> str:
    """Memory in MB or GB."""
    if value is None:
        return "–"
    return f"{value / 1024:.3g} GB" if value >= 1024 else f"{value:.0f} MB"


def count_text(value: float | None) -> str:
    """A count of parameters in thousands or millions."""
    if value is None:
        return "–"
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k" if value >= 1e3 else f"{value:.0f}"


def _other_measurements(board: Leaderboard, table: Sequence[Cell], names: Mapping[Cell, str]) -> list[str]:
    others = [column for column in board.columns if column not in board.headline]
    others = [column for column in others if any(cell.summary(column).n for cell in table)]
    if not others:
        return []
    lines = [[_md(names[cell]), *(short_figure(cell.summary(column), column) for column in others)] for cell in table]
    body = _md_table(["Method", *map(column_title, others)], lines, left=(0,))
    return [f"<details><summary>Other measurements ({len(others)})</summary>", body, "</details>"]


def _regularizer_section(board: Leaderboard, table: Sequence[Cell]) -> list[str]:
    pairs = compare_regularized(table, board.ranking) if board.ranking else []
    if not pairs:
        return []
    assert board.ranking is not None
    scale, digits = (100, 2) if is_accuracy(board.ranking) else (1, 4)
    lines = []
    for pair in pairs:
        interval = "–"
        if pair.low is not None and pair.high is not None:
            interval = f"[{scale * pair.low:+.{digits}f}, {scale * pair.high:+.{digits}f}]"
        p = "–" if pair.p_holm is None else f"{pair.p_holm:.3f}"
        lines.append([_md(pair.a), _md(pair.b), f"{scale * pair.difference:+.{digits}f}", interval, p, str(pair.n)])
    header = ["With", "Without", column_title(board.ranking), "95 % interval", "p", "Seeds"]
    text = (
        "What an added term changes: the mean paired difference over shared seeds, its Student t interval, and p "
        "corrected (Holm) over the lines of this table."
    )
    return [text, _md_table(header, lines, left=(0, 1))]


def _overall_section(overall: OverallTable) -> list[str]:
    lines = [
        [_md(m.name), f"{m.mean_rank:.2f}", f"{100 * m.iqm:.1f} [{100 * m.low:.1f}, {100 * m.high:.1f}]",
         f"{100 * m.optimality_gap:.1f}", str(m.n_seeds), str(m.n_failed)]
        for m in overall.methods
    ]  # fmt: skip
    header = ["Method", "Mean rank", "Interquartile mean", "Optimality gap", "Seeds", "Failed"]
    return ["## Over datasets", _md(overall_text(overall)), _md_table(header, lines, left=(0,))]


def _problem_section(board: Leaderboard) -> list[str]:
    lines = []
    for dataset, table in board.tables.items():
        names = labels(table)
        for cell in table:
            lines += [f"- {_md(dataset)}, {_md(names[cell])}: {_md(note)}" for note in notes(cell)]
    lines += [
        f"- trial {_md(row.trial)} cannot be read and stands in no table: {_md(row.reason)}"
        for row in board.rows
        if not row.method
    ]
    return ["## Notes", "\n".join(dict.fromkeys(lines))] if lines else []


def _join(cell: Cell, name: str) -> str:
    if name == "seed":
        return " ".join(str(seed) for seed in sorted({row.seed for row in cell.trials if row.seed is not None}))
    return "; ".join(cell.distinct(name))


def _md_table(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    rule = [":--" if index in left else "--:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def _md(text: str) -> str:
    flat = " ".join(text.split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
