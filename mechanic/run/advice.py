"""What a history says: the lr to type, how long the ramp took, and what looks wrong."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mechanic.run.rows import Row
from mechanic.run.spool import Rates, Track

_FEW = 30  # steps; fewer say nothing yet
_GREW = 3.0  # times its first value: a scale that stayed below has not grown
_STILL_GROWING = 1.5  # times what it was at three quarters of the run
_AT_CAP = 0.99  # of the cap


@dataclass(frozen=True)
class Spread:
    """How a number ran."""

    final: float
    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Spread":
        """The spread of the number times a factor."""
        return Spread(*(factor * n for n in (self.final, self.median, self.low, self.high)))


@dataclass(frozen=True)
class Findings:
    """What is told of one optimizer."""

    typed: tuple[float, ...]
    """The lr to start from, one a group"""
    typed_name: str
    """What it is called where it is typed: lr, or OneCycleLR's max_lr"""
    scale: Spread | None
    """None where no scale was learned"""
    ramp: int | None
    """Steps until the scale first reached half of what it came to; None for one that was loaded"""
    suggested: tuple[float, ...]
    """The lr to type, one a group; empty where nothing was learned"""
    skipped: int
    warnings: tuple[str, ...]


def find(track: Track) -> Findings:
    """Look at the history of one optimizer."""
    typed, name = _typed(track.groups)
    rows = [row for row in track.rows if row.scale > 0]
    skipped = track.latest.skipped if track.latest else 0
    if not rows:
        return Findings(typed, name, None, None, (), skipped, tuple(_warn_idle(track, skipped)))
    scales = [row.scale for row in rows]
    level = weighted_median(_since(rows, rows[-1].step / 2))
    ramp = next(row.step for row in rows if row.scale >= level / 2)
    settled = weighted_median(_since(rows, ramp))
    spread = Spread(scales[-1], weighted_median(_weighted(rows)), min(scales), max(scales))
    warnings = tuple(_warn(track, rows, skipped))
    suggested = tuple(settled * lr for lr in typed) if track.steps >= _FEW else ()
    shown = None if track.resumed else ramp
    return Findings(typed, name, spread, shown, suggested, skipped, warnings)


def _typed(groups: Sequence[Rates]) -> tuple[tuple[float, ...], str]:
    if groups and all(rates.get("max_lr") for rates in groups):
        return tuple(float(rates["max_lr"] or 0) for rates in groups), "max_lr"
    initial = (rates["initial_lr"] if rates["initial_lr"] else rates["lr"] for rates in groups)
    return tuple(1.0 if lr is None else lr for lr in initial), "lr"


def _weighted(rows: Sequence[Row]) -> list[tuple[float, int]]:
    """Each scale with the steps that it stands for in a thinned history."""
    before = [0, *(row.step for row in rows[:-1])]
    return [(row.scale, row.step - step) for row, step in zip(rows, before, strict=True)]


def _since(rows: Sequence[Row], step: float) -> list[tuple[float, float]]:
    """The scales from a step on. Each counts by the lr that it was found at: as a schedule falls,
    the scale rises to make up for it, and that says nothing of the lr to begin with."""
    return [
        (scale, steps * sum(row.lr))
        for (scale, steps), row in zip(_weighted(rows), rows, strict=True)
        if row.step >= step
    ]


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The median of numbers, each of which counts so many times.

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


def _warn_idle(track: Track, skipped: int) -> Iterable[str]:
    if track.status == "refused":
        yield f"not tuned: {track.reason}"
    if track.status in ("tuned", "own") and track.steps:
        if skipped:
            yield _skipping(track.steps, skipped)
        else:
            yield (
                "the scale stayed at 0: no step had a gradient and an lr above 0. Look at "
                "requires_grad, at loss.backward(), and at the schedule."
            )


def _warn(track: Track, rows: Sequence[Row], skipped: int) -> Iterable[str]:
    steps, final = track.steps, rows[-1].scale
    highest = max(row.scale for row in rows)
    if 2 * skipped > steps:
        yield _skipping(steps, skipped)
    elif skipped:
        yield (
            f"{skipped:,} of {steps:,} steps were skipped for NaN or inf in the gradients. With "
            "fp16 and GradScaler the first few are normal; otherwise look at the loss."
        )
    if steps < _FEW:
        yield f"only {steps:,} steps: too few to have learned an lr. Train longer."
        return
    if any(row.scale >= _AT_CAP * track.max_scale for row in rows):
        at = [row.step for row in rows if row.scale >= _AT_CAP * track.max_scale]
        yield (
            f"the scale hit its cap of {track.max_scale:.3g} at step {at[0]:,}"
            f"{', and ended there' if at[-1] == rows[-1].step else ''}. The lr was held back: "
            "raise --max-scale, or type a larger lr."
        )
    elif highest < _GREW * rows[0].scale and not track.resumed:
        yield (
            "the scale never grew: along its own updates the loss did not fall. Look for a loss "
            "that does not depend on the parameters, labels that do not belong to the inputs, or "
            "gradients that are noise; if training looks right, try --s-init 1e-3."
        )
    elif final >= _STILL_GROWING * _scale_at(rows, 0.75 * steps) and final >= 0.9 * highest:
        yield (
            "the scale was still growing at the end, so the lr below is rather too small. "
            "Train longer."
        )


def _scale_at(rows: Sequence[Row], step: float) -> float:
    return next(row.scale for row in rows if row.step >= step)


def _skipping(steps: int, skipped: int) -> str:
    return (
        f"{skipped:,} of {steps:,} steps were skipped for NaN or inf in the gradients. Look for "
        "fp16 without GradScaler, a logarithm of 0 or a division by 0; or cap the lr with "
        "--max-scale."
    )
