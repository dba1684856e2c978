"""Writes panels as PNG files, with matplotlib."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from mechanic.bench.report.look import Looks, log_ticks
from mechanic.bench.report.panels import Panel, learned_panel, overall_panel, row_panels
from mechanic.bench.score import Comparison, ScoreRow, format_lr

_SYMBOLS = {"circle": "o", "x": "x", "diamond": "D", "triangle-up": "^", "line-ns": "|"}
_DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a name may contain dollar signs
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "grid.color": "#E6E6E6",
}
FigureKey = tuple[str, ...]
"""(budget, suite, task, base) for a row; (budget, "overall") or (budget, "learned") otherwise."""


def write_figures(
    comparisons: Sequence[Comparison], looks: Looks, folder: Path
) -> dict[FigureKey, Path]:
    """Write the figures of each budget, and of each row that has something to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[FigureKey, Path] = {}
    taken: set[Path] = set()
    with mpl.rc_context(_STYLE):
        for comparison in comparisons:
            budget = comparison.budget
            overview = {
                "overall": overall_panel(comparison, looks),
                "learned": learned_panel(comparison.unswept, looks),
            }
            for kind, panel in overview.items():
                if not panel.empty:
                    path = paths[budget, kind] = _path(folder, taken, f"{budget}-{kind}")
                    _save_overview(panel, path)
            for row in comparison.rows:
                if panels := row_panels(row, looks):
                    key = (budget, row.suite, row.task, row.base)
                    path = paths[key] = _path(folder, taken, "-".join(key))
                    _save_row(row, panels, looks, path)
    return paths


def _path(folder: Path, taken: set[Path], name: str) -> Path:
    """A file name that every system allows, and that no other figure has."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100]
    path, number = folder / f"{safe}.png", 1
    while path in taken:
        number += 1
        path = folder / f"{safe}-{number}.png"
    taken.add(path)
    return path


def _save_row(row: ScoreRow, panels: Sequence[Panel], looks: Looks, path: Path) -> None:
    figure = Figure(figsize=(14, 4.6), dpi=110)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel_axes, panel in zip(axes, panels, strict=True):
        _draw(panel, panel_axes)
    figure.suptitle(" · ".join(filter(None, (row.suite, row.task, row.base))), weight="bold")
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    longest = max(map(len, labels), default=0)
    columns = max(1, min(len(labels), 190 // (longest + 8)))  # 190 letters fit into a line
    lines = -(-len(labels) // columns) if labels else 0
    bottom = 0.13 + 0.05 * lines
    figure.subplots_adjust(left=0.055, right=0.985, top=0.85, bottom=bottom, wspace=0.22)
    _legend(figure, labels, looks, columns)
    _save(figure, path)


def _legend(figure: Figure, labels: Sequence[str], looks: Looks, columns: int) -> None:
    handles = [
        Line2D([], [], color=look.colour, linewidth=look.width, linestyle=_DASHES[look.dash])
        for look in (looks[label] for label in labels)
    ]
    # matplotlib leaves out a label that begins with "_", unless an invisible character precedes it.
    texts = [f"\u2060{label}" if label.startswith("_") else label for label in labels]
    figure.legend(handles, texts, loc="lower center", ncols=columns, frameon=False)


def _save_overview(panel: Panel, path: Path) -> None:
    assert panel.y_ticks is not None
    figure = Figure(figsize=(10, 1.1 + 0.32 * len(panel.y_ticks[0])), dpi=110, layout="constrained")
    _draw(panel, figure.subplots())
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Save with a palette, which takes a third of the size and looks the same."""
    buffer = io.BytesIO()
    figure.savefig(buffer)
    image = Image.open(buffer).convert("RGB")
    image.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def _draw(panel: Panel, axes: Axes) -> None:
    for line in panel.lines:
        colour = line.look.colour
        axes.plot(
            line.x, line.y, color=colour, linewidth=line.look.width,
            linestyle=_DASHES[line.look.dash], marker="o" if line.dots else "", markersize=4,
        )  # fmt: skip
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.13, linewidth=0)
    for marks in panel.marks:
        thin = marks.symbol in ("x", "line-ns")
        axes.scatter(
            marks.x, marks.y, marker=_SYMBOLS[marks.symbol], s=(marks.size * 0.75) ** 2,
            color=marks.look.colour, edgecolors=None if thin else "white",
            linewidths=2 if thin else 0.6, clip_on=False, zorder=3,
            alpha=1.0 if marks.symbol in ("diamond", "line-ns") else 0.7,
        )  # fmt: skip
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_title)
    axes.set_ylabel(panel.y_title)
    _scale(panel, axes)


def _scale(panel: Panel, axes: Axes) -> None:
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    if panel.x_range:
        axes.set_xlim(*panel.x_range)
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    for log, axis in ((panel.x_log, axes.xaxis), (panel.y_log, axes.yaxis)):
        if log:  # matplotlib's own labels are formulas, which `_STYLE` does not parse
            ticks = log_ticks(*axis.get_view_interval())
            axis.set_ticks(ticks, [format_lr(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks[0]), list(panel.x_ticks[1]))
    if panel.y_ticks:
        axes.set_yticks(list(panel.y_ticks[0]), list(panel.y_ticks[1]))
