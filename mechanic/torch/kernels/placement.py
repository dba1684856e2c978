"""Whether the tensors are still where they were when the tables were made."""

import operator
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels.layout import Entry
from mechanic.torch.sharding import here, here_like
from mechanic.torch.vectors import DISPLACEMENT


class Placement:
    """What was found where. It is asked at every step, and made to be fast."""

    def __init__(self, optimizer: Optimizer, entries: list[Entry]) -> None:
        self.params = [entry.param for entry in entries]
        self._is_spread = any(entry.part is not entry.param for entry in entries)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        own = set(map(id, self.params))
        self._unseen = [p for params in self._groups for p in params if id(p) not in own]
        """Parameters that have never had a gradient"""
        parts = self.parts()
        self._params_at = list(map(Tensor.data_ptr, parts))
        self._sizes = list(map(Tensor.numel, parts))
        self._strides = list(map(Tensor.stride, parts))
        self._states = [entry.state for entry in entries]
        self._all_states = list(optimizer.state.values())
        self._displacements_at = [entry.addresses[0] for entry in entries]
        self._slots: list[tuple[Any, list[dict[str, Any]], list[int]]] = []
        for base in dict.fromkeys(entry.kind.base for entry in entries):
            states = [entry.state for entry in entries if entry.kind.base == base]
            for name in (*base.slots, *(["step"] if base.has_steps else [])):
                read = operator.itemgetter(name)
                at = [here(read(state)).data_ptr() for state in states]
                self._slots.append((read, states, at))

    def parts(self) -> list[Tensor]:
        """The parts of the parameters that are here: all of each, where none is sharded."""
        return list(map(here, self.params)) if self._is_spread else self.params

    def written(self) -> list[Tensor]:
        """What a step writes to, as autograd knows it."""
        return [*self.params, *self.parts()] if self._is_spread else self.params

    def gradients(self) -> list[Tensor | None] | None:
        """The parts of the gradients that are here; None if one is placed unlike its parameter."""
        grads = [param.grad for param in self.params]
        if not self._is_spread:
            return grads
        parts: list[Tensor | None] = []
        for param, grad in zip(self.params, grads, strict=True):
            part = None if grad is None else here_like(grad, param)
            if part is None and grad is not None:
                return None
            parts.append(part)
        return parts

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
            and list(map(Tensor.numel, self.parts())) == self._sizes
            and self._lie_at(self._displacements_at, _read_displacement, self._states)
        )

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether everything else is where it was, too."""
        parts = self.parts()
        if list(map(Tensor.data_ptr, parts)) != self._params_at:
            return False
        if list(map(Tensor.stride, parts)) != self._strides:
            return False
        own = optimizer.state
        return (
            _are_same(own.values(), self._all_states)
            or all(map(operator.is_, map(own.get, self.params), self._states))
        ) and all(self._lie_at(at, read, states) for read, states, at in self._slots)

    def holds_for(self, place: int) -> bool:
        """Whether one parameter and its displacement are where they were."""
        at, state = [self._displacements_at[place]], [self._states[place]]
        is_there = self.params[place].data_ptr() == self._params_at[place]
        return is_there and self._lie_at(at, _read_displacement, state)

    def _lie_at(self, addresses: list[int], read: Any, states: list[dict[str, Any]]) -> bool:
        tensors = map(read, states)
        try:
            parts = map(here, tensors) if self._is_spread else tensors
            return list(map(Tensor.data_ptr, parts)) == addresses
        except (KeyError, TypeError):  # it is no longer there, or no longer a tensor
            return False


_read_displacement = operator.itemgetter(DISPLACEMENT)


def _are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
