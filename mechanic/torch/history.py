"""The learning rates of earlier steps, and what they say about the size of the next update."""

import math
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from mechanic.advance import FIRST_STEPS, RISE
from mechanic.torch.capture import is_traced
from mechanic.torch.flag import NO, YES, Flag
from mechanic.torch.rates import Rate, rate_of, typed_lr


class StepRates(NamedTuple):
    """The learning rates of one step."""

    rates: list[Rate]
    """How each group takes part"""
    typed: list[Any]
    """The learning rate of each group, and the one before where it is 0 or the group is idle, so
    that there is no update to measure"""
    has_risen: Flag
    """Whether a rate has risen so much that the update before says little about this one"""
    measures_update: bool
    """Whether the norm of the update itself is measured, or may be"""


class RateHistory:
    """What the host remembers of earlier steps."""

    def __init__(self) -> None:
        self.lrs: list[Any] = []
        """The learning rate of each group when its update was last measured"""
        self._learned = self._maybe_learned = 0
        self.has_met_extremes = False
        """Whether there were gradients that the base may not be able to square, so that its state
        may hold huge and infinite numbers"""

    @property
    def is_starting(self) -> bool:
        """Whether this may be one of the first steps, as far as the host knows."""
        if is_traced():
            return True  # a count on the host would have every step compiled anew
        return self._learned < FIRST_STEPS and self._maybe_learned < 2 * FIRST_STEPS

    def learn(self, takes_part: Flag) -> None:
        """Count a step that the tuner learns from, or may have learned from."""
        if is_traced() or not self.is_starting:
            return
        self._learned += takes_part.is_yes
        self._maybe_learned += not takes_part.is_known

    def resume_at(self, updates: int, lrs: list[Any]) -> None:
        """Go on after so many updates."""
        self._learned, self._maybe_learned = min(updates, FIRST_STEPS), 0
        self.lrs = list(lrs)

    def look(
        self,
        optimizer: Optimizer,
        *,
        proportional: bool,
        is_relative: bool,
        half: Container[int] | None = None,
    ) -> StepRates:
        """How the groups take part in the next step. `half` names the groups that hold float16,
        where that is known; `is_relative` tells whether the start depends on the update's norm."""
        groups = optimizer.param_groups
        _refuse_nonfinite(groups)
        rates = [
            rate_of(group, proportional=proportional, half=None if half is None else i in half)
            for i, group in enumerate(groups)
        ]
        typed = self._typed(groups)
        # One update of LBFGS says nothing about its next.
        has_risen = YES if isinstance(optimizer, LBFGS) else self._has_risen(typed)
        measures = is_relative and (self.is_starting or not has_risen.is_no)
        return StepRates(rates, typed, has_risen, measures)

    def note(self, step: StepRates) -> None:
        """Remember the learning rates of a step whose update was measured."""
        has_risen = step.has_risen
        if has_risen.is_no and not self.is_starting:
            return
        kept = (self.lrs + [None] * len(step.typed))[: len(step.typed)]
        for i, lr in enumerate(step.typed):
            had = kept[i]
            if not isinstance(lr, Tensor):
                kept[i] = lr
                continue
            if not has_risen.is_known and had is not None and not self.is_starting:
                lr = has_risen.choose(lr, had)
            if isinstance(had, Tensor) and had.device == lr.device and had.dtype == lr.dtype:
                had.copy_(lr)
            else:
                kept[i] = lr.clone()
        self.lrs = kept

    def _typed(self, groups: list[dict[str, Any]]) -> list[Any]:
        before = (self.lrs + [0.0] * len(groups))[: len(groups)]
        lrs = [typed_lr(group) for group in groups]
        return [
            torch.where(lr == 0, last, lr).reshape(())
            if isinstance(lr, Tensor)
            else (lr or last if lr == last or _has_gradients(group) else last)
            for group, lr, last in zip(groups, lrs, before, strict=True)
        ]

    def _has_risen(self, typed: list[Any]) -> Flag:
        risen = YES if len(typed) > len(self.lrs) else NO  # groups were added
        for lr, last in zip(typed, self.lrs, strict=False):
            risen = risen | Flag.of(lr > RISE * last)
        return risen


def _refuse_nonfinite(groups: list[dict[str, Any]]) -> None:
    """Refuse a learning rate that would turn the parameters into NaN. Nothing has been done yet."""
    for i, group in enumerate(groups):
        lr = group.get("lr")
        if isinstance(lr, float) and not math.isfinite(lr):
            raise ValueError(
                f"the lr of group {i} is {lr}. No step was made. Look at the scheduler, or at what "
                "else has set it; any finite lr will do."
            )


def _has_gradients(group: dict[str, Any]) -> bool:
    return any(param.grad is not None for param in group["params"])
