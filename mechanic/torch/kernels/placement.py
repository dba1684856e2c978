"""Whether the tensors are still where they were when the tables were made."""

import operator
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels.layout import Entry
from mechanic.torch.mechanism import DISPLACEMENT


class Placement:
    """What was found where. It is asked at every step, and made to be fast."""

    def __init__(self, optimizer: Optimizer, entries: list[Entry]) -> None:
        self.params = [entry.param for entry in entries]
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        own = set(map(id, self.params))
        self._unseen = [p for params in self._groups for p in params if id(p) not in own]
        """Parameters that have never had a gradient"""
        self._params_at = list(map(Tensor.data_ptr, self.params))
        self._sizes = list(map(Tensor.numel, self.params))
        self._strides = list(map(Tensor.stride, self.params))
        self._states = [entry.state for entry in entries]
        self._all_states = list(optimizer.state.values())
        self._displacements_at = [entry.addresses[0] for entry in entries]
        self._slots: list[tuple[Any, list[dict[str, Any]], list[int]]] = []
        for base in dict.fromkeys(entry.kind.base for entry in entries):
            states = [entry.state for entry in entries if entry.kind.base == base]
            for name in (*base.slots, *(["step"] if base.has_steps else [])):
                read = operator.itemgetter(name)
                self._slots.append((read, states, [read(state).data_ptr() for state in states]))

    def holds_for_sums(self, optimizer: Optimizer) -> bool:
        """Whether the sums may be taken: the parameters are the same, and their displacements are
        where they were."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self._groups)
            and all(
                _are_same(g["params"], had) for g, had in zip(groups, self._groups, strict=True)
            )
            and not any(param.grad is not None for param in self._unseen)
            and list(map(Tensor.numel, self.params)) == self._sizes
            and _lie_at(self._displacements_at, _read_displacement, self._states)
        )

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether everything else is where it was, too."""
        if list(map(Tensor.data_ptr, self.params)) != self._params_at:
            return False
        if list(map(Tensor.stride, self.params)) != self._strides:
            return False
        own = optimizer.state
        return (
            _are_same(own.values(), self._all_states)
            or all(map(operator.is_, map(own.get, self.params), self._states))
        ) and all(_lie_at(at, read, states) for read, states, at in self._slots)

    def holds_for(self, place: int) -> bool:
        """Whether one parameter and its displacement are where they were."""
        at, state = [self._displacements_at[place]], [self._states[place]]
        is_there = self.params[place].data_ptr() == self._params_at[place]
        return is_there and _lie_at(at, _read_displacement, state)


_read_displacement = operator.itemgetter(DISPLACEMENT)


def _lie_at(addresses: list[int], read: Any, states: list[dict[str, Any]]) -> bool:
    try:
        return list(map(Tensor.data_ptr, map(read, states))) == addresses
    except (KeyError, TypeError):  # it is no longer there, or no longer a tensor
        return False


def _are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
