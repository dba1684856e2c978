"""The learning rate to type for the plain optimizer, for `suggest_lr` and `mechanic run` alike.

It is the one that would have added up to the same over the run: the mean of the scale, in which
each step counts by its own lr, times the lr that was typed. The last scale would be far too large
after a schedule that falls, since the scale rises towards the end to make up for it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

RATES = ("lr", "initial_lr", "max_lr")
"""Where a group and its schedulers keep the lr that was typed."""


def suggest(mean_scale: float, groups: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """The lr to type, for each group."""
    rates, _ = typed_rates(groups)
    return tuple(mean_scale * rate for rate in rates)


def typed_rates(groups: Iterable[Mapping[str, Any]]) -> tuple[tuple[float, ...], str]:
    """The lr that was typed for each group, and its name where it is typed: `lr`, or `max_lr` with
    OneCycleLR. Where a schedule runs, it is the one to start the schedule with.

    >>> typed_rates([{"lr": 0.5, "initial_lr": 1.0}, {"lr": None}])
    ((1.0, 1.0), 'lr')
    """
    groups = list(groups)
    if groups and all(group.get("max_lr") for group in groups):
        return tuple(float(group["max_lr"]) for group in groups), "max_lr"
    given = [group.get("initial_lr") or group.get("lr") for group in groups]
    return tuple(1.0 if rate is None else float(rate) for rate in given), "lr"
