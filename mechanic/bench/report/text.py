"""The report as Markdown, and its numbers as CSV."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from mechanic.bench.record import Run
from mechanic.bench.report import words
from mechanic.bench.report.look import count_of, percent
from mechanic.bench.report.tables import (
    Table,
    lost_table,
    result_table,
    suite_table,
    unswept_table,
)
from mechanic.bench.score import Comparison, ScoreRow, duels, summarize

FigurePaths = Mapping[tuple[str, ...], str]
"""Relative paths, by the keys of `figures.write_figures`."""


def markdown(comparisons: Sequence[Comparison], title: str, figures: FigurePaths) -> str:
    """The whole report as Markdown."""
    parts = [f"# {escape_markdown(title)}"]
    for comparison in comparisons:
        parts += _section(comparison, figures)
    return "\n\n".join(part for part in parts if part) + "\n"


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is."""
    text = re.sub(r"\s+", " ", text).replace("&", "&amp;")
    return re.sub(r"([\\`*\[\]<>|~$])", r"\\\1", text)


def _section(comparison: Comparison, figures: FigurePaths) -> list[str]:
    budget = comparison.budget
    parts = [f"## Budget {escape_markdown(budget)}"]
    facts = [(escape_markdown(key), escape_markdown(text)) for key, text in words.facts(comparison)]
    parts.append("\n".join(f"- **{key}**: {text}" for key, text in facts))
    warnings = map(escape_markdown, words.warnings(comparison))
    parts += [f"> **Note.** {warning}" for warning in warnings]
    if comparison.scored:
        parts += ["### Overall", words.EXPLANATION, _summary(comparison)]
        if len(comparison.suites) > 1:
            parts.append(_table(suite_table(comparison)))
        parts.append(_image("Overall comparison", figures.get((budget, "overall"))))
        parts += [words.NOISE, _noise(comparison), "### Excess by row", _excess(comparison)]
    if comparison.unswept:
        parts += ["### Rows without a sweep", _table(unswept_table(comparison.unswept))]
        parts.append(_image("Learned learning rates", figures.get((budget, "learned"))))
    lost = lost_table(comparison)
    parts += ["### Lost runs", words.LOST_RUNS]
    parts.append(_table(lost) if lost.lines else words.NO_LOST_RUNS)
    parts += ["### Task by task", words.PLOTS]
    for (suite, task), rows in comparison.tasks.items():
        heading = f"#### {escape_markdown(suite)}: {escape_markdown(task)}"
        parts += [heading, *_task(budget, rows, figures)]
    return parts


def _summary(comparison: Comparison) -> str:
    total = len(comparison.scored)
    lines = [
        (s.method.label, percent(s.mean), s.lost_of_runs, percent(s.worst),
         f"{s.rank:.1f}", f"{s.rows} of {total}", "1")
        for s in summarize(comparison)
    ]  # fmt: skip
    cost = words.sweep_cost(comparison.scored)
    lost = words.lost_of_sweep(comparison.scored)
    lines.append(("best of sweep", percent(0), lost, percent(0), "–", f"{total} of {total}", cost))
    head = ("method", "mean excess", "lost runs", "worst", "mean rank", "rows", "cost in runs")
    return _table(Table(head, lines))


def _noise(comparison: Comparison) -> str:
    if comparison.default is None:
        return ""
    label = escape_markdown(comparison.default.label)
    pairs = [("the best of the sweep", words.against_sweep(comparison))]
    pairs += [(duel.other.label, words.duel_counts(duel)) for duel in duels(comparison)]
    return "\n".join(
        f"- {label} against {escape_markdown(other)}: {words.verdict(*counts)}."
        for other, counts in pairs
        if any(counts)
    )


def _excess(comparison: Comparison) -> str:
    head = ("suite", "task", "base", *(method.label for method in comparison.methods))
    lines = []
    for row in comparison.scored:
        excess = [words.excess_text(row.result(method)) for method in comparison.methods]
        lines.append((row.suite, row.task, row.base, *excess))
    return _table(Table(head, lines))


def _task(budget: str, rows: Sequence[ScoreRow], figures: FigurePaths) -> list[str]:
    parts = []
    for row in rows:
        parts.append(f"{escape_markdown(row.base) or 'No base'}: {words.best_of_sweep(row)}")
        path = figures.get((budget, row.suite, row.task, row.base))
        parts.append(_image(words.row_name(row), path))
    parts.append(_table(result_table(rows)))
    if found := words.mishaps(rows):
        head = ("method", "lr", "what", "reason")
        title = f"{count_of(len(found), 'setting')} diverged or failed:"
        parts += [title, _table(Table(head, found))]
    return parts


def _image(title: str, path: str | None) -> str:
    return f"![{escape_markdown(title)}]({path})" if path else ""


def _table(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.lines]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text if text == "---" else escape_markdown(text)


def runs_csv(runs: Iterable[Run]) -> str:
    """One line for each run, with everything but its curve."""
    runs = list(runs)
    metrics = sorted({key for run in runs for key in run.metrics})
    environment = sorted({key for run in runs for key in run.environment})
    fields = (
        "suite", "task", "budget", "method", "kind", "base", "lr", "seed", "status", "reason",
        "start_loss", "metric", "seconds",
    )  # fmt: skip
    head = [*fields, *(f"metrics.{key}" for key in metrics)]
    head += [f"environment.{key}" for key in environment]
    lines: list[Sequence[object]] = [head]
    for run in runs:
        values = [getattr(run, field) for field in fields]
        values += [run.metrics.get(key, "") for key in metrics]
        lines.append([*values, *(run.environment.get(key, "") for key in environment)])
    return _csv(lines)


def read_runs(path: Path) -> list[Run]:
    """The runs of a file that `runs_csv` wrote, or of one with fewer columns."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Run(
                suite=line["suite"],
                task=line["task"],
                budget=line["budget"],
                method=line["method"],
                kind=line["kind"],  # type: ignore[arg-type]
                base=line["base"],
                lr=float(line["lr"]),
                seed=int(line["seed"]),
                status=line["status"],  # type: ignore[arg-type]
                reason=line.get("reason", ""),
                start_loss=float(line["start_loss"] or "nan"),
                metrics={
                    key.removeprefix("metrics."): float(value)
                    for key, value in line.items()
                    if key.startswith("metrics.") and value
                },
                metric=line.get("metric", ""),
                seconds=float(line.get("seconds") or 0.0),
            )
            for line in csv.DictReader(file)
        ]


def summary_csv(comparisons: Sequence[Comparison]) -> str:
    """One line for each row, and for each method its excess in percent, or what went wrong."""
    labels = list(dict.fromkeys(m.label for c in comparisons for m in c.methods))
    lines: list[Sequence[object]] = [
        ["budget", "suite", "task", "base", "start_loss", "best_loss", "best_lr", "edge", *labels]
    ]
    for comparison in comparisons:
        for row in comparison.scored:
            assert row.sweep is not None
            best = fmean(run.metrics["train_loss"] for run in row.sweep.best)
            by_label = {r.method.label: r.trouble or f"{r.counted:.4f}" for r in row.results}
            lines.append(
                [comparison.budget, row.suite, row.task, row.base, row.start, best]
                + [row.sweep.best_lr, row.sweep.edge]
                + [by_label.get(label, "") for label in labels]
            )
    return _csv(lines)


def _csv(lines: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
