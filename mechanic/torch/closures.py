"""Closures, and LBFGS, which evaluates its closure several times in a step."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from mechanic.torch.mechanism import Mechanism
from mechanic.torch.vectors import Batch, put_back


class NonFinite(Exception):  # noqa: N818 - it is no error, and ends in `step`
    """A later evaluation of a closure gave NaN or inf."""


def evaluate(
    optimizer: Optimizer, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure, so that there are gradients to look at before the base sees them.

    The base gets one that returns this evaluation first, and evaluates anew from then on.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        loss = closure()
    checked = isinstance(optimizer, LBFGS) and mechanism.options.skip_nonfinite
    evaluations = 0

    def replay() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1:
            return loss
        again = closure()
        if checked and not _has_finite_gradients(optimizer):
            raise NonFinite
        return again

    if args:
        return loss, (replay, *args[1:]), kwargs
    return loss, args, {**kwargs, "closure": replay}


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sums = [param.grad.sum() * 0 for param in params if param.grad is not None]
    return bool(torch.stack(sums).isfinite().all()) if sums else True


@contextmanager
def undoing(
    optimizer: Optimizer, batches: list[Batch], before: list[list[Tensor]]
) -> Iterator[None]:
    """Around the step of LBFGS, nothing for others: undo it if it meets a NaN half-way, and what
    it does that a step should not. It moves parameters that have no gradient along directions of
    earlier steps, and learns curvature from how far it has moved, which is not its own u but S·u.
    """
    if not isinstance(optimizer, LBFGS):
        yield
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    idle = [param for param in params if param.grad is None]
    at_rest = [param.detach().clone() for param in idle]
    state = {param: copy.deepcopy(own) for param, own in optimizer.state.items()}
    try:
        yield
    except NonFinite:
        put_back(batches, before)
        optimizer.state.clear()
        optimizer.state.update(state)
        raise
    finally:
        with torch.no_grad():
            for param, point in zip(idle, at_rest, strict=True):
                param.copy_(point)
    for own in optimizer.state.values():
        if "n_iter" in own:
            own["n_iter"] = 0
