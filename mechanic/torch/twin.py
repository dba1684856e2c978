"""A twin of the optimizer for the base to step: the optimizer itself is not touched by it, but for
the tensors of the base's own state, which the two share.

The twin is of the base's own class. It has the optimizer's attributes and state, groups of its own
at the learning rates that the base is run at, and in them copies of the parameters. So whoever
looks at the parameters or at the optimizer while the base runs (a signal handler that saves, or
another thread) sees what was there before the step, and an exception leaves the parameters alone.
"""

import copy
import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from mechanic.torch.rates import Rate
from mechanic.torch.vectors import DISPLACEMENT

StandIns = dict[Tensor, Tensor]
"""Parameters, and the copies of them that the base steps."""

OWN = ("param_groups", "state", "step")
"""The attributes that a twin does not share; `step` is a scheduler's patch."""


class Twin:
    """The twin of a mechanized optimizer. It may be used for several steps."""

    def __init__(self, optimizer: Any, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins
        made = type(optimizer)
        base: type[Optimizer] = made._base if "_base" in vars(made) else made  # or a subclass of it
        self.optimizer: Any = object.__new__(base)
        """What the base steps"""
        self._states: list[Any] = []
        self._shown: list[Any] = []  # those of `_states` that the base finds
        self._state: Any = None
        self._given: list[dict[str, Any]] = []

    def prepare(self, optimizer: Any, rates: list[Rate]) -> None:
        """Bring the twin to where the optimizer is, but for the parameters."""
        twin, stand_ins = self.optimizer, self.stand_ins
        vars(twin).clear()
        vars(twin).update((name, v) for name, v in vars(optimizer).items() if name not in OWN)
        twin.param_groups = [
            {**group, "params": [stand_ins.get(param, param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        for group, rate in zip(twin.param_groups, rates, strict=True):
            if rate.base_lr is not None:
                group["lr"] = rate.base_lr
        if self._state is None or not _are_same(optimizer.state, self._states):
            self._state = copy.copy(optimizer.state)
            for param, own in stand_ins.items():
                state = self._state.pop(param, None)
                if state is not None and not has_none(state):
                    self._state[own] = state
            self._states = list(optimizer.state.values())
            self._shown = list(self._state.values())
        twin.state = self._state
        self._given = [dict(vars(twin)), *map(dict, twin.param_groups)]
        for param, own in stand_ins.items():
            _share(param, own)

    def take_over(self, optimizer: Any) -> None:
        """Give the optimizer what the base has changed in the twin, all but the parameters and the
        learning rates. To do so twice does no harm."""
        twin = self.optimizer
        kept = self._kept_stand_ins()
        apply_changes(vars(optimizer), vars(twin), self._given[0], {*OWN, *kept})
        groups = zip(optimizer.param_groups, twin.param_groups, self._given[1:], strict=True)
        for group, own, given in groups:
            apply_changes(group, own, given, {"params", "lr"})
        if twin.state is not self._state or not _are_same(twin.state, self._shown):
            params = {own: param for param, own in self.stand_ins.items()}
            state = {params.get(key, key): value for key, value in twin.state.items()}
            for param in self.stand_ins:
                if has_none(had := optimizer.state.get(param)):
                    show_again(state, param, had)
            optimizer.state.update(state)
            for key in optimizer.state.keys() - state.keys():
                del optimizer.state[key]
            self._state = None
        for param, own in self.stand_ins.items():
            if own.grad is not param.grad:
                param.grad = own.grad
            if vars(own) and type(param) is Parameter:
                vars(param).update(vars(own))

    def _kept_stand_ins(self) -> set[str]:
        """The new attributes in which the base keeps stand-ins, which are of no use later."""
        new = vars(self.optimizer).keys() - self._given[0].keys()
        return {name for name in new if holds(vars(self.optimizer)[name], self.stand_ins.values())}

    def keeps_stand_ins(self) -> bool:
        """Whether the base has kept stand-ins for later."""
        return bool(self._kept_stand_ins())

    def let_go(self) -> None:
        """Keep nothing alive that belongs to one step alone."""
        for own in self.stand_ins.values():
            own.grad = None


def has_none(state: Any) -> bool:
    """Whether a base has made no state for a parameter yet, since it has skipped its first steps.
    It must not find the displacement there then: many ask whether they find anything."""
    return isinstance(state, dict) and state.keys() == {DISPLACEMENT}


def show_again(state: Any, param: Tensor, had: dict[str, Any]) -> None:
    """Put a displacement that was hidden beside what the base has made, if it has made anything."""
    state.setdefault(param, had).setdefault(DISPLACEMENT, had[DISPLACEMENT])


def apply_changes(
    to: dict[str, Any], now: dict[str, Any], given: dict[str, Any], ignored: set[str]
) -> None:
    """What was added to, exchanged in or removed from what was given."""
    for name, value in now.items():
        if name not in ignored and (name not in given or given[name] is not value):
            to[name] = value
    for name in given.keys() - now.keys() - ignored:
        to.pop(name, None)


def _share(param: Tensor, own: Tensor) -> None:
    """Give a stand-in the gradient and the attributes of its parameter."""
    grad = param.grad
    if grad is not None and grad.dtype != own.dtype:
        own.grad_dtype = grad.dtype
    own.grad = grad
    if type(param) is Parameter and vars(param) is not vars(own) and (vars(param) or vars(own)):
        vars(own).clear()
        vars(own).update(vars(param))


def holds(value: Any, tensors: Iterable[Tensor], depth: int = 3) -> bool:
    """Whether a value is one of some tensors or its id, or holds one, lists and dicts deep."""
    return _holds(value, {id(tensor) for tensor in tensors}, depth)


def _holds(value: Any, ids: set[int], depth: int) -> bool:
    if id(value) in ids or (type(value) is int and value in ids):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds(item, ids, depth - 1) for item in value)
    return False


def stand_in(param: Tensor, data: Tensor) -> Tensor:
    """A parameter with the data of a copy."""
    is_recorded = data.grad_fn is not None
    return data if is_recorded else Parameter(data, requires_grad=param.requires_grad)


def _are_same(state: Any, states: list[Any]) -> bool:
    return len(state) == len(states) and all(map(operator.is_, state.values(), states))
