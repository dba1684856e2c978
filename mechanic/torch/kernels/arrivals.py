"""Gradients that are summed up while backward runs, each as it arrives."""

import operator
from typing import Any

from torch import Tensor

from mechanic.torch.kernels import columns
from mechanic.torch.kernels.gradients import EMPTY
from mechanic.torch.kernels.layout import Section
from mechanic.torch.kernels.plan import Plan


class Arrivals:
    """What has arrived since the last step of a plan.

    A gradient counts as summed up if it is the same tensor at the same place and of the same
    version: no one has clipped it, or added to it, since.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._places = {param: place for place, param in enumerate(plan.placement.params)}
        self._sections: dict[int, Section] = {}
        self.forget()

    def forget(self) -> None:
        """Begin anew, at a step."""
        size = len(self._places)
        self._count = 0
        """How many gradients have arrived; one that arrives twice counts twice"""
        self._grads: list[Any] = [None] * size
        self._versions = [-1] * size
        self._addresses = [0] * size
        self._signs: list[tuple[bool, float]] = []

    def note(self, param: Tensor) -> tuple[Section, int, Tensor] | None:
        """Note a gradient. Gives its own section, its address and the table of the groups, to sum
        it up; None where that is left to the step."""
        plan, grad = self._plan, param.grad
        place, (rows, groups) = self._places.get(param), plan.groups.settings
        if place is None or grad is None or groups is None or plan.groups.has_tensor_lr:
            return None
        address = plan.gradients.address_of(place, grad)
        if address is None or not plan.placement.holds_for(place):
            return None
        if self._count == 0:
            self._signs = _signs(rows)
        self._grads[place], self._versions[place] = grad, grad._version
        self._addresses[place] = address
        self._count += 1
        if self._count % len(self._places) == 0:  # the last one: the step would wait for this
            plan.gradients.place(list(self._addresses), None)
        is_large = plan.layout.entries[place].kind.is_large
        return (self._section(place), address, groups) if is_large else None

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
        groups, sections = self._plan.groups, self._plan.layout.sum_sections
        is_same = not groups.has_tensor_lr and _signs(groups.settings[0]) == self._signs
        self.forget()
        if not has_all or not is_same:
            return sections
        return [section for section in sections if not section.kind.is_large]

    def _section(self, place: int) -> Section:
        if place not in self._sections:
            layout = self._plan.layout
            kind, (begin, end) = layout.entries[place].kind, layout.ranges[place]
            self._sections[place] = layout.section(kind, begin, end)
        return self._sections[place]


def _signs(rows: list[list[float]]) -> list[tuple[bool, float]]:
    """What of the groups' settings goes into the sums."""
    return [(row[columns.LR.value] != 0, row[columns.SIGN.value]) for row in rows]
