"""The overall tables of the page: one sums up the methods, one shows each method on each row."""

from collections.abc import Callable, Sequence

from mechanic.bench.report import words
from mechanic.bench.report.look import SWEEP, Looks, percent, shade
from mechanic.bench.report.markup import Markup, tag
from mechanic.bench.report.tables import tooltip
from mechanic.bench.score import Comparison, ScoreRow, Summary, format_lr, summarize


def summary_table(comparison: Comparison, looks: Looks) -> Markup:
    """One line for each method, the best first."""
    total = len(comparison.scored)
    columns = ("method", "mean excess", "lost runs", "worst", "mean rank", "rows", "cost in runs")
    head = tag("tr", *(tag("th", column) for column in columns))
    lines = [
        tag(
            "tr",
            tag("th", summary.method.label, style=_colour_mark(looks, summary.method.label)),
            _shaded(summary.mean),
            tag("td", summary.lost_of_runs, class_="lost" if summary.lost else None),
            _shaded(summary.worst),
            tag("td", f"{summary.rank:.1f}"),
            tag("td", _count_of_total(summary.rows, total)),
            tag("td", "1"),
            class_="default" if summary.method == comparison.default else None,
        )
        for summary in summarize(comparison)
    ]
    cost = words.sweep_cost(comparison.scored)
    sweep = (
        SWEEP,
        percent(0),
        words.lost_of_sweep(comparison.scored),
        percent(0),
        "–",
        str(total),
        cost,
    )
    lines.append(tag("tr", tag("th", sweep[0]), *(tag("td", text) for text in sweep[1:])))
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *lines)),
        class_="scroll summary",
    )


def _count_of_total(rows: int, total: int) -> str:
    return str(total) if rows == total else f"{rows} of {total}"


def _colour_mark(looks: Looks, label: str) -> str:
    return f"box-shadow: inset 4px 0 {looks[label].colour}; padding-left: 14px"


def _shaded(excess: float) -> Markup:
    return tag("td", percent(excess), style=f"background:{shade(excess)}")


def excess_table(comparison: Comparison, number: int, looks: Looks) -> Markup:
    """One line for each row, one column for each method. A result within noise is grey."""
    head = [tag("th", "task, base"), tag("th", "best lr of sweep")]
    for method in comparison.methods:
        class_ = "default" if method == comparison.default else None
        colour = f"box-shadow: inset 0 -4px {looks[method.label].colour}"
        label = method.label.replace("(lr ", "(lr\u00a0")
        head.append(tag("th", label, class_=class_, style=colour))
    tasks = list(dict.fromkeys((row.suite, row.task) for row in comparison.rows))
    lines: list[Markup] = []
    suite = None
    for row in comparison.scored:
        if row.suite != suite:
            suite = row.suite
            group = tag("th", suite)
            span = tag("td", colspan=str(len(head) - 1))
            lines.append(tag("tr", group, span, class_="suite"))
        index = tasks.index((row.suite, row.task))
        lines.append(_line(comparison, row, f"#task-{number}-{index}"))
    table = tag(
        "table",
        tag("thead", tag("tr", *head)),
        tag("tbody", *lines),
        tag("tfoot", *_footer(comparison)),
    )
    return tag("div", table, class_="scroll excess")


def _line(comparison: Comparison, row: ScoreRow, target: str) -> Markup:
    assert row.sweep is not None
    assert row.sweep.best_lr is not None
    edge = f"at the edge of the grid: {row.sweep.edge}" if row.sweep.edge else None
    best = format_lr(row.sweep.best_lr) + (" ⚠" if edge else "")
    name = tag("a", row.task, href=target)
    cells = [tag("th", name, " ", tag("span", row.base)), tag("td", best, title=edge)]
    for method in comparison.methods:
        result = row.result(method)
        text = words.excess_text(result)
        if result is None or not text:
            cells.append(tag("td", "not run", class_="absent"))
            continue
        within_noise = bool(result.excess and result.excess.within_noise)
        classes = [
            "trouble" if result.trouble else "",
            "quiet" if within_noise else "",
            "lost" if result.lost else "",
            "default" if method == comparison.default else "",
        ]
        style = None if within_noise or result.trouble else f"background:{shade(result.counted)}"
        class_ = " ".join(filter(None, classes)) or None
        cells.append(tag("td", text, class_=class_, style=style, title=tooltip(row, result)))
    return tag("tr", *cells)


def _footer(comparison: Comparison) -> list[Markup]:
    summaries = {summary.method: summary for summary in summarize(comparison)}
    total = len(comparison.scored)
    footer: Sequence[tuple[str, str, Callable[[Summary], str]]] = (
        ("mean excess", percent(0), lambda s: percent(s.mean)),
        ("lost runs", words.lost_of_sweep(comparison.scored), lambda s: s.lost_of_runs),
        ("worst excess", percent(0), lambda s: percent(s.worst)),
        ("mean rank", "–", lambda s: f"{s.rank:.1f}"),
        ("rows", str(total), lambda s: _count_of_total(s.rows, total)),
        ("cost in runs", words.sweep_cost(comparison.scored), lambda s: "1"),
    )
    lines = []
    for name, of_sweep, of_method in footer:
        cells = [tag("th", name), tag("td", of_sweep)]
        for method in comparison.methods:
            text = of_method(summaries[method]) if method in summaries else "–"
            class_ = "default" if method == comparison.default else None
            cells.append(tag("td", text, class_=class_))
        lines.append(tag("tr", *cells))
    return lines


def colour_key() -> Markup:
    """The legend of the colours of the table."""
    steps = (-25.0, -5.0, 0.0, 1.0, 5.0, 25.0, 100.0)
    swatches = [tag("span", percent(step), style=f"background:{shade(step)}") for step in steps]
    return tag(
        "div",
        *swatches,
        tag("span", "≈ within seed noise", class_="quiet"),
        tag("span", "diverged, failed or above start", class_="trouble"),
        tag("span", "a run is lost", class_="lost"),
        class_="key",
    )
