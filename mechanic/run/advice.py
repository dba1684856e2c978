"""What a history says: the lr to type, how long the ramp took, and what looks wrong."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from mechanic import causes
from mechanic.causes import Skips
from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History
from mechanic.suggestion import suggest, typed_rates

_STILL_GROWING = 1.5  # so many times in each of the last two quarters: once may be chance
# In healthy runs the scale fell up to 60-fold below what it had been in ten steps, after spikes of
# SGD's gradients and in runs that diverged 1e6-fold and more.
_FELL, _HELD = 1e3, 10


@dataclass(frozen=True)
class Spread:
    """How a number developed over the run."""

    final: float
    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Spread":
        """The spread of the number times a factor."""
        return Spread(*(factor * n for n in (self.final, self.median, self.low, self.high)))


@dataclass(frozen=True)
class Findings:
    """What the summary says about one optimizer."""

    typed: tuple[float, ...]
    """The lr that was typed, for each group."""
    typed_name: str
    """Its name where it is typed: `lr`, or OneCycleLR's `max_lr`."""
    scale: Spread | None
    """None where no scale was learned."""
    ramp: int | None
    """The steps until the scale first reached half of its mean. None for an optimizer that had
    learned its scale before."""
    suggested: tuple[float, ...]
    """The lr to type, for each group; empty where nothing was learned."""
    skipped: int
    warnings: tuple[str, ...]
    """What went wrong, with the fix."""
    hints: tuple[str, ...] = ()
    """What a healthy run may look at."""


def analyze(history: History) -> Findings:
    """Look at the history of one optimizer."""
    typed, name = typed_rates(history.groups)
    rows = [row for row in history.rows if row.scale > 0]
    skips = _skips(history)
    if not rows:
        warnings = tuple(_warnings_without_scale(history, skips))
        return Findings(typed, name, None, None, (), skips.skipped, warnings)
    scales = [row.scale for row in rows]
    half = rows[-1].mean_scale / 2
    ramp = next((row.step for row in rows if row.scale >= half), None)
    spread = Spread(scales[-1], weighted_median(_weighted_by_steps(rows)), min(scales), max(scales))
    failure = _failure(history, rows)
    warnings = tuple(_warnings(history, rows, skips, failure))
    is_learned = not failure and not skips.are_few_left and rows[-1].mean_scale > 0
    suggested = suggest(rows[-1].mean_scale, history.groups) if is_learned else ()
    shown_ramp = None if history.resumed else ramp
    return Findings(
        typed,
        name,
        spread,
        shown_ramp,
        suggested,
        skips.skipped,
        warnings,
        tuple(_hints(rows, skips, is_edited=history.edited)),
    )


def why_nothing(histories: Sequence[History], *, has_failed: bool = False) -> str:
    """What to say of a run in which no optimizer took a step."""
    if not histories and has_failed:
        return "the script failed before it made a torch optimizer."
    if not histories:
        return "the script made no torch optimizer, so there was nothing to tune."
    return f"no optimizer took a step. The script made: {class_names(histories)}."


def class_names(histories: Sequence[History]) -> str:
    """The classes of the optimizers, each once."""
    return ", ".join(sorted({history.name for history in histories}))


def _weighted_by_steps(rows: Sequence[HistoryRow]) -> list[tuple[float, int]]:
    """Each scale with the number of steps that it stands for in a thinned history."""
    before = [0, *(row.step for row in rows[:-1])]
    return [(row.scale, row.step - step) for row, step in zip(rows, before, strict=True)]


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The median of pairs of a number and its weight.

    >>> weighted_median([(1.0, 5), (2.0, 1), (9.0, 3)])
    1.0
    """
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return math.nan


def _skips(history: History) -> Skips:
    """The steps that were skipped in this run. A checkpoint brings the count of those before."""
    rows = history.rows
    before = [rows[0].skipped if history.resumed and rows else 0, *(row.skipped for row in rows)]
    gaps = [b.step - a for a, b in zip([0, *(row.step for row in rows)], rows, strict=False)]
    news = [row.skipped - old for row, old in zip(rows, before, strict=False)]
    found = [(row.step, gap) for row, gap, new in zip(rows, gaps, news, strict=True) if new > 0]
    whole = zip(reversed(gaps), reversed(news), strict=True)
    in_a_row = sum(gap for gap, _ in takewhile(lambda pair: pair[0] == pair[1], whole))
    if not found:
        return Skips(history.steps, 0, 0)
    (first, one), (last, other) = found[0], found[-1]
    return Skips(history.steps, sum(news), in_a_row, first, last, is_exact=one == other == 1)


def _warnings_without_scale(history: History, skips: Skips) -> Iterable[str]:
    if history.status == "refused":
        yield f"not tuned: {history.reason}"
    if history.status in ("tuned", "own") and history.steps:
        if skips.skipped:
            yield causes.of_skips(skips)
        elif not any(lr for row in history.rows for lr in row.lr):
            yield causes.ZERO_LR
        else:
            yield causes.ZERO_GRADIENT if history.had_gradients else causes.NO_GRADIENT


def _warnings(
    history: History, rows: Sequence[HistoryRow], skips: Skips, failure: str
) -> Iterable[str]:
    has_exploded = failure != "" and failure == _explosion(history, rows)
    if has_exploded:
        yield failure  # skipped steps, if any, follow from it
    if skips.skipped and not skips.are_rare:
        yield causes.of_skips(skips)
    elif skips.are_few_left:
        yield causes.too_few(history.steps)
    if skips.are_few_left or has_exploded:
        return
    if failure:
        yield failure
    elif capped := [row.step for row in rows if causes.is_at_cap(row.scale, history.max_scale)]:
        ending = ", and ended there" if capped[-1] == rows[-1].step else ""
        yield causes.of_cap(history.max_scale, f" at step {capped[0]:,}{ending}")
    elif _is_growing(rows):
        yield causes.STILL_GROWING


def _failure(history: History, rows: Sequence[HistoryRow]) -> str:
    """Why the scale is of no use, with the fix; empty if it is of use."""
    is_capped = any(causes.is_at_cap(row.scale, history.max_scale) for row in rows)
    if not is_capped and not history.resumed:
        if all(row.scale == rows[0].scale for row in rows):
            return causes.ZERO_GRADIENT
        if said := _explosion(history, rows):
            return said
    if fall := _fall(rows):
        return causes.of_fall(*fall)
    if is_capped or history.resumed:
        return ""
    # Of the second half, since a ramp in noise goes up and comes down again.
    late = (row for row in rows if row.step >= 0.5 * rows[-1].step)
    return causes.of_standstill(_growth(late, rows[0]))


def _explosion(history: History, rows: Sequence[HistoryRow]) -> str:
    return causes.of_explosion(_growth(rows, rows[0])) if history.is_relative else ""


def _growth(rows: Iterable[HistoryRow], first: HistoryRow) -> float:
    """The largest lr in force, as a multiple of the first one."""
    return max(max(row.effective_lr) for row in rows) / (max(first.effective_lr) or 1.0)


def _hints(rows: Sequence[HistoryRow], skips: Skips, *, is_edited: bool) -> Iterable[str]:
    if skips.skipped and skips.are_rare:
        yield causes.of_skips(skips)
    if is_edited:
        yield causes.EDITED
    if all(row.lr == rows[0].lr for row in rows):
        yield causes.CONSTANT_LR


def _fall(rows: Sequence[HistoryRow]) -> tuple[float, int] | None:
    """How far the scale fell below what it had been, for good, and the last step before. None where
    it did not fall far.

    The lr in force has to have fallen as far: in a warm-up the scale falls to make up for it, and
    at the end of a schedule the lr in force is meant to fall.
    """
    ending = [row for row in rows if row.step >= 0.75 * rows[-1].step]
    scale = _FELL * max(row.scale for row in ending)
    rate = _FELL * max(max(row.effective_lr) for row in ending)
    above = [row for row in rows if row.scale >= scale and max(row.effective_lr) >= rate]
    if len(above) < _HELD:
        return None
    highest = sorted(row.scale for row in above)[-_HELD]
    return _FELL * highest / scale, above[-1].step


def _is_growing(rows: Sequence[HistoryRow]) -> bool:
    """Whether the learning rate in force was still growing at the end. The scale alone may grow to
    make up for a schedule that falls."""
    ends = [part * rows[-1].step for part in (0.5, 0.75, 1.0)]
    reached = [next((row for row in rows if row.step >= end), rows[-1]) for end in ends]
    rates = [max(row.effective_lr) for row in reached]
    highest = max(max(row.effective_lr) for row in rows)
    grew = all(after >= _STILL_GROWING * before for before, after in pairwise(rates))
    return grew and rates[-1] >= 0.9 * highest
