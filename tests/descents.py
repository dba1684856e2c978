"""The smallest training there is, on parameters of any dtype, shape and layout."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from bases import MISSING
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

STEPS = 25
NEAR = 15  # steps of `descend`: after some more it is there, and rounding makes the scale
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.bfloat16, torch.float16]

momentum_sgd = functools.partial(SGD, momentum=0.9)
MAKES = {"AdamW": AdamW, "momentum": momentum_sgd, "SGD": SGD}
each_kind = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def descend(
    opt: Optimizer,
    params: list[Tensor],
    steps: int = STEPS,
    *,
    to: float = 3.0,
    layout: Callable[[Tensor], Tensor] = lambda grad: grad,
) -> None:
    """Train on ½Σ|x − to|², giving each gradient a layout."""
    for _ in range(steps):
        for param in params:
            param.grad = layout(param.detach() - to)
        opt.step()


def ramp(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Distinct numbers from 0.5 to 1.5."""
    return torch.linspace(0.5, 1.5, math.prod(shape), dtype=dtype).view(shape)


_SOME = ("Adafactor", "AdamW", "LBFGS", "Lion", "Muon", "SGD-momentum", "SparseAdam", "AdamW8bit")
SOME = [name for name in _SOME if name not in MISSING]
