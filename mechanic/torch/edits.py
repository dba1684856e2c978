"""Weights that someone else changes after every step: a mask, a clamp, a norm that is put back.

Δ would hold what such an edit takes back, and the scale would grow along a direction in which the
weights do not move. So some weights are looked at between steps, now and then. When they were
changed twice, all weights are compared with a copy from then on, and Δ follows the edits. A single
edit, such as an EMA that is put in, changes no Δ, and no copy is made. Nor is it where another
optimizer moves the same weights: its steps are for a loss of its own.
"""

import ctypes
import gc
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.advance import FAR
from mechanic.torch import modes, vectors
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing, is_traced
from mechanic.torch.mechanism import DISPLACEMENT, Mechanism
from mechanic.torch.sharding import here

_FIRST = 64  # so many first steps are looked at, in which the scale grows fast, and later
_PERIOD = 32  # one in so many
_ENOUGH = 2  # looks that find an edit, of
_RECENT = 4  # so many
_SAMPLE = 4096  # weights are looked at,
_LEAST, _MOST = 8, 256  # of each tensor at least and at most so many


class _Watch:
    """What is known of the edits of one optimizer's weights."""

    def __init__(self) -> None:
        self.steps = 0
        self.at: Any = -1
        """The tuner's count of steps after the last one. Replays of a CUDA graph and compiled steps
        move the weights and are not seen here."""
        self.sample: Tensor | None = None
        """Some weights after the last step, if they are to be looked at before the next"""
        self.looks = [False] * _RECENT
        """Whether an edit was found, in the last looks"""
        self.answer: Tensor | None = None
        """Where it is written whether a look has found an edit"""
        self.copies: dict[Tensor, Tensor] | None = None
        """All weights after the last step, if edits are followed"""
        self.has_seen: Any = False
        """Whether an edit was found since copies were last thought about"""
        self.is_over = False
        """Whether no more is looked for: another optimizer moves the weights"""


_watches: WeakKeyDictionary[Mechanism, _Watch] = WeakKeyDictionary()


def follow(call: Call) -> None:
    """Before a step: have the displacements follow the edits since the last one."""
    if torch.compiler.is_compiling():
        return
    watch = _watches.get(call.mechanism)
    if watch is None or (watch.copies is None and watch.sample is None) or not _can_look(call):
        return
    if watch.copies is not None:
        _follow(call.optimizer, call.mechanism, watch)
        watch.copies = {}  # until the step is made: they are of no use if it is interrupted
        _forget_arrivals(call)
    elif watch.sample is not None:
        sample, watch.sample = watch.sample, None
        _look(call, watch, sample)


def note(call: Call) -> None:
    """After a step: note where the weights are."""
    if torch.compiler.is_compiling():
        return
    watch = _watches.get(call.mechanism)
    if watch is None:
        watch = _watches[call.mechanism] = _Watch()
    if watch.is_over:
        return
    watch.steps += 1
    is_due = watch.steps % _PERIOD == 0
    if (watch.copies is None and not is_due and watch.steps >= _FIRST) or not _can_look(call):
        return
    watch.at = call.mechanism.counts.read().steps.clone()
    if watch.copies is None:
        watch.sample = _take(call, watch.steps)
        return
    if is_due:
        has_seen, watch.has_seen = bool(watch.has_seen), False
        if not has_seen:
            watch.copies, watch.looks = None, [False] * _RECENT
            return
    _copy(call.optimizer, watch)


def settle(optimizer: Any, mechanism: Mechanism) -> None:
    """Before a checkpoint: have the displacements follow the edits until now."""
    watch = _watches.get(mechanism)
    if watch is not None and watch.copies:
        _follow(optimizer, mechanism, watch)
        _copy(optimizer, watch)


def resume(mechanism: Mechanism, *, are_followed: bool) -> None:
    """Begin anew with a checkpoint, whose displacements may follow edits."""
    _watches.pop(mechanism, None)
    if are_followed:
        watch = _watches[mechanism] = _Watch()
        watch.copies, watch.has_seen = {}, True


def are_followed(mechanism: Mechanism) -> bool:
    """Whether someone else was found to change the weights between steps."""
    watch = _watches.get(mechanism)
    return watch is not None and watch.copies is not None


def _can_look(call: Call) -> bool:
    """Whether numbers can be read. A base with modes moves the weights between steps by itself."""
    home = call.mechanism.home
    return not (
        home.type == "meta"
        or is_traced()
        or is_capturing(home)
        or call.optimizer.defaults.get("differentiable")
        or modes.has_modes(type(call.optimizer))
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _displaced(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The parameters that have a displacement, their local part, and that of the displacement."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            stored = optimizer.state.get(param, {}).get(DISPLACEMENT)
            if stored is not None and param.numel():
                found.append((param, vectors.real(here(param.detach())), here(stored)))
    return found


def _take(call: Call, offset: int) -> Tensor | None:
    """Some weights, which are others at another offset; None where no tensor can be looked at."""
    rows = _displaced(call.optimizer)
    many = min(max(_SAMPLE // max(len(rows), 1), _LEAST), _MOST)
    pieces = []
    for _, part, _ in rows:
        if part.device == call.mechanism.home and part.is_contiguous():
            stride = max(part.numel() // many, 1)
            size = min(many, part.numel() // stride)
            begin = part.storage_offset() + offset % stride
            pieces.append(part.as_strided((size,), (stride,), begin))
    return torch.cat(pieces) if pieces else None


def _look(call: Call, watch: _Watch, sample: Tensor) -> None:
    now = _take(call, watch.steps)
    if now is None or now.shape != sample.shape or now.dtype != sample.dtype:
        return
    is_other = ((now != sample) & ~now.isnan()).any()
    is_other &= call.mechanism.counts.read().steps == watch.at
    watch.looks = [*watch.looks[1:], _is_so(watch, is_other)]
    if sum(watch.looks) < _ENOUGH:
        return
    if _has_rival(call.optimizer):
        watch.is_over = True
        return
    # What was taken back until now is in Δ, no one knows where.
    with torch.no_grad():
        for _, _, stored in _displaced(call.optimizer):
            stored.zero_()
    watch.copies, watch.has_seen = {}, True
    _forget_arrivals(call)


def _has_rival(optimizer: Any) -> bool:
    """Whether another optimizer has some of the same parameters. One that wraps this one, or is a
    part of it, has the same groups."""
    groups = {id(group) for group in optimizer.param_groups}
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for other in gc.get_objects():
        if issubclass(type(other), Optimizer) and other is not optimizer:
            theirs = vars(other).get("param_groups") or []
            held = {id(param) for group in theirs for param in group["params"]}
            if held & params and not groups & set(map(id, theirs)):
                return True
    return False


def _is_so(watch: _Watch, found: Tensor) -> bool:
    """What was found. A GPU writes it to host memory when it gets there, so that no step waits, and
    what is read there may be what the look before has found."""
    if watch.answer is None:
        pinned = found.device.type == "cuda"
        watch.answer = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=pinned)
    watch.answer.copy_(found.to(torch.int64), non_blocking=True)
    return bool(ctypes.c_int64.from_address(watch.answer.data_ptr()).value)


def _copy(optimizer: Any, watch: _Watch) -> None:
    watch.copies = {param: part.clone() for param, part, _ in _displaced(optimizer)}


def _follow(optimizer: Any, mechanism: Mechanism, watch: _Watch) -> None:
    """Have the displacements follow what was done to the weights since the copies were made."""
    numbers, copies = mechanism.scalars.read(), watch.copies or {}
    length = numbers.scale * numbers.share
    is_known = (length > 0) & (mechanism.counts.read().steps == watch.at)
    per_step = torch.where(is_known, 1 / length, 0.0)
    found = []
    with torch.no_grad():
        for param, part, stored in _displaced(optimizer):
            copy = copies.get(param)
            if copy is None or (copy.shape, copy.device) != (part.shape, part.device):
                continue
            wide = vectors.working_dtype(part)
            edit = (part.to(wide) - copy.to(wide)).nan_to_num(0.0, 0.0, 0.0)
            found.append((edit != 0).any().to(mechanism.home))
            change = edit * per_step.to(edit)
            # A longer one takes no step back: it puts the weights somewhere else, once.
            is_far = change.norm() > FAR * stored.to(wide).norm()
            stored.add_(torch.where(is_far, 0.0, change))
    if found:
        watch.has_seen = watch.has_seen | torch.stack(found).any()


def _forget_arrivals(call: Call) -> None:
    """Have sums that were taken in the backward pass taken anew."""
    if call.mechanism.kernels.arrivals is not None:
        call.mechanism.kernels.arrivals.forget()
