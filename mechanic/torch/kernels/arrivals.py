"""Gradients that are summed up while backward runs, each as it arrives."""

import operator
from typing import Any

from torch import Tensor

from mechanic.torch.kernels import passes
from mechanic.torch.kernels.plan import EMPTY, Plan, Section


class Arrivals:
    """What has arrived since the last step of a plan.

    A gradient counts as summed up if it is the same tensor at the same place, and of the same
    version: not clipped, or accumulated to, since.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._alone: dict[int, Section] = {}
        self.forget()

    def forget(self) -> None:
        """At a step."""
        size = len(self._plan.entries)
        self._count = 0
        """How many gradients have arrived, those that did again counted again"""
        self._grads: list[Any] = [None] * size
        self._versions = [-1] * size
        self._addresses = [0] * size
        self._signs: list[tuple[bool, float]] = []

    def note(self, param: Tensor) -> tuple[Section, int, Tensor] | None:
        """Note a gradient. Gives its own section, its address and the table of the groups, to sum
        it up; None where that is left to the step."""
        plan, grad = self._plan, param.grad
        place, (rows, groups) = plan.places.get(param), plan.typed
        if place is None or grad is None or groups is None or plan.has_tensor_lr:
            return None
        address = plan.address_of(place, grad)
        if address is None or not plan.has_in_place(place):
            return None
        if self._count == 0:
            self._signs = _signs(rows)
        self._grads[place], self._versions[place] = grad, grad._version
        self._addresses[place] = address
        self._count += 1
        if self._count % len(plan.entries) == 0:  # the last: the step would wait for this
            plan.place_grads(list(self._addresses), None)
        return (
            (self._section(place), address, groups) if plan.entries[place].kind.is_large else None
        )

    def addresses(self, grads: list[Any]) -> list[int] | None:
        """The addresses of these gradients, if they are what has arrived."""
        if self._count < len(grads) or set(map(type, grads)) != {Tensor}:
            return None
        if not all(map(operator.is_, grads, self._grads)):
            return None
        if [grad._version for grad in grads] != self._versions:
            return None
        at = [address or EMPTY for address in map(Tensor.data_ptr, grads)]
        return at if at == self._addresses else None

    def take_unsummed(self, *, has_all: bool) -> list[Section]:
        """The sections that are not summed up yet, where all gradients have arrived or not."""
        plan = self._plan
        arrived = has_all and not plan.has_tensor_lr and _signs(plan.typed[0]) == self._signs
        self.forget()
        return [section for section in plan.sums if not (arrived and section.kind.is_large)]

    def _section(self, place: int) -> Section:
        if place not in self._alone:
            plan = self._plan
            self._alone[place] = plan.section(plan.entries[place].kind, *plan.ranges[place])
        return self._alone[place]


def _signs(rows: list[list[float]]) -> list[tuple[bool, float]]:
    """What of the groups' settings goes into the sums."""
    return [(row[passes.LR.value] != 0, row[passes.SIGN.value]) for row in rows]
