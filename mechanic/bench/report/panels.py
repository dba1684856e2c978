"""What the plots show. Plotly draws them on the page, matplotlib as PNG."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mechanic.bench.record import Run
from mechanic.bench.report.look import SWEEP, Look, Looks, log_ticks, percent, stretch
from mechanic.bench.report.words import excess_text
from mechanic.bench.score import Comparison, ScoreRow, format_lr, highest_rate, summarize
from mechanic.bench.sweep import final_losses, trouble

Points = Sequence[float]
Ticks = tuple[Points, Sequence[str]]
"""The positions of ticks, and their labels."""


@dataclass(frozen=True)
class Line:
    """The line of a method. With several seeds, a band reaches from the lowest to the highest."""

    label: str
    look: Look
    x: Points
    y: Points
    low: Points = ()
    high: Points = ()
    dots: bool = False


@dataclass(frozen=True)
class Marks:
    """The points of a method, each with a text."""

    label: str
    look: Look
    x: Points
    y: Points
    words: Sequence[str]
    symbol: str = "circle"
    """One of "circle", "diamond", "line-ns", "triangle-up" and "x"."""
    size: float = 9


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = ()
    marks: Sequence[Marks] = ()
    x_log: bool = False
    y_log: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_ticks: Ticks | None = None
    y_ticks: Ticks | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(line.x for line in self.lines) and not any(mark.x for mark in self.marks)


def row_panels(row: ScoreRow, looks: Looks) -> list[Panel]:
    """The panels of a row: the sweep if there is one, then the loss and the lr during training."""
    panels = [loss_panel(row, looks), rate_panel(row, looks)]
    if row.sweep:
        panels.insert(0, sweep_panel(row, looks))
    return [panel for panel in panels if not panel.empty]


def sweep_panel(row: ScoreRow, looks: Looks) -> Panel:
    """The final loss over the lr; each learning-rate-free method is a horizontal line."""
    assert row.sweep is not None
    swept = {lr: final_losses(runs).values() for lr, runs in row.sweep.runs.items()}
    complete = [lr for lr, runs in row.sweep.runs.items() if not trouble(runs)]
    means = [fmean(swept[lr]) for lr in complete]
    of_methods = {
        r.method.label: final_losses(r.runs).values() for r in row.results if not r.trouble
    }
    levels = {label: fmean(losses) for label, losses in of_methods.items()}
    y_range, y_log = _loss_range(row.start, [*means, *levels.values()], levels.values())
    top = y_range[1] if y_range else 1.0
    x_range = min(swept) / 1.6, max(swept) * 1.6
    look = looks[SWEEP]
    lows, highs = [min(swept[lr]) for lr in complete], [max(swept[lr]) for lr in complete]
    lines = [Line(SWEEP, look, complete, means, lows, highs, dots=True)]
    lines += [Line(label, looks[label], x_range, (y, y)) for label, y in levels.items()]
    lost = {lr: trouble(runs) for lr, runs in row.sweep.runs.items() if trouble(runs)}
    above = {lr: f"loss {y:.4g}" for lr, y in zip(complete, means, strict=True) if y > top}
    marks = [
        Marks(SWEEP, look, list(found), [top] * len(found), list(found.values()), symbol)
        for symbol, found in (("x", lost), ("triangle-up", above))
        if found
    ]
    marks += _learned_marks(row, looks, levels, x_range)
    return Panel(
        "Final train loss against learning rate", "learning rate", "train loss",
        lines, marks, x_log=True, y_log=y_log, x_range=x_range, y_range=y_range,
    )  # fmt: skip


def _learned_marks(
    row: ScoreRow, looks: Looks, levels: dict[str, float], x_range: tuple[float, float]
) -> list[Marks]:
    """Marks at the learned lr, of methods on the same base only: another base has another scale."""
    marks = []
    for result in row.results:
        label = result.method.label
        rate = _finite_median([highest_rate(run) for run in result.runs if run.base == row.base])
        if label in levels and rate > 0 and row.base:
            inside = min(max(rate, x_range[0]), x_range[1])
            words = [f"learned lr {format_lr(rate)}"]
            marks.append(Marks(label, looks[label], [inside], [levels[label]], words, "diamond"))
    return marks


def _finite_median(values: Iterable[float]) -> float:
    found = [value for value in values if math.isfinite(value)]
    return median(found) if found else math.nan


def _loss_range(
    start: float, losses: Iterable[float], must_show: Iterable[float]
) -> tuple[tuple[float, float] | None, bool]:
    """The range of the loss axis, and whether it is logarithmic.

    The range covers the better half of what was learned, and all of `must_show`: a learning rate
    that learned little would squash the rest.
    """
    found = [loss for loss in losses if math.isfinite(loss)]
    if not found:
        return None, False
    low = min(found)
    top = max([low + 0.5 * (start - low) if start > low else low, *must_show])
    log = low > 0 and top > 20 * low
    if log:
        return (low / 1.3, top * 1.15), True
    margin = 0.06 * (top - low) or 0.06 * abs(low) or 1.0
    return (low - margin, top + margin), False


def loss_panel(row: ScoreRow, looks: Looks) -> Panel:
    """The loss of the batches, for the best of the sweep and for every method."""
    lines = []
    for label, runs in _shown(row):
        curves = [(run.curve.step, run.curve.loss) for run in runs]
        lines.append(_course(label, looks[label], curves))
    y_range, y_log = _course_range(row.start, lines)
    return Panel(
        "Loss during training", "step", "batch loss", lines, y_log=y_log, y_range=y_range
    )  # fmt: skip


def rate_panel(row: ScoreRow, looks: Looks) -> Panel:
    """The lr in force: scheduled for the best of the sweep, learned for the methods."""
    lines = []
    for label, runs in _shown(row):
        curves = [(run.curve.step, run.curve.lr) for run in runs]
        line = _course(label, looks[label], curves, positive=True)
        if line.x:
            lines.append(line)
    peaks = [max(line.high or line.y) for line in lines]
    # Schedules end at 0, and tuners begin near it: neither says much, so both are cut off.
    y_range = (min(peaks) / 300, max(peaks) * 2) if peaks else None
    return Panel(
        "Learning rate in force", "step", "learning rate", lines, y_log=True, y_range=y_range
    )  # fmt: skip


def _shown(row: ScoreRow) -> list[tuple[str, tuple[Run, ...]]]:
    shown = [(SWEEP, row.sweep.best)] if row.sweep and row.sweep.best else []
    return shown + [(result.method.label, result.runs) for result in row.results]


def _course(
    label: str,
    look: Look,
    curves: Iterable[tuple[Sequence[int], Points]],
    positive: bool = False,
) -> Line:
    """The median over seeds at each step, with the band around it."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for steps, values in curves:
        for step, value in zip(steps, values, strict=True):
            if math.isfinite(value) and (value > 0 or not positive):
                by_step[step].append(value)
    steps = sorted(by_step)
    medians = [median(by_step[step]) for step in steps]
    if all(len(values) == 1 for values in by_step.values()):
        return Line(label, look, steps, medians)
    low, high = [min(by_step[step]) for step in steps], [max(by_step[step]) for step in steps]
    return Line(label, look, steps, medians, low, high)


def _course_range(start: float, lines: Sequence[Line]) -> tuple[tuple[float, float] | None, bool]:
    """The range of the loss axis, and whether it is logarithmic. It reaches from the lowest loss to
    the highest after a twentieth of training, but not above the loss at the start."""
    lines = [line for line in lines if line.y]
    if not lines:
        return None, False
    early = [line.y[len(line.y) // 20] for line in lines]
    low = min(min(line.low or line.y) for line in lines)
    top = max(early) if math.isnan(start) else min(max(early), start)
    top = max(top, low)
    if low > 0 and top > 20 * low:
        return (low / 1.3, top * 1.3), True
    margin = 0.06 * (top - low) or 0.06 * abs(low) or 1.0
    return (low - margin, top + margin), False


def overall_panel(comparison: Comparison, looks: Looks) -> Panel:
    """The excess of every row as a dot, with one line of dots for each method and a bar at its
    mean."""
    marks: list[Marks] = []
    methods = [summary.method for summary in summarize(comparison)]
    for index, method in enumerate(methods):
        label, look = method.label, looks[method.label]
        found = [(row, row.result(method)) for row in comparison.scored]
        ran = [(row, r) for row, r in found if r and not math.isnan(r.counted)]
        # Steps of the golden ratio move equal dots apart, in the same way in every report.
        heights = [index + 0.4 * (n * 0.618 % 1 - 0.5) for n in range(len(ran))]
        for symbol in ("circle", "x"):
            here = [n for n, (_, r) in enumerate(ran) if bool(r.trouble) == (symbol == "x")]
            words = [f"{_row_label(ran[n][0])}: {excess_text(ran[n][1])}" for n in here]
            x = [stretch(ran[n][1].counted) for n in here]
            marks.append(Marks(label, look, x, [heights[n] for n in here], words, symbol))
        mean = fmean(r.counted for _, r in ran)
        words = [f"mean {percent(mean)}"]
        marks.append(Marks(label, look, [stretch(mean)], [index], words, "line-ns", 22))
    ends = [0.0, 0.0, *(x for mark in marks for x in mark.x)]
    x_range = min(ends) - 0.5, max(ends) + 0.5
    ticks = [-100, -25, -10, -5, -1, 0, 1, 5, 10, 25, 50, 100]
    ticks = [tick for tick in ticks if x_range[0] <= stretch(tick) <= x_range[1]]
    return Panel(
        "Excess over the best of the sweep: a dot for each row, a bar at their mean",
        "excess in % (square-root scale)", "", marks=marks, x_range=x_range,
        y_range=(len(methods) - 0.4, -0.6),
        x_ticks=([stretch(tick) for tick in ticks], [str(tick) for tick in ticks]),
        y_ticks=(range(len(methods)), [method.label for method in methods]),
    )  # fmt: skip


def learned_panel(rows: Sequence[ScoreRow], looks: Looks) -> Panel:
    """The learned lr of each row that has no sweep."""
    marks = []
    for method in dict.fromkeys(result.method for row in rows for result in row.results):
        found = {}
        for index, row in enumerate(rows):
            result = row.result(method)
            rate = _finite_median(highest_rate(run) for run in result.runs) if result else math.nan
            if rate > 0:
                found[index] = rate
        words = [f"{_row_label(rows[index])}: {format_lr(rate)}" for index, rate in found.items()]
        look = looks[method.label]
        marks.append(Marks(method.label, look, list(found.values()), list(found), words))
    rates = [rate for mark in marks for rate in mark.x] or [1.0]
    x_range = min(rates) / 2, max(rates) * 2
    ticks = log_ticks(*x_range)
    return Panel(
        "Highest learning rate in force", "learning rate", "", marks=marks, x_log=True,
        x_range=x_range, x_ticks=(ticks, [format_lr(tick) for tick in ticks]),
        y_range=(len(rows) - 0.4, -0.6),
        y_ticks=(range(len(rows)), [_row_label(row) for row in rows]),
    )  # fmt: skip


def _row_label(row: ScoreRow) -> str:
    return f"{row.task}, {row.base}" if row.base else row.task
