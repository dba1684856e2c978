"""The learning rate to type for the plain optimizer, for `suggest_lr` and `mechanic run` alike.

It is the one that would have added up to the same over the run: the mean of the scale, in which
each step counts by its own lr, times the lr that was typed. The last scale would be far too large
after a schedule that falls, since the scale rises towards the end to make up for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RATES = ("lr", "initial_lr", "max_lr")
"""Where a group and its schedulers keep the lr that was typed."""


def suggest(
    mean_scale: float, groups: Iterable[Mapping[str, Any]], seen: Sequence[Any] = ()
) -> tuple[float, ...]:
    """The lr to type, for each group."""
    rates, _ = typed_rates(groups, seen)
    return tuple(mean_scale * rate for rate in rates)


def typed_rates(
    groups: Iterable[Mapping[str, Any]], seen: Sequence[Any] = ()
) -> tuple[tuple[float, ...], str]:
    """The lr that was typed for each group, and its name where it is typed: `lr`, or `max_lr` with
    OneCycleLR. Where a schedule runs, it is the one to start the schedule with. ReduceLROnPlateau,
    and who sets the lr by hand, do not keep it: it is then the larger of the lr and of the one that
    was `seen` in the group before.

    >>> typed_rates([{"lr": 0.5, "initial_lr": 1.0}, {"lr": None}])
    ((1.0, 1.0), 'lr')
    >>> typed_rates([{"lr": 1e-4}, {"lr": 0.2}], seen=[1.0])
    ((1.0, 0.2), 'lr')
    """
    groups = list(groups)
    if groups and all(group.get("max_lr") for group in groups):
        return tuple(float(group["max_lr"]) for group in groups), "max_lr"
    before = (*seen, *(0.0 for _ in groups))
    given = [
        group.get("initial_lr") or _largest(group.get("lr"), had)
        for group, had in zip(groups, before, strict=False)
    ]
    return tuple(map(float, given)), "lr"


def _largest(lr: Any, had: Any) -> float:
    """The larger of two rates, and 1 where a group has none."""
    return 1.0 if lr is None else max(float(lr), float(had or 0.0))
