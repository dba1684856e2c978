"""The step of `mechanic.torch.plain` on a CPU, in one call of compiled code.

The call is the whole step: what it writes is written when it returns, and Python's signal handlers
wait until then. Python's own part is to look whether everything is where the plan says.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mechanic import tuner
from mechanic.advance import FIRST_STEPS
from mechanic.torch.call import Call
from mechanic.torch.capture import is_traced
from mechanic.torch.flag import YES
from mechanic.torch.history import StepRates
from mechanic.torch.kernels import known
from mechanic.torch.kernels.known import KnownBase
from mechanic.torch.measure import is_known_finite
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.modes import has_modes
from mechanic.torch.native import plan
from mechanic.torch.native.library import Passes, find_passes
from mechanic.torch.native.plan import Gradients, Plan
from mechanic.torch.native.tables import FORMULAS
from mechanic.torch.scalars import can_look


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether a user has not turned the compiled step off."""
    return os.name == "posix" and environment.get("MECHANIC_NATIVE", "1") != "0"


IS_ON = is_wanted(os.environ)
"""Whether steps are made by compiled code where they can be."""

_GRAIN = 1 << 18  # so many elements are worth a further thread

_plans: WeakKeyDictionary[Mechanism, Plan] = WeakKeyDictionary()


class Made(NamedTuple):
    """A step that was made."""

    result: Any
    """What `optimizer.step` returns"""


class _Found(NamedTuple):
    """What a step is made with."""

    passes: Passes
    plan: Plan
    written: list[Tensor]
    """The tensors that it writes to"""
    gradients: Gradients
    rates: StepRates
    with_u: bool
    """Whether the norm of the update itself is measured"""


def step(call: Call) -> Made | None:
    """Make a step; None where it is left to the plain path, and nothing has changed."""
    if not IS_ON or call.mechanism.home.type != "cpu" or is_traced():
        return None
    found = _find(call)
    if found is None:
        _plans.pop(call.mechanism, None)
        return None
    return _make(call, found)


def _find(call: Call) -> _Found | None:
    """What the step is made with; None where it is none for the compiled code. Until the tuner has
    learned from a step, steps are left to the plain path: the base's state is made there, and the
    unit of the displacements is chosen."""
    optimizer, mechanism = call.optimizer, call.mechanism
    history, updates = mechanism.history, FIRST_STEPS
    if history.is_starting:
        updates = int(mechanism.counts.read().updates)
    if updates == 0 or history.has_met_extremes:
        return None
    bases = known.find(optimizer, call.base_step)
    if bases is None or not _is_for_passes(call):
        return None
    is_relative = mechanism.options.s_init == "relative"
    rates = history.look(optimizer, proportional=True, is_relative=is_relative, half=())
    if not rates.has_risen.is_known:
        return None
    passes = find_passes(mechanism.options, frozen=mechanism.frozen)  # compiled at first use
    if passes is None:
        return None
    is_needed = updates < FIRST_STEPS or rates.has_risen.is_yes
    with_u = rates.measures_update and is_needed
    try:
        return _find_tensors(call, passes, bases, rates, with_u=with_u)
    except RuntimeError:  # a tensor without memory, of a transform of torch.func
        return None


def _find_tensors(
    call: Call, passes: Passes, bases: list[KnownBase], rates: StepRates, *, with_u: bool
) -> _Found | None:
    optimizer, mechanism = call.optimizer, call.mechanism
    own = _plans.get(mechanism)
    written = None if own is None else own.written(optimizer, mechanism, bases)
    if own is None or written is None:
        own = plan.make(optimizer, mechanism, bases)
        if own is None:
            return None
        _plans[mechanism] = own
        written = own.written(optimizer, mechanism, bases)
    gradients = own.gradients()
    if written is None or gradients is None or not is_known_finite(optimizer):
        return None
    return _Found(passes, own, written, gradients, rates, with_u)


def _is_for_passes(call: Call) -> bool:
    optimizer, mechanism = call.optimizer, call.mechanism
    return not (
        tuner.RULES[mechanism.options.preset].decays_after_base
        or mechanism.scalars.observed is not None
        or mechanism.process_group is not None
        or mechanism.find_ranks(optimizer) is not None
        or optimizer.defaults.get("differentiable")
        or getattr(optimizer, "grad_scale", None) is not None
        or call.found_inf is not None
        or any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
        or has_modes(type(optimizer))
        or torch.is_inference_mode_enabled()
        or not can_look(mechanism.home)
    )


def _make(call: Call, found: _Found) -> Made | None:
    mechanism, options = call.mechanism, call.mechanism.options
    passes, tables = found.passes, found.plan.tables
    settings = _settings(call.optimizer, found.plan.bases, found.rates)
    with_x, max_norm = tuner.reads_x(options), options.max_grad_norm
    tables.set(settings, with_x=with_x, with_u=found.with_u, max_norm=max_norm)
    threads = min(torch.get_num_threads(), 1 + tables.size // _GRAIN)
    addresses = found.gradients.addresses.buffer_info()[0]
    if not passes.step(ctypes.addressof(tables.plan), addresses, passes.rule, threads):
        return None
    torch.autograd.graph.increment_version(found.written)
    mechanism.kernels.drop_plan()
    mechanism.history.note(found.rates)
    mechanism.history.learn(YES)
    mechanism.counts.watch(YES)
    return Made(call.loss)


def _settings(optimizer: Any, bases: list[KnownBase], rates: StepRates) -> list[float]:
    """The table of the groups' settings."""
    settings: list[float] = []
    for group, base, rate in zip(optimizer.param_groups, bases, rates.rates, strict=True):
        sign = -1.0 if group.get("maximize") else 1.0
        own = known.hyperparameters(optimizer, base, group)
        row: tuple[Any, ...] = (group["lr"], rate.unit, sign, *own, rate.base_lr)
        settings += [*map(float, row), float(FORMULAS.index(base.formula))]
    return settings
