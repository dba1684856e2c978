"""The tables of the report, for HTML and Markdown alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mechanic.bench.report import words
from mechanic.bench.report.look import SWEEP, count_of, number, percent
from mechanic.bench.score import (
    Comparison,
    Result,
    ScoreRow,
    format_lr,
    highest_rate,
    summarize,
)
from mechanic.bench.sweep import best_by_metric, final_losses


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


def suite_table(comparison: Comparison) -> Table:
    """The mean excess of each method in each suite, since suites have unequal numbers of rows."""
    suites = comparison.suites
    lines = [
        (
            summary.method.label,
            *(percent(summary.by_suite[s]) if s in summary.by_suite else "" for s in suites),
        )
        for summary in summarize(comparison)
    ]
    return Table(("mean excess by suite", *suites), lines)


def lost_table(comparison: Comparison) -> Table:
    """Every lost run by name: those of Mechanic's default first, those of the sweeps last."""
    found = [
        (method.label, row, result.lost, len(result.runs))
        for method in comparison.methods
        for row in comparison.rows
        if (result := row.result(method))
    ]
    swept = [row for row in comparison.scored if row.sweep]
    found += [
        (SWEEP, row, tuple(row.lost_by_sweep), len(row.sweep.best)) for row in swept if row.sweep
    ]
    lines = [
        (
            label,
            f"{row.suite}: {words.row_name(row)}",
            f"{len(lost)} of {runs}",
            ", ".join(f"seed {one.run.seed} ({one.cause})" for one in lost).replace(
                " %", "\u00a0%"
            ),
        )
        for label, row, lost, runs in found
        if lost
    ]
    return Table(("method", "row", "lost", "which, and why"), lines)


def result_table(rows: Sequence[ScoreRow]) -> Table:
    """The final results of each method on one task, for each base."""
    head = ["method"]
    columns: list[dict[str, str]] = []
    for row in rows:
        base = f"{row.base}: " if row.base else ""
        head.append(f"{base}train loss")
        columns.append(_losses(row))
        if row.metric:
            head.append(f"{base}{row.metric}")
            columns.append(_metrics(row))
        head.append(f"{base}lr")
        columns.append(_rates(row))
    labels = list(dict.fromkeys(r.method.label for row in rows for r in row.results))
    if any(row.sweep for row in rows):
        labels.insert(0, SWEEP)
    return Table(
        head, [(label, *(column.get(label, "") for column in columns)) for label in labels]
    )


def _losses(row: ScoreRow) -> dict[str, str]:
    found = {r.method.label: _loss(r) for r in row.results}
    if row.sweep:
        found[SWEEP] = words.mean_spread(list(final_losses(row.sweep.best).values()))
    return found


def _loss(result: Result) -> str:
    losses = words.mean_spread(list(final_losses(result.runs).values()))
    if not result.trouble:
        return losses
    return result.trouble if losses == "–" else f"{result.trouble}, otherwise {losses}"


def _metrics(row: ScoreRow) -> dict[str, str]:
    found = {
        r.method.label: words.mean_spread(list(final_losses(r.runs, row.metric).values()))
        for r in row.results
    }
    if row.sweep and (best := best_by_metric(row.sweep, row.metric)):
        lr, values = best
        found[SWEEP] = f"{words.mean_spread(list(values.values()))} (at {format_lr(lr)})"
    return found


def _rates(row: ScoreRow) -> dict[str, str]:
    found = {r.method.label: learned_rate(r) for r in row.results}
    if row.sweep:
        found[SWEEP] = "–" if row.sweep.best_lr is None else format_lr(row.sweep.best_lr)
    return found


def learned_rate(result: Result) -> str:
    """The highest lr in force, as the median over the seeds."""
    rates = [rate for run in result.runs if math.isfinite(rate := highest_rate(run))]
    return format_lr(median(rates)) if rates else "–"


def unswept_table(rows: Sequence[ScoreRow]) -> Table:
    """The results on rows that have no sweep."""
    head = ("task", "method", "learned lr", "train loss", "metric")
    lines = []
    for row in rows:
        for result in row.results:
            values = list(final_losses(result.runs, row.metric).values()) if row.metric else []
            metric = f"{row.metric} {words.mean_spread(values)}" if values else ""
            name = f"{row.suite}: {words.row_name(row)}"
            found = learned_rate(result), _loss(result), metric
            lines.append((name, result.method.label, *found))
    return Table(head, lines)


def tooltip(row: ScoreRow, result: Result) -> str:
    """The details of a cell of the overall table."""
    assert row.sweep is not None
    best = fmean(final_losses(row.sweep.best).values())
    parts = [f"train loss {_loss(result)}", f"best of sweep {number(best)}"]
    if result.excess and not math.isnan(result.excess.noise):
        seeds = count_of(result.excess.seeds, "seed")
        parts.append(f"seed noise ± {result.excess.noise:.2g} % over {seeds}")
    elif result.excess:
        parts.append("one seed: noise unknown")
    return "; ".join(parts)
