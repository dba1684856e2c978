"""The step of an optimizer that has several scales: a step of each part of it.

The gradients of all are looked at first, so that a NaN in one scope skips the step of all, and
`max_grad_norm` is for all. What each part then does is a step like any other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mechanic.options import Options
from mechanic.torch.call import Call
from mechanic.torch.mechanism import MECHANISM
from mechanic.torch.scalars import can_look
from mechanic.torch.scopes import Part
from mechanic.torch.sharding import local
from mechanic.torch.twin import OWN, apply_changes


def step(call: Call, options: Options, parts: list[Part], step_part: Callable[[Call], Any]) -> Any:
    """Make a step of each part of an optimizer."""
    optimizer = call.optimizer
    _refuse_common_state(optimizer)
    grads = [
        param.grad
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None and param.device.type != "meta"
    ]
    with torch.no_grad():
        if options.skip_nonfinite and grads:
            _tell_all_of_nonfinite(parts, grads)
        if options.max_grad_norm < math.inf and grads:
            _clip(optimizer, grads, options.max_grad_norm)
    result, ignored = call.loss, {*OWN, MECHANISM, "found_inf"}
    for part in parts:
        given = dict(vars(part.optimizer))
        own = call._replace(optimizer=part.optimizer, mechanism=part.mechanism)
        result = step_part(_with_closure_for_one(own))
        # A counter that the base keeps in itself is counted from the same number by all parts.
        apply_changes(vars(optimizer), vars(part.optimizer), given, ignored)
    return result


def _tell_all_of_nonfinite(parts: list[Part], grads: list[Tensor]) -> None:
    """Have every part skip the step where a gradient of any holds NaN or inf, by the way in which
    GradScaler tells of them. Other processes hear of it with the sums of each part."""
    held = [local(grad) for grad in grads]
    held = [grad.coalesce().values() if grad.is_sparse else grad for grad in held]
    largest = [grad.abs().max() for grad in held if grad.numel()]
    home = parts[0].mechanism.home
    if not largest:
        return
    is_bad = ~torch.stack([one.to(home, torch.float32) for one in largest]).isfinite().all()
    is_alone = all(part.mechanism.find_ranks(part.optimizer) is None for part in parts)
    if is_alone and can_look(home) and not is_bad:
        return
    for part in parts:
        had = getattr(part.optimizer, "found_inf", None)
        own = is_bad.to(part.mechanism.home, torch.float32)
        part.optimizer.found_inf = own if had is None else torch.maximum(own, had.to(own))


def _clip(optimizer: Any, grads: list[Tensor], max_norm: float) -> None:
    """Clip the gradients of all scopes together, as `torch.nn.utils.clip_grad_norm_` does."""
    norm = get_total_norm(grads)
    norm = torch.where(norm.isfinite(), norm, 0.0)  # such a step is skipped
    grad_scale = getattr(optimizer, "grad_scale", None)  # a fused base unscales by itself
    norm = norm if grad_scale is None else norm / grad_scale.to(norm).reshape(())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    clip_grads_with_norm_(params, max_norm, norm)


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
