"""Parameters that are seen for the first time: the kernels make their first step, too.

A base makes the state of a parameter in its own step. Where the kernels compute that step, the
state has to be there before: as the base would make it, of zeros. It is taken back if the step is
not made after all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mechanic.options import Options
from mechanic.torch import vectors
from mechanic.torch.kernels.known import KnownBase
from mechanic.torch.measure import robust_square
from mechanic.torch.sharding import PLAIN, Ranks, here, is_spread
from mechanic.torch.vectors import DISPLACEMENT

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Newcomers:
    """The new parameters of a step, and what their state was before."""

    def __init__(self, optimizer: Any, params: list[Tensor]) -> None:
        self.params = params
        self._state = optimizer.state
        self._had = [dict(self._state[p]) if p in self._state else None for p in params]

    @property
    def size(self) -> int:
        """The number of their elements, on all processes."""
        return sum(param.numel() for param in self.params)

    def measure(self, ranks: Ranks | None, home: torch.device) -> Tensor:
        """‖x‖² of the parts of them that count here, and the number of their elements."""
        parts = [here(param) for param in self.params if ranks is None or param in ranks.counted]
        square = robust_square(parts, home)
        return torch.stack([square, square.new_full((), sum(part.numel() for part in parts))])

    def take_back(self) -> None:
        """Leave their state as it was."""
        for param, had in zip(self.params, self._had, strict=True):
            if had is None:
                self._state.pop(param, None)
            else:
                self._state[param].clear()
                self._state[param].update(had)


def meet(optimizer: Any, bases: list[KnownBase], options: Options) -> Newcomers | None:
    """Make the state of the parameters that are seen for the first time; None if there are none, or
    if only their base can make it."""
    rows = [
        (param, group, base)
        for group, base in zip(optimizer.param_groups, bases, strict=True)
        for param in group["params"]
        if param.grad is not None and DISPLACEMENT not in optimizer.state.get(param, {})
    ]
    if not rows or not all(_can_make(*row) for row in rows):
        return None
    newcomers = Newcomers(optimizer, [param for param, _, _ in rows])
    try:
        with torch.no_grad():
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                _MAKERS[base.formula](optimizer, group)
            for param in newcomers.params:
                own = optimizer.state[param]
                own[DISPLACEMENT] = vectors.new_displacement(param, options)
    except BaseException:
        newcomers.take_back()
        raise
    return newcomers


def _can_make(param: Tensor, group: dict[str, Any], base: KnownBase) -> bool:
    """Whether zeros are the state that a base begins with: SGD's buffer begins with a gradient that
    is not damped."""
    is_damped = base.formula == "momentum" and group["dampening"] != 0
    tensors = param, param.grad
    return not is_damped and all(
        tensor is not None
        and (type(tensor) in PLAIN or is_spread(tensor))
        and tensor.layout == torch.strided
        and tensor.dtype in _TYPES
        for tensor in tensors
    )


def _make_adam(optimizer: Any, group: dict[str, Any]) -> None:
    # It refuses a tensor as lr for some options, and is never run at the lr that was typed.
    optimizer._init_group({**group, "lr": 1.0}, [], [], [], [], [], [])


def _make_buffer(optimizer: Any, group: dict[str, Any]) -> None:
    for param in _stateless(optimizer, group):
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)


def _make_lion(optimizer: Any, group: dict[str, Any]) -> None:
    for param in _stateless(optimizer, group):
        optimizer.state[param]["exp_avg"] = torch.zeros_like(param.detach())


def _stateless(optimizer: Any, group: dict[str, Any]) -> list[Any]:
    return [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]


def _make_nothing(optimizer: Any, group: dict[str, Any]) -> None:
    """The base has no state."""


_MAKERS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "adam": _make_adam,
    "adamw": _make_adam,
    "sgd": _make_nothing,
    "momentum": _make_buffer,
    "nesterov": _make_buffer,
    "lion": _make_lion,
}
"""What makes the state of a group's parameters that have a gradient and no state, by the formula
of its base"""
