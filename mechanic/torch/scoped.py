"""The step of an optimizer that has several scales: a step of each part of it.

The gradients of all are looked at first, so that a NaN in one scope skips the step of all, and
`max_grad_norm` is for all. What each part then does is a step like any other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import sharding
from mechanic.torch.call import Call
from mechanic.torch.mechanism import MECHANISM
from mechanic.torch.scalars import can_look, scalar_dtype
from mechanic.torch.scopes import Part, Scopes
from mechanic.torch.sharding import local
from mechanic.torch.twin import OWN, apply_changes
from mechanic.torch.vectors import squares, total


def step(call: Call, scopes: Scopes, parts: list[Part], step_part: Callable[[Call], Any]) -> Any:
    """Make a step of each part of an optimizer."""
    optimizer = call.optimizer
    _refuse_common_state(optimizer)
    with torch.no_grad():
        nonfinite = _look_at_gradients(optimizer, scopes, parts[0].mechanism.home)
    result, ignored = call.loss, {*OWN, MECHANISM}
    for part in parts:
        given = dict(vars(part.optimizer))
        own = _with_closure_for_one(call)._replace(
            optimizer=part.optimizer,
            mechanism=part.mechanism,
            nonfinite=None if nonfinite is None else nonfinite.to(part.mechanism.home),
        )
        result = step_part(own)
        # A counter that the base keeps in itself is counted from the same number by all parts.
        apply_changes(vars(optimizer), vars(part.optimizer), given, ignored)
    return result


def _look_at_gradients(optimizer: Any, scopes: Scopes, home: torch.device) -> Tensor | None:
    """Clip all gradients together, and find out whether any holds NaN or inf: None where the host
    knows that none does."""
    options, ranks = scopes.options, scopes.find_ranks(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params = [param for param in params if param.grad is not None and param.device.type != "meta"]
    held = {param: _values(local(param.grad, param)) for param in params}
    counted = [grad for param, grad in held.items() if ranks is None or param in ranks.counted]
    zero = torch.zeros((), dtype=scalar_dtype(home), device=home)
    is_bad = square = zero
    if options.skip_nonfinite:
        grads = [grad for grad in held.values() if grad.numel()]
        largest = torch._foreach_norm(grads, ord=math.inf) if grads else []
        is_bad = (~torch.stack([zero, *(one.to(zero) for one in largest)]).isfinite().all()).to(
            zero
        )
    if options.max_grad_norm < math.inf:
        terms = [term for grad in counted for term in squares([grad], _wide(grad))]
        square = total(terms, home)
    is_bad, square = sharding.begin_sums(ranks, [is_bad, square])()
    if options.max_grad_norm < math.inf:
        norm = torch.where(square.isfinite(), square, 0.0).sqrt()
        grad_scale = getattr(optimizer, "grad_scale", None)  # a fused base unscales by itself
        norm = norm if grad_scale is None else norm / grad_scale.to(norm).reshape(())
        factor = (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in held.values():
            grad.mul_(factor.to(grad.device, grad.dtype))
    is_needed = options.skip_nonfinite and (ranks is not None or not can_look(home) or is_bad)
    return is_bad.to(torch.float32) if is_needed else None


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _with_closure_for_one(call: Call) -> Call:
    """A call whose closure, which was evaluated, gives the loss once."""
    if not call.has_closure:
        return call
    is_asked = False

    def give_loss() -> Any:
        nonlocal is_asked
        if is_asked:
            raise ValueError(
                f"{type(call.optimizer).__name__} evaluates its closure several times in a step, "
                "which several scales do not allow. Leave scope= out."
            )
        is_asked = True
        return call.loss

    if call.args:
        return call._replace(args=(give_loss, *call.args[1:]))
    return call._replace(kwargs={**call.kwargs, "closure": give_loss})


def _refuse_common_state(optimizer: Any) -> None:
    """Refuse a base whose state does not belong to single parameters: each part would change it."""
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise ValueError(
                f"{type(optimizer).__name__} keeps state for all parameters together, under "
                f"{key!r}, which several scales do not allow. Leave scope= out."
            )
