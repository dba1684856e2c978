"""The learning rates that a base is run at, and those that are in force.

A base whose update is proportional to its learning rate need not be run at the one that is typed.
At 1e-6 the update would be rounding noise beside the parameter that it is added to (in bfloat16
already at 1e-3), and the result would depend on the lr. So such a base is run at one and the same
lr, large enough for its update to outweigh the parameter, and its proposal is scaled to the typed
lr afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.flag import YES, Flag

EFFECTIVE_LR = "effective_lr"
"""The key in `param_groups` under which loggers find the learning rate that is in force."""

_BASE_LR = 65536.0  # a power of two: dividing by it is exact
_BASE_LR_HALF = 16.0  # for float16, whose largest number is 65,504

# Steps whose update is proportional to lr, with no lr in their state; tests/test_bases.py checks
# each of them. Others, such as Adafactor's with its min(lr, 1/√t), are run at the lr that is typed.
_PROPORTIONAL = {
    "torch.optim.adadelta.Adadelta.step",
    "torch.optim.adagrad.Adagrad.step",
    "torch.optim.adam.Adam.step",
    "torch.optim.adamax.Adamax.step",
    "torch.optim.adamw.AdamW.step",  # in torch 2.6; later it is Adam's
    "torch.optim.nadam.NAdam.step",
    "torch.optim.radam.RAdam.step",
    "torch.optim.rmsprop.RMSprop.step",
    "torch.optim.sgd.SGD.step",
    "torch.optim.sparse_adam.SparseAdam.step",
    "torch.optim._muon.Muon.step",
    "lion_pytorch.lion_pytorch.Lion.step",
    "torchao.optim.adam._AdamBase.step",
}


class Rate(NamedTuple):
    """How one group takes part in a step."""

    live: Flag
    """Whether the group's lr is not 0: at 0 its parameters stay where they are"""
    base_lr: float | Tensor | None
    """The lr that the base is run at; None where the group has no lr"""
    unit: float | Tensor
    """The base's proposal times this is its update at the lr that is typed"""


def is_proportional(step: Callable[..., Any]) -> bool:
    """Whether the update of a base with this step is known to be proportional to its lr."""
    return step_name(step) in _PROPORTIONAL


def step_name(step: Callable[..., Any]) -> str:
    """The full name of a base's step. A subclass with a step of its own has another one, and so has
    someone's patch that `functools.wraps` gave the name of what it wraps."""
    module, name = (str(getattr(step, key, "")) for key in ("__module__", "__qualname__"))
    home = str(getattr(step, "__globals__", {}).get("__name__", module))
    package = home.partition(".")[0]
    is_its_own = package in ("torch", module.partition(".")[0])  # or one of torch's decorators
    return f"{module if is_its_own else home}.{name}"


def rate_of(group: dict[str, Any], *, proportional: bool, half: bool | None = None) -> Rate:
    """The rate of a group, whose lr may be a number or a tensor. `half` tells whether the group
    holds float16, where that is known."""
    lr = group.get("lr")
    if lr is None:
        return Rate(live=YES, base_lr=None, unit=1.0)
    live = Flag.of((lr != 0).reshape(()) if isinstance(lr, Tensor) else lr != 0)
    if not proportional:
        return Rate(live, base_lr=lr, unit=1.0)
    if half is None:
        half = any(param.dtype == torch.float16 for param in group["params"])
    base_lr = proportional_lr(half=half)
    if isinstance(lr, Tensor):
        return Rate(live, torch.full_like(lr, base_lr), lr.reshape(()) / base_lr)
    return Rate(live, lr if live.is_no else base_lr, float(lr) / base_lr)


def proportional_lr(*, half: bool) -> float:
    """The lr that a base is run at whose update is proportional to it."""
    return _BASE_LR_HALF if half else _BASE_LR


@contextmanager
def at_base_rates(optimizer: Optimizer, rates: list[Rate]) -> Iterator[None]:
    """The groups at the learning rates that the base is run at; the typed ones come back after."""
    typed = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate.base_lr is not None:
                group["lr"] = rate.base_lr
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, typed, strict=True):
            if lr is not None:
                group["lr"] = lr


def as_factor(rate: float | Tensor, like: Tensor) -> float | Tensor:
    """A learning rate or a unit, number or tensor, as a factor for tensors `like` this one."""
    return rate.to(like).reshape(()) if isinstance(rate, Tensor) else rate


def effective_lrs(scale: Tensor, groups: list[dict[str, Any]]) -> list[Tensor]:
    """The learning rate in force in each group: the scale times the group's own lr."""
    scale = scale.to(torch.float32)
    return [scale * as_factor(typed_lr(group), scale) for group in groups]


def typed_lr(group: dict[str, Any]) -> Any:
    """The learning rate of a group, and 1 where a base has none or chooses it by itself."""
    lr = group.get("lr")
    return 1.0 if lr is None else lr


def publish_rates(scale: Tensor, groups: list[dict[str, Any]]) -> None:
    """Write the learning rates in force into the groups, for loggers that look there."""
    for group, rate in zip(groups, effective_lrs(scale, groups), strict=True):
        own = group.get(EFFECTIVE_LR)
        if isinstance(own, Tensor) and own.device == rate.device:
            own.copy_(rate)
        else:
            group[EFFECTIVE_LR] = rate
