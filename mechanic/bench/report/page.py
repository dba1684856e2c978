"""The report as one HTML page that needs no other file: it includes its style and plotly.js."""

from collections.abc import Sequence
from importlib.resources import files

from plotly.offline import get_plotlyjs

from mechanic.bench.report import words
from mechanic.bench.report.excess import colour_key, excess_table, summary_table
from mechanic.bench.report.look import SWEEP, Look, Looks, count_of
from mechanic.bench.report.markup import Markup, join, tag
from mechanic.bench.report.panels import Panel, learned_panel, overall_panel, row_panels
from mechanic.bench.report.plotly import figure_json, height
from mechanic.bench.report.tables import (
    Table,
    lost_table,
    result_table,
    suite_table,
    unswept_table,
)
from mechanic.bench.score import Comparison, ScoreRow, duels

# Names of tasks come from the user: whatever they contain, the page cannot load or send anything.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def render_page(comparisons: Sequence[Comparison], title: str, looks: Looks) -> str:
    """The HTML of the whole page."""
    resources = files("mechanic.bench.report")
    style = Markup((resources / "page.css").read_text("utf-8"))
    script = Markup((resources / "page.js").read_text("utf-8"))
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", title),
        tag("style", style),
    )
    sections = [_section(c, number, looks) for number, c in enumerate(comparisons)]
    body = join(
        _navigation(comparisons, title),
        tag("main", tag("h1", title), *sections),
        tag("script", Markup(get_plotlyjs())),
        tag("script", script),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _link(target: str, text: str, **attributes: str) -> Markup:
    return tag("a", text, href=f"#{target}", **attributes)


def _navigation(comparisons: Sequence[Comparison], title: str) -> Markup:
    groups = []
    for number, comparison in enumerate(comparisons):
        groups.append(_link(f"budget-{number}", f"Budget {comparison.budget}", class_="budget"))
        parts = [("overall", "Overall", bool(comparison.scored))]
        parts.append(("rows", "Excess by row", bool(comparison.scored)))
        parts.append(("unswept", "Rows without a sweep", bool(comparison.unswept)))
        parts.append(("lost", "Lost runs", True))
        parts.append(("tasks", "Task by task", True))
        groups += [_link(f"{key}-{number}", text) for key, text, exists in parts if exists]
        suite = None
        for index, (of_suite, task) in enumerate(comparison.tasks):
            if of_suite != suite:
                groups.append(tag("span", of_suite, class_="suite"))
                suite = of_suite
            groups.append(_link(f"task-{number}-{index}", task, class_="task"))
    all_plots = tag("button", "Draw all plots", id="draw-all", type="button")
    # Open by default; on a narrow screen the script closes it.
    return tag(
        "nav",
        Markup(f"<details open>{tag('summary', 'Contents')}{join(*groups, all_plots)}</details>"),
        aria_label=f"Contents of {title}",
    )


def _section(comparison: Comparison, number: int, looks: Looks) -> Markup:
    facts = [
        tag("div", tag("dt", key), tag("dd", text), class_="long" if len(text) > 60 else None)
        for key, text in words.facts(comparison)
    ]
    warnings = [tag("p", warning, class_="warning") for warning in words.warnings(comparison)]
    parts = [
        tag("h2", f"Budget {comparison.budget}", id=f"budget-{number}"),
        _lead(comparison),
        tag("dl", *facts),
        *warnings,
    ]
    if comparison.scored:
        parts += _overall(comparison, number, looks)
    if comparison.unswept:
        parts += [
            tag("h3", "Rows without a sweep", id=f"unswept-{number}"),
            tag("p", "There is no sweep to compare with. Shown is what each method learned."),
            _plot(learned_panel(comparison.unswept, looks)),
            _table(unswept_table(comparison.unswept)),
        ]
    lost = lost_table(comparison)
    parts += [
        tag("h3", "Lost runs", id=f"lost-{number}"),
        tag("p", words.LOST_RUNS, "" if lost.lines else f" {words.NO_LOST_RUNS}"),
        tag("div", _table(lost), class_="named") if lost.lines else None,
    ]
    parts.append(tag("h3", "Task by task", id=f"tasks-{number}"))
    parts.append(tag("p", words.PLOTS, " Click on a method to hide it in all plots."))
    parts.append(_legend([method.label for method in comparison.methods], looks))
    default = comparison.default.label if comparison.default else None
    for index, ((suite, task), rows) in enumerate(comparison.tasks.items()):
        heading = tag("h3", tag("small", suite), task, id=f"task-{number}-{index}")
        parts.append(tag("section", heading, *_task(rows, looks, default), class_="task"))
    return tag("section", *parts, class_="budget")


def _lead(comparison: Comparison) -> Markup | None:
    """One paragraph with the main result."""
    counts = words.against_sweep(comparison)
    if comparison.default is None or not any(counts) or comparison.budget == "smoke":
        return None
    return tag(
        "p",
        tag("b", comparison.default.label),
        words.headline(comparison),
        words.verdict(*counts),
        ".",
        class_="lead",
    )


def _overall(comparison: Comparison, number: int, looks: Looks) -> list[Markup | None]:
    pairs = [("the best of the sweep", words.against_sweep(comparison))]
    pairs += [(duel.other.label, words.duel_counts(duel)) for duel in duels(comparison)]
    noise = [
        tag("li", _bar(counts), tag("b", other), f": {words.verdict(*counts)}.")
        for other, counts in pairs
        if any(counts) and comparison.default
    ]
    chart = overall_panel(comparison, looks)
    return [
        tag("h3", "Overall", id=f"overall-{number}"),
        tag("p", words.EXPLANATION),
        tag("div", summary_table(comparison, looks), _plot(chart), class_="overall"),
        _table(suite_table(comparison), comparison.default.label if comparison.default else None)
        if len(comparison.suites) > 1
        else None,
        tag("h4", f"{comparison.default.label} against each other method")
        if noise and comparison.default
        else None,
        tag("ul", *noise, class_="noise") if noise else None,
        tag("h3", "Excess by row", id=f"rows-{number}"),
        tag("p", words.NOISE),
        colour_key(),
        excess_table(comparison, number, looks),
    ]


def _bar(counts: Sequence[int]) -> Markup:
    verdicts = ("better", "worse", "within_noise", "undecided")
    texts = ("better", "worse", "within seed noise", "undecided")
    order = (0, 2, 3, 1)  # noise is shown between better and worse
    parts = [
        tag("i", class_=verdicts[k], style=f"flex:{counts[k]}", title=f"{texts[k]}: {counts[k]}")
        for k in order
        if counts[k]
    ]
    return tag("span", *parts, class_="bar")


def _task(rows: Sequence[ScoreRow], looks: Looks, default: str | None) -> list[Markup]:
    parts = []
    for row in rows:
        plots = [_plot(panel) for panel in row_panels(row, looks)]
        lost = [f"{r.method.label} ({r.trouble})" for r in row.results if r.trouble]
        note = f" Not in the plot of the sweep: {', '.join(lost)}." if lost and row.sweep else ""
        heading = tag("h4", row.base) if row.base else None
        text = tag("p", words.best_of_sweep(row) + note)
        parts.append(tag("div", heading, text, tag("div", *plots, class_="plots"), class_="row"))
    parts.append(_table(result_table(rows), default))
    if found := words.mishaps(rows):
        summary = tag("summary", f"{count_of(len(found), 'setting')} diverged or failed")
        table = _table(Table(("method", "lr", "what", "reason"), found))
        parts.append(tag("details", summary, table, class_="mishaps"))
    return parts


def _plot(panel: Panel) -> Markup:
    size = f"min-height:{height(panel)}px"  # so that drawing a plot does not move the page
    return tag(
        "figure",
        tag("figcaption", panel.title),
        tag("div", class_="chart", role="img", aria_label=panel.title, style=size),
        tag("script", Markup(figure_json(panel)), type="application/json"),
    )


def _legend(labels: Sequence[str], looks: Looks) -> Markup:
    chips = [
        tag("button", _swatch(looks[label]), label, type="button", data_method=label,
            aria_pressed="true")
        for label in (SWEEP, *labels)
    ]  # fmt: skip
    return tag("div", *chips, class_="legend", title="Show or hide in all plots")


def _swatch(look: Look) -> Markup:
    style = {"solid": "solid", "dash": "dashed"}.get(look.dash, "dotted")
    return tag("i", style=f"border-top:{max(2, round(look.width))}px {style} {look.colour}")


def _table(table: Table, bold: str | None = None) -> Markup:
    head = tag("tr", *(tag("th", text) for text in table.head))
    lines = [
        tag("tr", tag("th", line[0]), *(tag("td", text) for text in line[1:]),
            class_="default" if line[0] == bold else None)
        for line in table.lines
    ]  # fmt: skip
    html = tag("table", tag("thead", head), tag("tbody", *lines))
    return tag("div", html, class_="scroll plain")
