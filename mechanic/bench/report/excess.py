"""The overall tables of the page: a line a method, and a line a row with a column a method."""

from collections.abc import Callable, Sequence

from mechanic.bench.report import words
from mechanic.bench.report.look import SWEEP, Looks, percent, shade
from mechanic.bench.report.markup import Markup, tag
from mechanic.bench.report.tables import tooltip
from mechanic.bench.score import Comparison, Row, Summary, short, summarize


def summary_table(comparison: Comparison, looks: Looks) -> Markup:
    """A line a method, the best first."""
    total = len(comparison.scored)
    words_of_head = ("method", "mean excess", "worst", "mean rank", "rows", "cost in runs")
    head = tag("tr", *(tag("th", word) for word in words_of_head))
    lines = [
        tag(
            "tr",
            tag("th", summary.method.label, style=_underline(looks, summary.method.label)),
            _shaded(summary.mean),
            _shaded(summary.worst),
            tag("td", f"{summary.rank:.1f}"),
            tag("td", _of(summary.rows, total)),
            tag("td", "1"),
            class_="default" if summary.method == comparison.default else None,
        )
        for summary in summarize(comparison)
    ]
    cost = words.sweep_cost(comparison.scored)
    sweep = (SWEEP, percent(0), percent(0), "–", str(total), cost)
    lines.append(tag("tr", tag("th", sweep[0]), *(tag("td", word) for word in sweep[1:])))
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *lines)),
        class_="scroll summary",
    )


def _of(rows: int, total: int) -> str:
    return str(total) if rows == total else f"{rows} of {total}"


def _underline(looks: Looks, label: str) -> str:
    return f"box-shadow: inset 4px 0 {looks[label].colour}; padding-left: 14px"


def _shaded(excess: float) -> Markup:
    return tag("td", percent(excess), style=f"background:{shade(excess)}")


def excess_table(comparison: Comparison, number: int, looks: Looks) -> Markup:
    """Tasks and bases against methods; what is within noise is grey."""
    head = [tag("th", "task, base"), tag("th", "best lr of sweep")]
    for method in comparison.methods:
        kind = "default" if method == comparison.default else None
        colour = f"box-shadow: inset 0 -4px {looks[method.label].colour}"
        label = method.label.replace("(lr ", "(lr\u00a0")
        head.append(tag("th", label, class_=kind, style=colour))
    tasks = list(dict.fromkeys((row.suite, row.task) for row in comparison.rows))
    lines: list[Markup] = []
    suite = None
    for row in comparison.scored:
        if row.suite != suite:
            suite = row.suite
            group = tag("th", suite)
            span = tag("td", colspan=str(len(head) - 1))
            lines.append(tag("tr", group, span, class_="suite"))
        place = tasks.index((row.suite, row.task))
        lines.append(_line(comparison, row, f"#task-{number}-{place}"))
    table = tag(
        "table",
        tag("thead", tag("tr", *head)),
        tag("tbody", *lines),
        tag("tfoot", *_footer(comparison)),
    )
    return tag("div", table, class_="scroll excess")


def _line(comparison: Comparison, row: Row, target: str) -> Markup:
    assert row.sweep is not None
    assert row.sweep.best_lr is not None
    edge = f"on the edge of the grid: {row.sweep.edge}" if row.sweep.edge else None
    best = short(row.sweep.best_lr) + (" ⚠" if edge else "")
    name = tag("a", row.task, href=target)
    cells = [tag("th", name, " ", tag("span", row.base)), tag("td", best, title=edge)]
    for method in comparison.methods:
        result = row.result(method)
        text = words.cell(result)
        if result is None or not text:
            cells.append(tag("td", "not run", class_="absent"))
            continue
        quiet = bool(result.excess and result.excess.within_noise)
        kinds = [
            "trouble" if result.trouble else "",
            "quiet" if quiet else "",
            "default" if method == comparison.default else "",
        ]
        style = None if quiet or result.trouble else f"background:{shade(result.counted)}"
        kind = " ".join(filter(None, kinds)) or None
        cells.append(tag("td", text, class_=kind, style=style, title=tooltip(row, result)))
    return tag("tr", *cells)


def _footer(comparison: Comparison) -> list[Markup]:
    found = {summary.method: summary for summary in summarize(comparison)}
    total = len(comparison.scored)
    kinds: Sequence[tuple[str, str, Callable[[Summary], str]]] = (
        ("mean excess", percent(0), lambda s: percent(s.mean)),
        ("worst excess", percent(0), lambda s: percent(s.worst)),
        ("mean rank", "–", lambda s: f"{s.rank:.1f}"),
        ("rows", str(total), lambda s: _of(s.rows, total)),
        ("cost in runs", words.sweep_cost(comparison.scored), lambda s: "1"),
    )
    lines = []
    for name, of_sweep, said in kinds:
        cells = [tag("th", name), tag("td", of_sweep)]
        for method in comparison.methods:
            text = said(found[method]) if method in found else "–"
            kind = "default" if method == comparison.default else None
            cells.append(tag("td", text, class_=kind))
        lines.append(tag("tr", *cells))
    return lines


def colour_key() -> Markup:
    """What the colours of the table mean."""
    steps = (-25.0, -5.0, 0.0, 1.0, 5.0, 25.0, 100.0)
    swatches = [tag("span", percent(step), style=f"background:{shade(step)}") for step in steps]
    return tag(
        "div",
        *swatches,
        tag("span", "≈ within seed noise", class_="quiet"),
        tag("span", "diverged, failed or above start", class_="trouble"),
        class_="key",
    )
