"""The step of `mechanic.torch.step` with the kernels of `mechanic.torch.kernels`, on a GPU.

`find_plan` is the dispatcher: where it finds no plan, the plain path goes. Both keep the same state
and come to the same result, so that they may take turns.
"""

import functools
import importlib.util
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import LBFGS, Optimizer

from mechanic import tuner
from mechanic.torch.measure import is_finite
from mechanic.torch.mechanism import EFFECTIVE_LR, Mechanism, Pace, is_capturing
from mechanic.torch.modes import has_modes
from mechanic.torch.rates import at_base_rates, is_proportional
from mechanic.torch.skipping import skipping, skips_by_itself

if TYPE_CHECKING:
    from mechanic.torch.kernels.arrivals import Arrivals
    from mechanic.torch.kernels.launch import Inputs
    from mechanic.torch.kernels.plan import Plan

DEVICES = ("cuda",)
"""Where the kernels run. Triton's interpreter would run them on a CPU, for tests."""


@functools.cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def works_on(device: torch.device) -> bool:
    """Whether a kernel can be compiled and run: Triton wants a C compiler and a GPU it knows."""
    from mechanic.torch.kernels import launch

    try:
        launch.try_out(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, the plain path is there
        warnings.warn(
            f"mechanic: Triton does not work here ({error!r}), so that steps on {device} take the "
            "slower path of torch's own operators.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _can_try(mechanism: Mechanism) -> bool:
    return not is_capturing(mechanism.scale.device) and works_on(mechanism.scale.device)


def find_plan(
    optimizer: Optimizer, mechanism: Mechanism, base_step: Callable[..., Any]
) -> "tuple[Plan, list[int], bool] | None":
    """How the kernels do this step, where its gradients lie and whether they were noted when they
    arrived; None where the kernels cannot."""
    if mechanism.scale.device.type not in DEVICES or torch.compiler.is_compiling():
        return None
    if not has_triton() or (mechanism.plan is None and not _can_try(mechanism)):
        return None
    from mechanic.torch.kernels import known, plan
    from mechanic.torch.kernels.arrivals import Arrivals

    bases = known.find(optimizer, base_step)
    if not _is_for_kernels(optimizer, mechanism, is_known=bases is not None):
        return None
    own: Plan | None = mechanism.plan
    if own is not None and own.bases == (bases or [known.ANY] * len(optimizer.param_groups)):
        addresses, arrived = own.find_grads(optimizer, _arrivals_for(optimizer, mechanism))
        if addresses is not None:
            return own, addresses, arrived
    if is_capturing(mechanism.scale.device):
        return None  # there is nothing to make a plan with; the plain path is captured
    mechanism.drop_plan()
    listen(optimizer, mechanism)
    options = mechanism.options  # a decay's sums read x, which may still change
    arriving = options.sums_in_backward and options.s_decay == 0 and _unscales_by_itself(optimizer)
    mechanism.plan = own = plan.make(optimizer, bases, arriving=arriving)
    if own is None or own.device != mechanism.scale.device:
        return None
    if arriving:
        mechanism.arrivals = Arrivals(own)
    addresses, _ = own.find_grads(optimizer, None)
    return None if addresses is None else (own, addresses, False)


def _arrivals_for(optimizer: Any, mechanism: Mechanism) -> "Arrivals | None":
    """What has arrived, where it is certain that no one has changed it unseen. GradScaler does: it
    unscales for bases that do not by themselves, or when it is told to."""
    is_unscaled = getattr(optimizer, "grad_scale", optimizer) is None  # as GradScaler.step says
    if is_unscaled or not _unscales_by_itself(optimizer) or is_capturing(mechanism.scale.device):
        return None
    arrivals: Arrivals | None = mechanism.arrivals
    return arrivals


def _unscales_by_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _is_for_kernels(optimizer: Optimizer, mechanism: Mechanism, *, is_known: bool) -> bool:
    return not (
        mechanism.counted is not None
        or tuner.RULES[mechanism.options.preset].decays_after_base
        or optimizer.defaults.get("differentiable")
        or (mechanism.options.max_grad_norm < math.inf and not is_known)
        or isinstance(optimizer, LBFGS)
        or has_modes(type(optimizer))
    )


def step(
    optimizer: Any,
    mechanism: Mechanism,
    base_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Any,
) -> tuple[bool, Any]:
    """A step, as `mechanic.torch.step.step` does it, and whether it was done: that may be left to
    the plain path. The closure was evaluated to `loss`."""
    planned = find_plan(optimizer, mechanism, base_step)
    if planned is None:
        return False, None
    plan, addresses, arrived = planned
    if not any(addresses):
        return True, base_step(optimizer, *args, **kwargs)
    turn = _begin(optimizer, mechanism, base_step, plan, addresses, arrived=arrived)
    if not turn.is_sound:
        mechanism.drop_plan()
        return step(optimizer, mechanism, base_step, args, kwargs, loss)
    with torch.no_grad(), plan.on_device():
        if plan.is_known:
            result = loss
            _run_known(mechanism, turn)
        else:
            run = functools.partial(base_step, optimizer, *args, **kwargs)
            result = _run_any(optimizer, mechanism, base_step, run, turn, loss)
        torch.autograd.graph.increment_version(plan.params)
        mechanism.note_rates(turn.pace.lrs, turn.pace.risen)
        mechanism.count_on_device(may_learn=any(rate.live is not False for rate in turn.pace.rates))
        for group, rate in zip(optimizer.param_groups, plan.effective_lrs, strict=True):
            group[EFFECTIVE_LR] = rate
    return True, result


class _Turn(NamedTuple):
    """A step that has begun."""

    plan: "Plan"
    addresses: list[int]
    inputs: "Inputs"
    pace: Pace
    is_sound: bool
    """Whether everything was where the plan says"""


def _begin(
    optimizer: Any,
    mechanism: Mechanism,
    base_step: Callable[..., Any],
    plan: "Plan",
    addresses: list[int],
    *,
    arrived: bool,
) -> _Turn:
    """Launch the sums, which change nothing, and look at the rest while they run."""
    from mechanic.torch.kernels import launch

    pace = mechanism.look_at_rates(
        optimizer, proportional=is_proportional(base_step), half=plan.half
    )
    risen = pace.risen
    if isinstance(risen, Tensor) and risen.device.type == "cpu" != plan.device.type:
        risen = bool(risen)
        pace = pace._replace(risen=risen, waits=pace.waits and (mechanism.is_starting or risen))
    keep: list[Any] | None = mechanism.captured if is_capturing(mechanism.scale.device) else None
    if keep is not None:
        keep += [plan, *mechanism.tensors(), *mechanism.lrs]
    reads_x = mechanism.options.s_decay != 0
    is_sound = not reads_x or plan.holds(optimizer)
    with torch.no_grad(), plan.on_device():
        inputs = _gather(optimizer, mechanism, plan, addresses, pace, keep)
        if is_sound:
            sections, arrivals = plan.sums, mechanism.arrivals
            if arrivals is not None:
                sections = arrivals.take_unsummed(has_all=arrived)
            launch.sum_up(plan, mechanism, inputs, sections)
    if not reads_x:
        is_sound = plan.holds(optimizer)
    return _Turn(plan, addresses, inputs, pace, is_sound)


def _run_known(mechanism: Mechanism, turn: _Turn) -> None:
    """The step of a base that is computed with Mechanic's."""
    from mechanic.torch.kernels import launch

    plan, inputs = turn.plan, turn.inputs
    counts_on_host = bool(plan.steps) and not plan.has_steps_here
    is_asked = counts_on_host and (mechanism.options.skip_nonfinite or inputs.found_inf is not None)
    if counts_on_host:
        plan.mirror_steps()
    if turn.pace.waits:
        launch.square_proposals(plan, mechanism, inputs)
    launch.tune(plan, mechanism, inputs, waits=turn.pace.waits)
    if is_asked:
        plan.ask(plan.verdict[0])
    launch.update(plan, inputs)
    if counts_on_host and (not is_asked or plan.wait_for_answer()):
        plan.count_steps(turn.addresses)


def _run_any(
    optimizer: Any,
    mechanism: Mechanism,
    base_step: Callable[..., Any],
    run: Callable[[], Any],
    turn: _Turn,
    loss: Any,
) -> Any:
    """The step of a base that runs by itself, between Mechanic's passes."""
    from mechanic.torch.kernels import launch

    plan, inputs = turn.plan, turn.inputs
    finite = is_finite(mechanism.options, plan.partials[: plan.total].sum(), inputs.found_inf)
    is_asked = isinstance(finite, Tensor) and not skips_by_itself(optimizer, base_step)
    if is_asked and isinstance(finite, Tensor):
        plan.ask(finite)
    launch.keep(plan, inputs)
    if is_asked:
        finite = plan.wait_for_answer()  # while the copy is made
    result, waits = loss, turn.pace.waits and finite is not False
    if finite is not False:
        own = skipping(optimizer, [], finite) if isinstance(finite, Tensor) else nullcontext()
        try:
            with (
                plan.in_place(),
                at_base_rates(optimizer, turn.pace.rates),
                own,
                torch.enable_grad(),
            ):
                result = run()
        except BaseException:
            plan.put_back(inputs.copies)
            raise
    if waits:
        launch.square_proposals(plan, mechanism, inputs)
    launch.tune(plan, mechanism, inputs, waits=waits)
    launch.move(plan, inputs)
    return result


def _gather(
    optimizer: Any,
    mechanism: Mechanism,
    plan: "Plan",
    addresses: list[int],
    pace: Pace,
    keep: list[Any] | None,
) -> "Inputs":
    from mechanic.torch.kernels.launch import Inputs

    copies: dict[torch.dtype, Tensor] = {}
    if not plan.is_known:
        for dtype, size in plan.copy_sizes.items():
            copies[dtype] = torch.empty(size, dtype=dtype, device=plan.device)
    risen = pace.risen
    if not isinstance(risen, Tensor):
        risen = plan.yes if risen else plan.no
    return Inputs(
        grads=plan.place_grads(addresses, keep),
        groups=plan.type_in(optimizer, pace.rates, addresses, keep),
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        max_norm=plan.max_norm(mechanism.options.max_grad_norm, keep),
        risen=risen,
        copies=copies,
    )


def listen(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Have each parameter tell when its gradient has arrived, to sum it up at once."""
    if not mechanism.options.sums_in_backward:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in mechanism.listening and param.requires_grad and param.is_leaf:
                hook = functools.partial(_arrive, weakref.ref(mechanism))
                handle = param.register_post_accumulate_grad_hook(hook)
                mechanism.listening[param] = handle


def stop_listening(mechanism: Mechanism) -> None:
    """Take the hooks off the parameters."""
    for handle in mechanism.listening.values():
        handle.remove()
    mechanism.listening.clear()


def _arrive(owner: "weakref.ref[Mechanism]", param: Tensor) -> None:
    mechanism = owner()
    if mechanism is None or mechanism.arrivals is None or is_capturing(mechanism.scale.device):
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return  # where processes share the gradients, this is not yet the mean of them
    from mechanic.torch.kernels import launch

    arrived, plan = mechanism.arrivals.note(param), mechanism.plan
    if arrived is not None:
        section, address, groups = arrived
        with torch.no_grad(), plan.on_device():
            launch.sum_one(plan, mechanism, section, address, groups, plan.table)
