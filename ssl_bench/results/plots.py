"""Plots of a leaderboard: accuracy against cost, and training curves. Deterministic bytes, no display.

Matplotlib is imported when a figure is drawn, never pyplot, so that no global state is touched.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssl_bench.results.aggregate import Cell, is_accuracy, labels
from ssl_bench.results.statistics import pareto_front
from ssl_bench.results.tables import Leaderboard, column_title
from ssl_bench.results.trial import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c564b", "#6b7a00", "#c2185b")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "h")
_REFERENCE_COLOR = "#555555"
_STYLE = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ssl_bench",
    "svg.fonttype": "none",
    "figure.dpi": 100.0,
}


def draw_plots(board: Leaderboard, trials: Sequence[TrialRecord], *, image_format: str = "png") -> dict[str, bytes]:
    """Every plot of a study by file name without suffix; datasets without figures or curves have none.

    Args:
        board: The leaderboard.
        trials: Its trials, for their curves.
        image_format: "png" or "svg".
    """
    curves = {trial.id: trial.curve() for trial in trials}
    plots: dict[str, bytes] = {}
    with _style():
        for dataset, table in board.tables.items():
            if board.ranking and (figure := accuracy_against_cost(table, board.ranking)):
                plots[f"accuracy_cost_{dataset}"] = _encode(figure, image_format)
            if figure := training_curves(table, curves):
                plots[f"training_curves_{dataset}"] = _encode(figure, image_format)
            if figure := headline_scatter(table, board.headline):
                plots[f"protocols_{dataset}"] = _encode(figure, image_format)
    return plots


def accuracy_against_cost(table: Sequence[Cell], column: str) -> Figure | None:
    """Mean with its 95 % interval against pretraining seconds, with the Pareto front.

    Rows that cost nothing (untrained baselines) become horizontal lines. References stay out of the front.
    """
    figures = {cell: cell.summary(column) for cell in table}
    costs = {cell: cell.cost("seconds") or 0.0 for cell in table}
    shown = [cell for cell in table if figures[cell].mean is not None]
    trained = [cell for cell in shown if costs[cell] > 0]
    if not trained:
        return None
    crowd = max(0, len(trained) - 12)
    figure, axes = _figure(8.0 + min(3.0, 0.08 * crowd), 5.2 + min(4.0, 0.1 * crowd))
    scale, names, styles = _scale(column), labels(table), _styles(table)
    for cell in trained:
        s = figures[cell]
        mean = scale * (s.mean or 0.0)
        error = None if s.low is None else [[mean - scale * s.low], [scale * (s.high or 0.0) - mean]]
        color, marker = styles[cell.family]
        axes.errorbar(
            costs[cell], mean, error, fmt=marker, color=color, markersize=6, elinewidth=1.0, capsize=2,
            markerfacecolor="white" if s.low is None else color, zorder=3,
        )  # fmt: skip
    contenders = [cell for cell in trained if not cell.is_reference]
    front = pareto_front([costs[cell] for cell in contenders], [figures[cell].mean or 0.0 for cell in contenders])
    if len(front) > 1:
        axes.plot(
            [costs[contenders[i]] for i in front], [scale * (figures[contenders[i]].mean or 0.0) for i in front],
            color="#999999", linewidth=1.2, linestyle="--", zorder=1, drawstyle="steps-post", label="Pareto front",
        )  # fmt: skip
    _cost_axis(axes, [costs[cell] for cell in trained])
    _fit_to_means(axes, [scale * (figures[cell].mean or 0.0) for cell in shown])
    for cell in shown:
        if cell not in trained:
            height = scale * (figures[cell].mean or 0.0)
            axes.axhline(height, color=_REFERENCE_COLOR, linewidth=0.9, linestyle=":", zorder=1)
            axes.annotate(
                names[cell], (1.0, height), xycoords=("axes fraction", "data"), xytext=(-3, 2),
                textcoords="offset points", ha="right", va="bottom", color=_REFERENCE_COLOR, fontsize=8,
            )  # fmt: skip
    axes.set_ylabel(_axis_title(column))
    axes.set_title(
        f"{table[0].dataset}: {column_title(column)} against the cost of pretraining", loc="left", fontsize=10
    )
    _family_legend(axes, [cell.family for cell in trained], styles)
    points = [(costs[cell], scale * (figures[cell].mean or 0.0), names[cell]) for cell in trained]
    bars = [
        (costs[cell], scale * s.low, scale * s.high)
        for cell in trained
        if (s := figures[cell]).low is not None and s.high is not None
    ]
    _label_points(axes, points, [styles[cell.family][0] for cell in trained], bars)
    return figure


def headline_scatter(table: Sequence[Cell], headline: Sequence[str]) -> Figure | None:
    """The first headline protocol against the second: do the protocols agree on the methods?"""
    if len(headline) < 2:
        return None
    first, second = headline[:2]
    shown = [cell for cell in table if cell.summary(first).n and cell.summary(second).n]
    if len(shown) < 3:
        return None
    figure, axes = _figure(6.4, 5.2)
    names, styles = labels(table), _styles(table)
    points = []
    for cell in shown:
        x, y = _scale(second) * (cell.summary(second).mean or 0.0), _scale(first) * (cell.summary(first).mean or 0.0)
        color, marker = styles[cell.family]
        axes.plot(x, y, marker, color=color, markersize=6, zorder=3)
        points.append((x, y, names[cell]))
    axes.margins(0.12)
    axes.set_xlabel(_axis_title(second))
    axes.set_ylabel(_axis_title(first))
    axes.set_title(f"{table[0].dataset}: {column_title(first)} against {column_title(second)}", loc="left", fontsize=10)
    _family_legend(axes, [cell.family for cell in shown], styles)
    _label_points(axes, points, [styles[cell.family][0] for cell in shown])
    return figure


def training_curves(
    table: Sequence[Cell], curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
) -> Figure | None:
    """The loss of each method in a panel of its own (losses do not compare), with the online probe, dashed grey.

    One thin line a seed; trials that ended badly are dotted.
    """
    names, styles = labels(table), _styles(table)
    shown = [cell for cell in table if any("train/loss" in curves.get(row.trial, {}) for row in cell.trials)]
    if not shown:
        return None
    columns = min(5, max(2, math.ceil(math.sqrt(len(shown)))))
    lines = math.ceil(len(shown) / columns)
    figure, panels = _figure(2.5 * columns, 1.9 * lines + 0.5, lines, columns)
    probe_name = _probe_curve(curves)
    probes = [value for curve in curves.values() for _, value in curve.get(probe_name or "", ())]
    for index, panel in enumerate(panels):
        if index >= len(shown):
            panel.set_visible(False)
            continue
        cell = shown[index]
        probe_axes = panel.twinx() if probes else None
        if probe_axes is not None:
            _style_probe_axes(probe_axes, probes, last_column=index % columns == columns - 1 or index == len(shown) - 1)
        for row in cell.trials:
            curve = curves.get(row.trial, {})
            style = "-" if row.trial_status in ("done", "running") else ":"
            if points := curve.get("train/loss"):
                x, y = zip(*_smooth(points), strict=True)
                panel.plot(x, y, style, color=styles[cell.family][0], linewidth=1.1, alpha=0.85)
            if probe_axes is not None and (points := curve.get(probe_name or "")):
                x, y = zip(*points, strict=True)
                probe_axes.plot(
                    x, [100 * value for value in y], style.replace("-", "--"), color="#777777", linewidth=0.9, alpha=0.8
                )
        panel.set_title(names[cell], loc="left", fontsize=8.5, color=styles[cell.family][0])
        panel.tick_params(labelsize=7)
        panel.grid(axis="x", visible=False)
        panel.locator_params(axis="y", nbins=4)
        panel.locator_params(axis="x", nbins=5, integer=True)
        if index >= len(shown) - columns:
            panel.set_xlabel("epoch", fontsize=8)
    probe_text = f"; dashed, right axis: {column_title(probe_name or '')}, %" if probes else ""
    figure.suptitle(f"{table[0].dataset}: training loss, one line a seed{probe_text}", x=0.01, ha="left", fontsize=10)
    return figure


@contextlib.contextmanager
def _style() -> Iterator[None]:
    from matplotlib import style

    with style.context(["default", _STYLE]):  # type: ignore[list-item]
        yield


def _figure(width: float, height: float, lines: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    return figure, axes[0] if lines == columns == 1 else list(axes)


def _encode(figure: Figure, image_format: str) -> bytes:
    buffer = io.BytesIO()
    # without these entries the bytes would hold the date and the library's version
    metadata = {"Date": None, "Creator": None} if image_format == "svg" else {"Software": None}
    figure.savefig(buffer, format=image_format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _styles(table: Sequence[Cell]) -> dict[str, tuple[str, str]]:
    families = sorted({cell.family for cell in table if not cell.is_reference})
    styles = dict.fromkeys({cell.family for cell in table} - set(families), (_REFERENCE_COLOR, "*"))
    for index, family in enumerate(families):
        styles[family] = (_COLORS[index % len(_COLORS)], _MARKERS[(index + index // len(_COLORS)) % len(_MARKERS)])
    return styles


def _family_legend(axes: Axes, families: Sequence[str], styles: Mapping[str, tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=styles[family][0], marker=styles[family][1], linestyle="none", label=family or "no family")
        for family in sorted(set(families))
    ]
    front = [line for line in axes.get_lines() if line.get_label() == "Pareto front"]
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles + front, loc="outside lower left", ncols=4, fontsize=8)  # type: ignore[union-attr]


def _label_points(
    axes: Axes,
    points: Sequence[tuple[float, float, str]],
    colors: Sequence[str],
    bars: Sequence[tuple[float, float, float]] = (),
) -> None:
    """Name every point at the first of a fixed list of places where the name covers no point, bar or name."""
    from matplotlib.patheffects import withStroke

    figure = axes.get_figure()
    assert figure is not None
    canvas = figure.canvas
    canvas.draw()  # type: ignore[attr-defined]
    renderer = canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = [tuple(axes.transData.transform((x, y))) for x, y, _ in points]
    frame = axes.get_window_extent(renderer)
    pad = 4.0
    taken = [(x - pad, y - pad, x + pad, y + pad) for x, y in pixels]
    ends = [(axes.transData.transform((x, low)), axes.transData.transform((x, high))) for x, low, high in bars]
    taken += [(low[0] - 1.5, low[1], low[0] + 1.5, high[1]) for low, high in ends]
    taken += [_box(text.get_window_extent(renderer)) for text in axes.texts]
    for index in sorted(range(len(points)), key=lambda i: (-pixels[i][1], pixels[i][0], points[i][2])):
        x, y, name = points[index]
        px, py = pixels[index]
        text = axes.annotate(
            name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=7.5, color=colors[index], zorder=4,
            ha="center", va="center", path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip
        extent = text.get_window_extent(renderer)
        half_width, half_height = extent.width / 2, extent.height / 2
        best = None
        for distance in (9, 16, 26, 38, 52, 68):
            for angle in range(0, 360, 30):
                dx = math.cos(math.radians(angle)) * (distance + half_width)
                dy = math.sin(math.radians(angle)) * (distance + half_height * 0.6)
                box = (px + dx - half_width, py + dy - half_height, px + dx + half_width, py + dy + half_height)
                outside = box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1
                covered = sum(_overlap(box, other) for other in taken) + (1e6 if outside else 0.0)
                if best is None or covered < best[0]:
                    best = (covered, dx, dy, distance, box)
            if best is not None and best[0] == 0.0:
                break
        assert best is not None
        _, dx, dy, distance, box = best
        points_per_pixel = 72.0 / figure.dpi
        text.set_position((dx * points_per_pixel, dy * points_per_pixel))
        taken.append(box)
        if distance > 16:
            end = axes.transData.inverted().transform((px + dx * 0.85, py + dy * 0.85))
            axes.plot([x, end[0]], [y, end[1]], color=colors[index], linewidth=0.5, alpha=0.6, zorder=2, scalex=False,
                      scaley=False)  # fmt: skip


def _box(extent: Any) -> tuple[float, float, float, float]:
    return (extent.x0, extent.y0, extent.x1, extent.y1)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    unit, name = (3600.0, "hours") if min(costs) > 3600 else (60.0, "minutes") if min(costs) > 300 else (1.0, "seconds")
    if max(costs) > 8 * min(costs):
        axes.set_xscale("log")
        axes.set_xlim(min(costs) / 1.5, max(costs) * 1.5)
    else:
        margin = 0.12 * (max(costs) - min(costs)) or 0.1 * max(costs)
        axes.set_xlim(min(costs) - margin, max(costs) + margin)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:.3g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel(f"pretraining time of one trial, {name}")


def _fit_to_means(axes: Axes, heights: Sequence[float]) -> None:
    """Limits from the means, not the intervals: one interval over two seeds would flatten all else."""
    low, high = min(heights), max(heights)
    margin = 0.12 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _style_probe_axes(axes: Axes, probes: Sequence[float], *, last_column: bool) -> None:
    low, high = 100 * min(probes), 100 * max(probes)
    margin = 0.05 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.grid(visible=False)
    axes.tick_params(labelsize=7, colors="#777777", labelright=last_column, length=2 if last_column else 0)


def _smooth(points: Sequence[tuple[float, float]], most: int = 200) -> list[tuple[float, float]]:
    """Means of equal stretches, so that a long noisy curve stays readable and small."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def _probe_curve(curves: Mapping[str, Mapping[str, Any]]) -> str | None:
    names = {name for curve in curves.values() for name in curve if name.startswith("probe/") and is_accuracy(name)}
    return min(names, default=None)


def _scale(column: str) -> float:
    return 100.0 if is_accuracy(column) else 1.0


def _axis_title(column: str) -> str:
    return f"{column_title(column)}, %" if is_accuracy(column) else column_title(column)
