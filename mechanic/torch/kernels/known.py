"""The bases whose step is computed together with Mechanic's, in one pass.

Their state is their own, as their own first step would make it: a checkpoint does not know who
computed it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import AdamW, Optimizer

from mechanic.torch.rates import step_name


class KnownBase(NamedTuple):
    """A base whose update the kernels compute, as one group of it is set."""

    formula: str
    """The name of its formula in the kernel `formulas.propose`"""
    slots: tuple[str, ...]
    """The entries of its state that are as large as the parameter"""
    has_steps: bool = False
    """Whether it counts its steps in `state["step"]`, which the kernels then count, too"""


class Hyperparameters(NamedTuple):
    """The numbers in the formula of a base."""

    a: float = 0.0
    b: float = 0.0
    eps: float = 0.0
    decay: float = 0.0

    @property
    def logs(self) -> tuple[float, float]:
        """log₂ of `a` and `b`, for their powers."""
        return _log(self.a), _log(self.b)


ANY = KnownBase("any", ())
"""A base that runs by itself, between two passes."""


def find(optimizer: Optimizer, base_step: Callable[..., Any]) -> list[KnownBase] | None:
    """The base of each group, where its step is known."""
    name = step_name(base_step)
    if name not in _BASES:
        return None
    bases = [_BASES[name](optimizer, group) for group in optimizer.param_groups]
    return None if None in bases else bases  # type: ignore[return-value]


def hyperparameters(optimizer: Any, base: KnownBase, group: dict[str, Any]) -> Hyperparameters:
    """The numbers of a group."""
    if base.formula in ("adam", "adamw"):
        a, b = group["betas"]
        return Hyperparameters(a, b, group["eps"], group["weight_decay"])
    if base.formula == "lion":
        a, b = group["betas"]
        decay = group["weight_decay"] / (optimizer._init_lr if optimizer.decoupled_wd else 1.0)
        return Hyperparameters(a, b, decay=decay)
    if base.formula in ("sgd", "momentum", "nesterov"):
        return Hyperparameters(group["momentum"], group["dampening"], decay=group["weight_decay"])
    if base is ANY:
        return Hyperparameters()
    raise NotImplementedError(f"the kernels know no numbers of the formula {base.formula!r}")


def _adam(optimizer: Optimizer, group: dict[str, Any]) -> KnownBase | None:
    if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
        return None
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))  # none in 2.6
    return KnownBase("adamw" if decoupled else "adam", ("exp_avg", "exp_avg_sq"), has_steps=True)


def _sgd(_: Optimizer, group: dict[str, Any]) -> KnownBase | None:
    if group["momentum"] == 0:
        return KnownBase("sgd", ())
    return KnownBase("nesterov" if group["nesterov"] else "momentum", ("momentum_buffer",))


def _lion(optimizer: Any, _: dict[str, Any]) -> KnownBase | None:
    is_plain = optimizer.update_fn.__module__ == "lion_pytorch.lion_pytorch"  # not its Triton one
    return KnownBase("lion", ("exp_avg",)) if is_plain else None


_BASES: dict[str, Callable[[Optimizer, dict[str, Any]], KnownBase | None]] = {
    "torch.optim.adam.Adam.step": _adam,
    "torch.optim.adamw.AdamW.step": _adam,  # in torch 2.6; later it is Adam's
    "torch.optim.sgd.SGD.step": _sgd,
    "lion_pytorch.lion_pytorch.Lion.step": _lion,
}


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else -math.inf
