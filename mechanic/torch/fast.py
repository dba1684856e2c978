"""The step of `mechanic.torch.step` with the kernels of `mechanic.torch.kernels`, on a GPU.

`find_plan` is the dispatcher: where it finds no plan, the plain path goes. Both keep the same state
and come to the same result, so that they may take turns.
"""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import LBFGS, Optimizer

from mechanic import tuner
from mechanic.torch.mechanism import EFFECTIVE_LR, Mechanism
from mechanic.torch.modes import has_modes
from mechanic.torch.rates import (
    at_base_rates,
    has_risen,
    is_proportional,
    rate_of,
    typed_rates,
)
from mechanic.torch.skipping import decide, skipping, skips_by_itself

if TYPE_CHECKING:
    from mechanic.torch.kernels.launch import Inputs
    from mechanic.torch.kernels.plan import Plan

DEVICES = ("cuda",)
"""Where the kernels run. Triton's interpreter would run them on a CPU, for tests."""


@functools.cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def find_plan(
    optimizer: Optimizer, mechanism: Mechanism, base_step: Callable[..., Any]
) -> "tuple[Plan, list[int]] | None":
    """How the kernels do this step, and where its gradients lie; None where they cannot."""
    if mechanism.scale.device.type not in DEVICES or torch.compiler.is_compiling():
        return None
    if not has_triton() or not _is_for_kernels(optimizer, mechanism):
        return None
    from mechanic.torch.kernels import known, plan

    bases = known.find(optimizer, base_step)
    own: Plan | None = mechanism.plan
    if own is not None and own.bases == (bases or [known.ANY] * len(own.bases)):
        addresses = own.find_grads(optimizer)
        if addresses is not None:
            return own, addresses
    if _is_capturing(mechanism):
        return None  # there is nothing to make a plan with; the plain path is captured
    listen(optimizer, mechanism)
    mechanism.plan = own = plan.make(optimizer, bases)
    if own is None or own.device != mechanism.scale.device:
        return None
    addresses = own.find_grads(optimizer)
    return None if addresses is None else (own, addresses)


def _is_for_kernels(optimizer: Optimizer, mechanism: Mechanism) -> bool:
    return not (
        mechanism.counted is not None
        or tuner.RULES[mechanism.options.preset].decays_after_base
        or optimizer.defaults.get("differentiable")
        or isinstance(optimizer, LBFGS)
        or has_modes(type(optimizer))
    )


def step(
    optimizer: Any,
    mechanism: Mechanism,
    base_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: "Plan",
    addresses: list[int],
    loss: Any,
) -> Any:
    """A step, as `mechanic.torch.step.step` does it. The closure was evaluated to `loss`."""
    from mechanic.torch.kernels import launch

    if not any(addresses):
        return base_step(optimizer, *args, **kwargs)
    proportional = is_proportional(base_step)
    rates = [rate_of(group, proportional=proportional) for group in optimizer.param_groups]
    lrs = typed_rates(optimizer, mechanism.lrs)
    risen = has_risen(lrs, mechanism.lrs)
    if isinstance(risen, Tensor) and risen.device.type == "cpu" != plan.device.type:
        risen = bool(risen)
    waits = mechanism.is_starting or risen is not False
    waits = waits and mechanism.options.s_init == "relative"
    keep: list[Any] | None = mechanism.captured if _is_capturing(mechanism) else None
    if keep is not None:
        keep.append(plan)

    result = loss
    on_device = torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()
    with torch.no_grad(), on_device:
        inputs = _gather(optimizer, mechanism, plan, addresses, rates, risen, keep)
        launch.sum_up(plan, mechanism, inputs, plan.take_unsummed())
        if not plan.is_known:
            finite: Tensor | bool = _is_finite(mechanism, plan, inputs)
            if isinstance(finite, Tensor) and not skips_by_itself(optimizer, base_step):
                finite = decide(finite)
            if finite is False:
                waits = False
            else:
                own = skipping(optimizer, [], finite) if finite is not True else nullcontext()
                with torch.enable_grad(), at_base_rates(optimizer, rates), own:
                    result = base_step(optimizer, *args, **kwargs)
        if waits:
            launch.square_proposals(plan, mechanism, inputs)
        host_steps = bool(plan.steps) and not plan.has_steps_here
        if host_steps:
            plan.mirror_steps()
        launch.tune(plan, mechanism, inputs, waits=waits)
        if plan.is_known:
            launch.update(plan, inputs)
            if host_steps and decide(plan.verdict[0]):
                plan.count_steps(addresses)
        else:
            launch.move(plan, inputs)
        mechanism.note_rates(lrs)
        mechanism.count_on_device()
        for group, rate in zip(optimizer.param_groups, plan.effective_lrs, strict=True):
            group[EFFECTIVE_LR] = rate
    return result


def _gather(
    optimizer: Any,
    mechanism: Mechanism,
    plan: "Plan",
    addresses: list[int],
    rates: list[Any],
    risen: Tensor | bool,
    keep: list[Any] | None,
) -> "Inputs":
    from mechanic.torch.kernels.launch import Inputs

    present = {e.group for e, at in zip(plan.entries, addresses, strict=True) if at}
    copies: dict[torch.dtype, Tensor] = {}
    if not plan.is_known:
        for dtype, size in plan.copy_sizes.items():
            copies[dtype] = torch.empty(size, dtype=dtype, device=plan.device)
    if not isinstance(risen, Tensor):
        risen = plan.yes if risen else plan.no
    return Inputs(
        grads=plan.place_grads(addresses, keep),
        groups=plan.type_in(optimizer, rates, present, keep),
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        max_norm=plan.max_norm(mechanism.options.max_grad_norm),
        risen=risen,
        copies=copies,
    )


def _is_finite(mechanism: Mechanism, plan: "Plan", inputs: "Inputs") -> Tensor | bool:
    finite: Tensor | bool = True
    if mechanism.options.skip_nonfinite:
        finite = plan.partials[: plan.total].sum().isfinite()
    if inputs.found_inf is not None:
        finite = finite & (inputs.found_inf.reshape(()) == 0)
    return finite


def _is_capturing(mechanism: Mechanism) -> bool:
    return mechanism.scale.is_cuda and torch.cuda.is_current_stream_capturing()


def listen(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Have each parameter tell when its gradient has arrived, to sum it up at once."""
    if not mechanism.options.sums_in_backward:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in mechanism.listening and param.requires_grad and param.is_leaf:
                hook = functools.partial(_arrive, mechanism)
                handle = param.register_post_accumulate_grad_hook(hook)
                mechanism.listening[param] = handle


def stop_listening(mechanism: Mechanism) -> None:
    """Take the hooks off the parameters."""
    for handle in mechanism.listening.values():
        handle.remove()
    mechanism.listening.clear()


def _arrive(mechanism: Mechanism, param: Tensor) -> None:
    plan: Plan | None = mechanism.plan
    if plan is None or param.grad is None or (dist.is_initialized() and dist.get_world_size() > 1):
        return  # where processes share the gradients, these are not yet the mean of them
    from mechanic.torch.kernels import launch

    arrived = plan.arrived(param)
    if arrived is not None:
        on_device = torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()
        with torch.no_grad(), on_device:
            launch.sum_one(plan, mechanism, *arrived)
