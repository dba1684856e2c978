"""Whether the kernels can make a step, and with which plan. Nothing here needs Triton."""

import functools
import importlib.util
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from mechanic import tuner
from mechanic.torch.base import steps_in_place
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing, is_traced
from mechanic.torch.kernels.listen import listen
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.modes import has_modes

if TYPE_CHECKING:
    from mechanic.torch.kernels.arrivals import Arrivals
    from mechanic.torch.kernels.known import KnownBase
    from mechanic.torch.kernels.plan import Plan
    from mechanic.torch.sharding import Ranks

DEVICES = ("cuda",)
"""Where the kernels run. Triton's interpreter would run them on a CPU, for tests."""
OLDEST_TRITON = "3.6"
"""The kernels have run with no older one, and some do not compile with 3.2, of torch 2.6."""


class Found(NamedTuple):
    """A plan for a step, and where its gradients lie."""

    plan: "Plan"
    addresses: list[int]
    has_arrived: bool
    """Whether the gradients are those that were noted when they arrived"""


@functools.cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def works_on(device: torch.device) -> bool:
    """Whether a kernel can be compiled and run: Triton wants a C compiler and a GPU it knows."""
    try:
        _refuse_old_triton()
        from mechanic.torch.kernels import launch

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


def _refuse_old_triton() -> None:
    import triton

    if TorchVersion(triton.__version__) < OLDEST_TRITON:
        raise RuntimeError(f"Triton {triton.__version__} is older than {OLDEST_TRITON}")


def find_plan(call: Call) -> Found | None:
    """How the kernels make this step; None where they cannot."""
    optimizer, mechanism, cache = call.optimizer, call.mechanism, call.mechanism.kernels
    if mechanism.home.type not in DEVICES or is_traced() or not has_triton():
        return None
    captures = is_capturing(mechanism.home)
    if cache.plan is None and (captures or not works_on(mechanism.home)):
        return None
    from mechanic.torch.kernels import known

    bases = known.find(optimizer, call.base_step)
    ranks = mechanism.find_ranks(optimizer)
    is_alone = ranks is None
    if not _is_for_kernels(call, is_known=bases is not None, is_alone=is_alone):
        return None
    had: Plan | None = cache.plan
    used_bases = bases or [known.ANY] * len(optimizer.param_groups)
    if had is not None and had.groups.bases == used_bases and had.ranks is ranks:
        found = _find_gradients(optimizer, had, None if captures else _trusted(optimizer, cache))
        if found is not None:
            return found
    if captures:
        return None  # there is nothing to make a plan with; the plain path is captured
    cache.drop_plan()
    try:
        found = _make_plan(call, bases, ranks)
    except BaseException:
        cache.drop_plan()
        raise
    if found is None:
        cache.drop_plan()
    return found


def _make_plan(call: Call, bases: "list[KnownBase] | None", ranks: "Ranks | None") -> Found | None:
    """A new plan, and where the gradients lie. The parameters that are seen for the first time get
    their state."""
    from mechanic.torch.kernels import newcomers, plan

    optimizer, mechanism, cache = call.optimizer, call.mechanism, call.mechanism.kernels
    if ranks is None:
        listen(optimizer, mechanism)
    is_arriving = ranks is None and _sums_as_they_arrive(optimizer, mechanism)
    if bases is not None:
        cache.newcomers = newcomers.meet(optimizer, bases, mechanism.options)
    cache.plan = new = plan.make(optimizer, bases, mechanism.home, ranks, is_arriving=is_arriving)
    if new is None:
        return None
    if is_arriving:
        from mechanic.torch.kernels.arrivals import Arrivals

        cache.arrivals = Arrivals(new)
    return _find_gradients(optimizer, new, None)


def _is_for_kernels(call: Call, *, is_known: bool, is_alone: bool) -> bool:
    optimizer, options = call.optimizer, call.mechanism.options
    return not (
        not (is_alone or is_known)
        or tuner.RULES[options.preset].decays_after_base
        or optimizer.defaults.get("differentiable")
        or (options.max_grad_norm < math.inf and not is_known)
        or has_modes(type(optimizer))
        or steps_in_place(call)
        or call.mechanism.scalars.observed is not None
    )


def _find_gradients(optimizer: Any, plan: "Plan", arrivals: "Arrivals | None") -> Found | None:
    """Where the gradients lie; None if the plan does not hold any more. This is asked before
    anything is launched, and made to be fast."""
    if not plan.placement.holds_for_sums(optimizer):
        return None
    grads = plan.placement.gradients()
    if grads is None:
        return None
    arrived = None if arrivals is None else arrivals.addresses(grads)
    if arrived is not None:
        return Found(plan, arrived, has_arrived=True)
    addresses = plan.gradients.find(grads)
    if addresses is None or not (any(addresses) or plan.ranks):
        return None
    return Found(plan, addresses, has_arrived=False)


def _trusted(optimizer: Any, cache: Any) -> "Arrivals | None":
    """What has arrived, where it is certain that no one has changed it unseen. GradScaler does: it
    unscales for bases that do not unscale by themselves, or when it is told to."""
    is_unscaled = getattr(optimizer, "grad_scale", optimizer) is None  # GradScaler.step says so
    if is_unscaled or not _unscales_by_itself(optimizer):
        return None
    arrivals: Arrivals | None = cache.arrivals
    return arrivals


def _sums_as_they_arrive(optimizer: Any, mechanism: Mechanism) -> bool:
    options = mechanism.options
    x_may_change = tuner.reads_x(options)  # between backward and the step
    return options.sums_in_backward and not x_may_change and _unscales_by_itself(optimizer)


def _unscales_by_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
