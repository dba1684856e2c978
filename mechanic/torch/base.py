"""Running the base: what it does to copies of the parameters is its proposal."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mechanic.torch import closures, modes, skipping, vectors
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing, is_traced
from mechanic.torch.copies import Copies, can_be_kept, moved, plain_copies, record_copies
from mechanic.torch.flag import Flag
from mechanic.torch.mechanism import CHECKS
from mechanic.torch.rates import Rate, at_base_rates, is_proportional, step_name
from mechanic.torch.twin import Twin, has_none, holds, show_again
from mechanic.torch.vectors import Batch

_SHARED = ("param_groups", "state", "defaults", "_mechanic")


class Proposal(NamedTuple):
    """What the base proposes: to move the parameters from `origin` to `points`."""

    points: list[list[Tensor]]
    """Where the base has put its parameters, for each batch"""
    origin: list[list[Tensor]]
    """Where it found them"""
    result: Any
    """What its step has returned"""
    twin: Twin | None = None
    """What the base was run on, for the optimizer to take over"""


def is_familiar(call: Call) -> bool:
    """Whether the base is known to touch nothing but the parameters in its groups and its state."""
    step = call.base_step
    return is_proportional(step) or step_name(step).startswith(("torch.optim.", "schedulefree."))


def steps_in_place(call: Call) -> bool:
    """Whether the base has to be run on the parameters themselves: in compiled code, which writes
    last, where it evaluates a closure again or differentiates once more, and where it knows the
    parameters by other ways than its groups."""
    kind: Any = type(call.optimizer)
    if is_traced() or call.evaluates_again or _is_one_of_a_kind(kind):
        return True
    if is_familiar(call):
        return False
    mechanism, params = call.mechanism, _params_of(call.optimizer)
    if not mechanism.steps_in_place and mechanism.checks_left == CHECKS:
        own = {n: v for n, v in vars(call.optimizer).items() if n not in _SHARED}
        mechanism.steps_in_place = holds(own, params)
    return mechanism.steps_in_place or any(
        param.grad is not None and param.grad.requires_grad for param in params
    )


_of_a_kind: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _is_one_of_a_kind(cls: type) -> bool:
    """Whether a base cannot have a twin: it has attributes in slots, or frees something when it is
    deleted, which the twin would free as well."""
    found = _of_a_kind.get(cls)
    if found is None:
        slots = [name for base in cls.__mro__ for name in (getattr(base, "__slots__", None) or ())]
        found = hasattr(cls, "__del__") or bool(set(slots) - {"__dict__", "__weakref__"})
        _of_a_kind[cls] = found
    return found


def _params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copy_params(
    call: Call, batches: list[Batch], *, is_recorded: bool, overlap: bool = False
) -> Copies:
    """The copies that the base is to step, or from which the parameters are put back."""
    if steps_in_place(call) or overlap:
        return plain_copies(batches)
    if is_recorded or not is_familiar(call) or not can_be_kept(batches):
        return record_copies(batches)
    return call.mechanism.copies.fill(batches)


def do_overlap(batches: list[Batch]) -> bool:
    """Whether two parameters are one and the same memory."""
    params = [p for b in batches if b.device.type != "meta" for p in b.params if p.numel()]
    if is_traced():
        return False
    return len({(param.device, param.data_ptr()) for param in params}) < len(params)


def propose(
    call: Call, batches: list[Batch], copies: Copies, rates: list[Rate], finite: Flag
) -> Proposal:
    """Run the base. The parameters are then where they were before, whatever has happened.

    Where only the device knows whether the gradients are `finite`, the base skips its step by
    itself if they are not.
    """
    if copies.stand_ins:
        before = None if is_familiar(call) else _look_out(call, batches)
        run = functools.partial(_run_on_twin, call, batches, copies, rates, finite, before)
    else:
        before = copies.points
        run = functools.partial(_run_in_place, call, batches, copies, rates, finite)
    if before is None or is_traced():
        return run()
    try:
        return run()
    except BaseException:  # it may have come before the parameters were put back
        vectors.put_back(batches, before)
        raise


def _run_on_twin(
    call: Call,
    batches: list[Batch],
    copies: Copies,
    rates: list[Rate],
    finite: Flag,
    before: list[list[Tensor]] | None,
) -> Proposal:
    origin = [batch.params for batch in batches]
    if modes.has_modes(type(call.optimizer)):
        origin = modes.show_own_point(call.mechanism.scalars.read(), batches, copies.points)
    twin = Twin(call.optimizer, copies.stand_ins)
    twin.prepare(call.optimizer, rates)
    try:
        with skipping.by_base(twin.optimizer, copies.stand_ins.values(), finite):
            result = call.run_base(twin.optimizer)
        points = copies.points if copies.are_kept else moved(copies, batches)
        if before is not None:
            points = _points_found(call, batches, points, before, keeps=twin.keeps_stand_ins())
    finally:
        if before is not None:
            vectors.put_back(batches, before)
    return Proposal(points, origin, result, twin)


def _look_out(call: Call, batches: list[Batch]) -> list[list[Tensor]] | None:
    """In the first steps of a base that nothing is known of, copies of the parameters, to see
    whether it writes to these themselves."""
    mechanism = call.mechanism
    if mechanism.checks_left == 0 or mechanism.home.type == "meta" or is_capturing(mechanism.home):
        return None
    mechanism.checks_left -= 1
    return plain_copies(batches).points


def _points_found(
    call: Call,
    batches: list[Batch],
    points: list[list[Tensor]],
    before: list[list[Tensor]],
    *,
    keeps: bool,
) -> list[list[Tensor]]:
    """Where the base has put its parameters. One that has written to the parameters themselves, or
    has kept stand-ins for later, is run in place from now on."""
    found = []
    for batch, own_points, had in zip(batches, points, before, strict=True):
        rows = list(zip(own_points, batch.params, had, strict=True))
        is_written = [not torch.equal(param, old) for _, param, old in rows]
        keeps = keeps or any(is_written)
        chosen = zip(rows, is_written, strict=True)
        found.append([param.clone() if new else own for (own, param, _), new in chosen])
    call.mechanism.steps_in_place = keeps
    return found


@contextmanager
def _hiding_displacements(optimizer: Any, batches: list[Batch]) -> Iterator[None]:
    """Let the base find no state for parameters that it has made none for (`twin.has_none`)."""
    owners = [] if is_traced() else [owner for batch in batches for owner in batch.owners]
    hidden = {owner: had for owner in owners if has_none(had := optimizer.state.get(owner))}
    try:
        for owner in hidden:
            del optimizer.state[owner]
        yield
    finally:
        for owner, had in hidden.items():
            show_again(optimizer.state, owner, had)


def _run_in_place(
    call: Call, batches: list[Batch], copies: Copies, rates: list[Rate], finite: Flag
) -> Proposal:
    optimizer = call.optimizer
    origin = [batch.params for batch in batches]
    try:
        if modes.has_modes(type(optimizer)):
            origin = modes.show_own_point(call.mechanism.scalars.read(), batches, origin)
        with (
            _hiding_displacements(optimizer, batches),
            at_base_rates(optimizer, rates),
            skipping.undoing(optimizer, batches, copies.points, finite),
            closures.undoing(optimizer),
        ):
            result = call.run_base(optimizer)
        points = [[param.detach().clone() for param in batch.params] for batch in batches]
    finally:
        vectors.put_back(batches, copies.points)
    return Proposal(points, origin, result)
