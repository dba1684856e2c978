"""Panels as data for plotly.js, with every name escaped."""

import json
import math
from html import escape
from typing import Any

from mechanic.bench.report.panels import Line, Marks, Panel

_GRID = "#E6E6E6"
_INK = "#333333"


def figure_json(panel: Panel) -> str:
    """The JSON of `data` and `layout`, safe inside a script element."""
    data = [trace for line in panel.lines for trace in _line(line)]
    data += [_marks(marks) for marks in panel.marks if len(marks.x)]
    text = json.dumps({"data": data, "layout": _layout(panel)}, separators=(",", ":"))
    # Only "<" can end a script element.
    return text.replace("<", "\\u003c")


def height(panel: Panel) -> int:
    """The height of a panel in pixels."""
    return 90 + 28 * len(panel.y_ticks[0]) if panel.y_ticks else 300


def _escaped(name: str) -> str:
    """A label without HTML and templates (`%{…}`), both of which plotly would interpret."""
    return escape(name, quote=False).replace("%{", "%&#123;")


def _line(line: Line) -> list[dict[str, Any]]:
    shared = {"meta": line.label, "name": _escaped(line.label), "showlegend": False}
    style = {"color": line.look.colour, "width": line.look.width, "dash": line.look.dash}
    drawn = {
        **shared,
        "x": _round(line.x),
        "y": _round(line.y),
        "mode": "lines+markers" if line.dots else "lines",
        "line": style,
        "marker": {"size": 6},
        "hovertemplate": "%{y:.4~g} at %{x:.3~g}<extra>%{fullData.name}</extra>",
    }
    if not line.low:
        return [drawn]
    band = {
        **shared,
        "x": _round([*line.x, *reversed(line.x)]),
        "y": _round([*line.high, *reversed(line.low)]),
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": line.look.colour,
        "opacity": 0.13,
        "hoverinfo": "skip",
    }
    return [band, drawn]


def _marks(marks: Marks) -> dict[str, Any]:
    thin = marks.symbol == "line-ns"
    edge = marks.look.colour if thin else "white"
    return {
        "meta": marks.label,
        "name": _escaped(marks.label),
        "showlegend": False,
        "x": _round(marks.x),
        "y": _round(marks.y),
        "text": [_escaped(word) for word in marks.words],
        "mode": "markers",
        "cliponaxis": False,
        "marker": {
            "symbol": marks.symbol,
            "size": marks.size,
            "color": marks.look.colour,
            "opacity": 1.0 if thin or marks.symbol == "diamond" else 0.7,
            "line": {"color": edge, "width": 3 if thin else 0.8},
        },
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    }


def _layout(panel: Panel) -> dict[str, Any]:
    wide = panel.y_ticks is not None
    return {
        "height": height(panel),
        "margin": {"l": 10 if wide else 62, "r": 16, "t": 8, "b": 46},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "hoverlabel": {"namelength": -1},
        "xaxis": _axis(panel.x_title, panel.x_log, panel.x_range, panel.x_ticks),
        "yaxis": {
            **_axis(panel.y_title, panel.y_log, panel.y_range, panel.y_ticks),
            "automargin": wide,
        },
    }


def _axis(title: str, log: bool, limits: tuple[float, float] | None, ticks: Any) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "title": {"text": title, "standoff": 8},
        "gridcolor": _GRID,
        "linecolor": "#999999",
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#999999",
        "exponentformat": "power",
        "tickangle": 0,
    }
    if log:
        decades = math.log10(limits[1] / limits[0]) if limits else 1.0
        # Ticks at powers of ten; within two decades at 1, 2 and 5, which plotly calls "D2".
        axis |= {"type": "log", "dtick": math.ceil(decades / 7) if decades > 2 else "D2"}
    if limits:
        axis["range"] = [math.log10(end) for end in limits] if log else list(limits)
    if ticks:
        axis |= {"tickvals": list(ticks[0]), "ticktext": [_escaped(text) for text in ticks[1]]}
    return axis


def _round(values: Any) -> list[float]:
    """Round to five digits: more than a screen shows, and half the size of the page."""
    return [value if isinstance(value, int) else float(f"{value:.5g}") for value in values]
