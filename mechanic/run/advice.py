"""What a history says: the lr to type, how long the ramp took, and what looks wrong."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mechanic.run.rows import HistoryRow
from mechanic.run.spool import GroupRates, History

_MIN_STEPS = 30  # fewer steps say nothing yet
_GROWTH = 3.0  # a scale that stayed below this multiple of its first value has not grown
_STILL_GROWING = 1.5  # the lr in force at the end over that at three quarters of the run
_AT_CAP = 0.99  # of the cap


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
    """The steps until the scale first reached half of the level that it settled at. None for an
    optimizer that had learned its scale before."""
    suggested: tuple[float, ...]
    """The lr to type, for each group; empty where nothing was learned."""
    skipped: int
    warnings: tuple[str, ...]


def analyze(history: History) -> Findings:
    """Look at the history of one optimizer."""
    typed, name = _typed(history.groups)
    rows = [row for row in history.rows if row.scale > 0]
    skipped = history.latest.skipped if history.latest else 0
    if not rows:
        warnings = tuple(_warnings_without_scale(history, skipped))
        return Findings(typed, name, None, None, (), skipped, warnings)
    scales = [row.scale for row in rows]
    level = weighted_median(_weighted_by_lr(rows, rows[-1].step / 2))
    ramp = next(row.step for row in rows if row.scale >= level / 2)
    settled = weighted_median(_weighted_by_lr(rows, ramp))
    spread = Spread(scales[-1], weighted_median(_weighted_by_steps(rows)), min(scales), max(scales))
    warnings = tuple(_warnings(history, rows, skipped))
    suggested = tuple(settled * lr for lr in typed) if history.steps >= _MIN_STEPS else ()
    shown_ramp = None if history.resumed else ramp
    return Findings(typed, name, spread, shown_ramp, suggested, skipped, warnings)


def _typed(groups: Sequence[GroupRates]) -> tuple[tuple[float, ...], str]:
    if groups and all(rates.get("max_lr") for rates in groups):
        return tuple(float(rates["max_lr"] or 0) for rates in groups), "max_lr"
    initial = (rates["initial_lr"] if rates["initial_lr"] else rates["lr"] for rates in groups)
    return tuple(1.0 if lr is None else lr for lr in initial), "lr"


def _weighted_by_steps(rows: Sequence[HistoryRow]) -> list[tuple[float, int]]:
    """Each scale with the number of steps that it stands for in a thinned history."""
    before = [0, *(row.step for row in rows[:-1])]
    return [(row.scale, row.step - step) for row, step in zip(rows, before, strict=True)]


def _weighted_by_lr(rows: Sequence[HistoryRow], first: float) -> list[tuple[float, float]]:
    """The scales from step `first` on. Each counts by the lr of its steps: when a schedule falls,
    the scale rises to make up for it, which says nothing about the lr to start from."""
    return [
        (scale, steps * sum(lr for lr in row.lr if math.isfinite(lr)))
        for (scale, steps), row in zip(_weighted_by_steps(rows), rows, strict=True)
        if row.step >= first
    ]


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


def _warnings_without_scale(history: History, skipped: int) -> Iterable[str]:
    if history.status == "refused":
        yield f"not tuned: {history.reason}"
    if history.status in ("tuned", "own") and history.steps:
        if skipped:
            yield _mostly_skipped(history.steps, skipped)
        else:
            yield (
                "the scale stayed at 0: no step had a gradient and an lr above 0. Look at "
                "requires_grad, at loss.backward(), and at the schedule."
            )


def _warnings(history: History, rows: Sequence[HistoryRow], skipped: int) -> Iterable[str]:
    steps = history.steps
    highest = max(row.scale for row in rows)
    if 2 * skipped > steps:
        yield _mostly_skipped(steps, skipped)
    elif skipped:
        yield (
            f"{skipped:,} of {steps:,} steps were skipped for NaN or inf in the gradients. With "
            "fp16 and GradScaler the first few are normal; otherwise look at the loss."
        )
    if steps < _MIN_STEPS:
        yield f"only {steps:,} step{'s' * (steps != 1)}: too few to learn an lr. Train longer."
        return
    if any(row.scale >= _AT_CAP * history.max_scale for row in rows):
        capped = [row.step for row in rows if row.scale >= _AT_CAP * history.max_scale]
        yield (
            f"the scale hit its cap of {history.max_scale:.3g} at step {capped[0]:,}"
            f"{', and ended there' if capped[-1] == rows[-1].step else ''}. The cap held the lr "
            "back: raise --max-scale, or type a larger lr."
        )
    elif highest < _GROWTH * rows[0].scale and not history.resumed:
        yield (
            "the scale never grew: the loss did not fall along the optimizer's updates. Look for "
            "a loss that does not depend on the parameters, labels that do not belong to the "
            "inputs, or gradients that are only noise. If training looks right, try --s-init 1e-3."
        )
    elif _is_growing(rows):
        yield (
            "the lr in force was still growing at the end, so the suggested lr is probably too "
            "small. Train longer."
        )


def _is_growing(rows: Sequence[HistoryRow]) -> bool:
    """Whether the learning rate in force was still growing at the end. The scale alone may grow to
    make up for a schedule that falls."""
    last, highest = max(rows[-1].effective_lr), max(max(row.effective_lr) for row in rows)
    before = next(row for row in rows if row.step >= 0.75 * rows[-1].step)
    return last >= _STILL_GROWING * max(before.effective_lr) and last >= 0.9 * highest


def _mostly_skipped(steps: int, skipped: int) -> str:
    return (
        f"{skipped:,} of {steps:,} steps were skipped for NaN or inf in the gradients. Look for "
        "fp16 without GradScaler, the logarithm of 0 or a division by 0; or cap the lr with "
        "--max-scale."
    )
