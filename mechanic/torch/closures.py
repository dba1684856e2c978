"""Closures, and LBFGS, which evaluates its closure several times in a step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from mechanic.torch.call import Call


class NonFinite(Exception):  # noqa: N818 - it is no error, and ends in the step
    """A later evaluation of a closure gave NaN or inf."""


def evaluate(call: Call) -> Call:
    """Evaluate a closure, so that there are gradients to look at before the base sees them.

    The base gets a closure that returns this evaluation first, and evaluates anew from then on.
    """
    closure = call.args[0] if call.args else call.kwargs.get("closure")
    if closure is None:
        return call
    with torch.enable_grad():
        loss = closure()
    is_checked = isinstance(call.optimizer, LBFGS) and call.mechanism.options.skip_nonfinite
    replay = _replay(closure, loss, call.optimizer if is_checked else None)
    call = call._replace(loss=loss, has_closure=True)
    if call.args:
        return call._replace(args=(replay, *call.args[1:]))
    return call._replace(kwargs={**call.kwargs, "closure": replay})


def _replay(closure: Callable[[], Any], loss: Any, checked: Optimizer | None) -> Callable[[], Any]:
    evaluations = 0

    def replay() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1:
            return loss
        again = closure()
        if checked is not None and not _has_finite_gradients(checked):
            raise NonFinite
        return again

    return replay


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sums = [param.grad.sum() * 0 for param in params if param.grad is not None]
    return bool(torch.stack(sums).isfinite().all()) if sums else True


@contextmanager
def undoing(optimizer: Optimizer) -> Iterator[None]:
    """Around the step of LBFGS, nothing for others: undo what a step should not do, and if it fails
    halfway, what it has done to its state. LBFGS moves parameters that have no gradient along the
    directions of earlier steps, and learns curvature from how far it has moved, which is not its
    own update u but S·u."""
    if not isinstance(optimizer, LBFGS):
        yield
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    idle = [param for param in params if param.grad is None]
    at_rest = [param.detach().clone() for param in idle]
    state = {param: copy.deepcopy(own) for param, own in optimizer.state.items()}
    try:
        yield
    except BaseException:
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
