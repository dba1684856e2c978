"""What can go wrong in a run: how each cause shows, and the sentence that names it with its fix.

The summary of `mechanic run`, `mechanic doctor` and the handle's `diagnose` all say what is written
here. They differ in what they know of the past. No framework is imported.
"""

import math
from typing import NamedTuple

_MIN_STEPS = 30  # fewer say nothing yet

# Healthy small runs (AdamW with four schedules, SGD with some; 40 to 3,000 steps) grew 4.5 to 4e5
# times. Losses without a lower bound grew 2e7 times and more with AdamW, 9e3 times with SGD.
_GROWN = 3.0
_EXPLODED = 1e7  # from `tuner.START` on: a step moves the weights by 1,000 times their size
_AT_CAP = 0.9  # of the cap: there, the scale goes up and down a little
_RARE = 0.02  # of the steps: so many may be skipped

_WITHOUT_GRADIENT = (
    "Either the optimizer does not hold the model's parameters (make it after the model is built, "
    "copied or moved, from model.parameters()), or nothing fills their gradients before step(): "
    "look at loss.backward(), requires_grad and zero_grad()."
)
NO_GRADIENT = f"the scale stayed at 0: no step had a gradient. {_WITHOUT_GRADIENT}"
NO_STEP = (
    "nothing to say yet: no step was taken, or none that had a gradient. If step() was called, "
    f"gradients are missing. {_WITHOUT_GRADIENT}"
)
"""Of a tuner, which does not know whether `step()` was called without gradients."""
ZERO_GRADIENT = (
    "nothing was learned: every gradient was exactly 0, or too small or large for an update. If "
    "they are 0, the loss does not depend on the parameters: look for detach() or no_grad() in the "
    "model, a loss that is multiplied by 0, or activations that are all dead. Otherwise scale the "
    "loss."
)
ZERO_LR = (
    "the weights did not move: the lr was 0 in every step. Type any lr above 0; if a schedule sets "
    "it, look at its warm-up and at its number of steps."
)
_NEVER_GREW = (
    "the scale never grew: the loss did not fall along the optimizer's updates. Look for a loss "
    "that does not depend on the parameters, labels that do not belong to the inputs, or gradients "
    "that are only noise. If training looks right, try s_init=1e-3."
)
STILL_GROWING = (
    "the lr in force was still growing at the end, so the suggested lr is probably too small. "
    "Train longer."
)
EDITED = (
    "something else changes the weights between steps: a mask, a clamp, an average. The "
    "displacement follows it, and a copy of the weights is kept for that. If it is not meant, look "
    "for what writes to them; in the step() of the optimizer that is tuned it needs no copy."
)
EDITED_ONCE = (
    "something else than this optimizer has changed the weights between two steps. Training went "
    "on from where they were put."
)
CONSTANT_LR = (
    "the lr was constant. A schedule that falls to 0, such as CosineAnnealingLR, usually ends at a "
    "lower loss."
)


class Skips(NamedTuple):
    """The steps that were skipped for NaN or inf."""

    steps: int
    """All steps, skipped or not"""
    skipped: int
    in_a_row: int
    """How many of them were the last steps of all"""
    first: int | None = None
    """The number of the first, where it is known"""
    last: int | None = None
    is_exact: bool = True
    """Whether they are these two; in a thinned history they may be a few steps before"""

    @property
    def are_rare(self) -> bool:
        """Whether they are so few, with none at the end, that training does not suffer."""
        return not self.in_a_row and self.skipped <= _RARE * self.steps

    @property
    def are_few_left(self) -> bool:
        """Whether those that were not skipped are too few to say anything about."""
        return self.steps - self.skipped < _MIN_STEPS


def too_few(steps: int) -> str:
    """A run that is too short to say anything about."""
    return f"only {steps:,} step{'s' * (steps != 1)}: too few to learn an lr. Train longer."


def of_skips(skips: Skips) -> str:
    """How many steps were skipped, when, and why."""
    text = (
        f"{skips.skipped:,} of {skips.steps:,} steps were skipped for NaN or inf in the gradients "
        "or in the update"
    )
    if skips.first is not None and skips.last is not None:
        at = "at" if skips.is_exact else "by"
        text += f", the first {at} step {skips.first:,} and the last {at} step {skips.last:,}"
    if skips.in_a_row:
        text += f"; the weights have not moved in the last {skips.in_a_row:,} steps"
    if skips.are_rare:
        return f"{text}. With fp16 and GradScaler some are normal; otherwise look at the loss."
    return (
        f"{text}. Look for fp16 without GradScaler, the logarithm of 0 or a division by 0; or cap "
        "the lr with max_scale."
    )


def is_at_cap(scale: float, cap: float) -> bool:
    """Whether a scale is as large as `max_scale` lets it be."""
    return cap < math.inf and scale >= _AT_CAP * cap


def of_cap(cap: float, when: str) -> str:
    """A scale that was held back."""
    return (
        f"the scale hit its cap of {cap:.3g}{when}. The cap held the lr back: raise max_scale, or "
        "type a larger lr. If the loss rises there, lower max_scale instead."
    )


def of_explosion(growth: float) -> str:
    """An lr in force that has grown so many times from a start that is relative to the weights;
    empty if that is no reason for a warning.

    >>> of_explosion(1000.0)
    ''
    >>> of_explosion(1e9)
    'the lr in force exploded: it grew to 1e+09 times its start, ...'
    """
    if growth < _EXPLODED:
        return ""
    return (
        f"the lr in force exploded: it grew to {growth:.0e} times its start, where a step "
        "moves the weights by thousands of times their first size. Look for a loss without a "
        "lower bound (a wrong sign, maximize=True) and for inputs or targets that are not "
        "standardized; or cap the lr with max_scale."
    )


def of_standstill(growth: float) -> str:
    """An lr in force that is so many times its start; empty if it has grown.

    >>> of_standstill(1000.0)
    ''
    """
    return _NEVER_GREW if growth < _GROWN else ""


def of_fall(times: float, step: int) -> str:
    """A scale that fell so many times below what it had been, last at a step, and stayed there."""
    return (
        f"the scale stalled: around step {step:,} it fell {times:,.3g}-fold, and it stayed there. "
        "Some gradients were far larger than all before: a spike of the loss, a bad batch, or a "
        "loss that diverges. Look at the loss around that step, and clip the gradients with "
        "clip_grad_norm_ before step(), or with max_grad_norm=."
    )
