"""What the handle's `diagnose` says of a tuner, which knows its present numbers and little of the
past. `mechanic.run.advice` says it of a whole history, in the same words."""

from collections.abc import Iterator
from typing import Any

import torch

from mechanic import causes
from mechanic.options import Options
from mechanic.suggestion import typed_rates
from mechanic.torch import edits
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.rates import typed_lr
from mechanic.torch.scalars import Numbers
from mechanic.tuner import DefaultState, State, Sums, had_signal, start


def wrong(optimizer: Any, mechanism: Mechanism) -> Iterator[str]:
    """What looks wrong, from what a tuner knows."""
    steps, updates, skipped, in_a_row = mechanism.counts.packed.tolist()
    skips = causes.Skips(steps + skipped, skipped, in_a_row)
    is_skipped = skipped and not skips.are_rare
    numbers, options = mechanism.scalars.read(), mechanism.options
    state, scale = numbers.state, float(numbers.scale)
    growth = _growth(options, numbers)
    if options.s_init == "relative" and (said := causes.of_explosion(growth)):
        yield said  # skipped steps, if any, follow from it
        return
    if is_skipped:
        yield causes.of_skips(skips)
    if not updates:
        if not skips.steps:
            yield causes.NO_STEP
        elif steps:
            yield causes.ZERO_LR
    elif updates > 1 and not (had_signal(state) or numbers.signal):
        yield causes.ZERO_GRADIENT
    elif skips.are_few_left and not is_skipped:
        yield causes.too_few(steps)
    elif skips.are_few_left or mechanism.frozen:
        return  # there is nothing to say about the scale
    elif causes.is_at_cap(scale, options.max_scale):
        yield causes.of_cap(options.max_scale, ", and is there now")
    elif _is_ramp(state) and (numbers.signal or not causes.of_standstill(growth)):
        # A ramp that has just begun anew has not grown yet, unless there is no signal any more.
        if not _is_falling(optimizer, mechanism):
            yield causes.STILL_GROWING
    elif said := causes.of_standstill(growth):
        yield said


def hints(mechanism: Mechanism) -> list[str]:
    """What is worth knowing, and need not be wrong."""
    if edits.are_followed(mechanism):
        return [causes.EDITED]
    return [causes.EDITED_ONCE] if edits.were_found(mechanism) else []


def _is_ramp(state: State) -> bool:
    return isinstance(state, DefaultState) and not state.hesitation


def _is_falling(optimizer: Any, mechanism: Mechanism) -> bool:
    """Whether a schedule has the lr below the one that it began with: the scale may grow to make up
    for it."""
    groups = optimizer.param_groups
    typed, _ = typed_rates(groups, seen=mechanism.history.lrs)
    return any(typed_lr(group) < rate for group, rate in zip(groups, typed, strict=True))


def _growth(options: Options, numbers: Numbers) -> float:
    """The scale as a multiple of its start."""
    zero = torch.zeros_like(numbers.scale)
    sums = Sums(*(zero,) * len(Sums._fields))
    sums = sums._replace(x1=numbers.reference_square, d=numbers.size)
    first, _ = start(options, numbers.state, sums)
    return float(numbers.scale) / (float(first) or 1.0)
