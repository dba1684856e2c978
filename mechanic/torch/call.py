"""A call of `optimizer.step`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS

from mechanic.torch.mechanism import Mechanism
from mechanic.torch.rates import step_name

_TORCH = str(Path(torch.__file__).parent)


class Call(NamedTuple):
    """A call of a mechanized optimizer's `step`; its closure, if it has one, was evaluated."""

    optimizer: Any
    mechanism: Mechanism
    base_step: Callable[..., Any]
    """The step of the base, without the hooks that torch wraps around it"""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Any = None
    """What the closure has returned"""
    has_closure: bool = False
    nonfinite: Tensor | None = None
    """Above 0 if a gradient of any scope holds NaN or inf, where there are several"""

    @property
    def found_inf(self) -> Tensor | None:
        """Above 0 if someone has found NaN or inf in the gradients: GradScaler, or another scope.
        None where no one has looked."""
        found: Tensor | None = getattr(self.optimizer, "found_inf", None)
        if found is None or self.nonfinite is None:
            return self.nonfinite if found is None else found
        return torch.maximum(self.nonfinite, found.to(self.nonfinite).reshape(()))

    def run_base(self, optimizer: Any) -> Any:
        """Run the base's step on an optimizer: this one, or a twin of it."""
        return self.base_step(optimizer, *self.args, **self.kwargs)

    @property
    def is_of_torch(self) -> bool:
        """Whether the base's step is one of torch's own."""
        return step_name(self.base_step).startswith("torch.optim.")

    @property
    def evaluates_again(self) -> bool:
        """Whether the base may evaluate its closure more than once, at points of its own."""
        return isinstance(self.optimizer, LBFGS) or (self.has_closure and not self.is_of_torch)


def unhooked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step without the call of step hooks that torch wraps around it: the mechanized step has
    its own, and hooks should run once. torch.compile wraps some once more, marks and all, and so
    does a user's own patch that is made with `functools.wraps`, which is kept."""
    while getattr(function, "hooked", False) is True and hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_TORCH):
            break
        function = function.__wrapped__
    return function
