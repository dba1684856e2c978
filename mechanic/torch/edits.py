"""Weights that someone else changes between steps: a mask, a clamp, a norm that is put back.

Δ would hold what such an edit takes back, and the scale would grow along a direction in which the
weights do not move. So some weights are looked at between steps: in all of the first, and now and
then; where an edit is found, in all that follow for a while. When another one is found meanwhile,
all weights are compared with a copy from then on, and Δ follows the edits, until none is seen for
as long. A single edit, such as an EMA that is put in, changes no Δ, and no copy is made. Nor is it
where another optimizer moves the same weights: its steps are for a loss of its own.
"""

import ctypes
from typing import Any, ClassVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mechanic.advance import FAR
from mechanic.torch import modes, vectors
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing, is_traced
from mechanic.torch.kernels.host import Question
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.sharding import here
from mechanic.torch.vectors import DISPLACEMENT

_ATTENTION = 256  # so many steps are looked at in the beginning and after an edit; of the others
_PERIOD = 32  # one in so many
_ENOUGH = 2  # edits without so many steps between them
_SAMPLE = 4096  # weights are looked at,
_TENSORS = 64  # of so many tensors, others in each look: more would cost a step of a GPU its time,
_MOST = 256  # and so many of each at most
_ROUNDING = 4.0  # units in the last place: what is added and taken off again is no edit


class _Watch:
    """What is known of the edits of one optimizer's weights."""

    def __init__(self) -> None:
        self.steps = 0
        self.at: Any = -1
        """The tuner's count of steps after the last one. Replays of a CUDA graph and compiled steps
        move the weights and are not seen here."""
        self.until = _ATTENTION
        """All steps before this one are looked at"""
        self.found = 0
        """The edits that were found since that began"""
        self.has_found = False
        """Whether one was ever found"""
        self.sample: Tensor | None = None
        """Some weights after the last step, if they are to be looked at before the next"""
        self.answer: Any = None
        """Where it is written whether a look has found an edit"""
        self.others: _Others | None = None
        """Who else moves the weights, once an edit was found"""
        self.copies: dict[Tensor, Tensor] | None = None
        """All weights after the last step, if edits are followed"""
        self.has_seen: Any = False
        """Whether the copies have shown an edit, since that was last asked"""
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
        _forget_arrivals(call)
    else:
        _look(call, watch)


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
    is_due, is_attentive = watch.steps % _PERIOD == 0, watch.steps < watch.until
    if (watch.copies is None and not (is_due or is_attentive)) or not _can_look(call):
        return
    watch.at = call.mechanism.counts.read().steps.clone()
    if watch.copies is not None and is_due:
        has_seen, watch.has_seen = bool(watch.has_seen), False
        if has_seen:
            watch.until = watch.steps + _ATTENTION
        elif not is_attentive:
            watch.copies = None
    if watch.copies is not None:
        _copy(call.optimizer, watch)
        return
    if not is_attentive:
        watch.found = 0
        _listen_no_more(watch)
    watch.sample = _take(call, watch.steps)


def settle(optimizer: Any, mechanism: Mechanism) -> None:
    """Between two steps: have the displacements follow the edits until now, for who reads them."""
    watch = _watches.get(mechanism)
    if watch is not None and watch.copies:
        _follow(optimizer, mechanism, watch)
        _copy(optimizer, watch)


def resume(mechanism: Mechanism, *, are_followed: bool) -> None:
    """Begin anew with a checkpoint, whose displacements may follow edits."""
    _listen_no_more(_watches.pop(mechanism, _Watch()))
    if are_followed:
        watch = _watches[mechanism] = _Watch()
        watch.copies = {}


def are_followed(mechanism: Mechanism) -> bool:
    """Whether someone else was found to change the weights between steps."""
    watch = _watches.get(mechanism)
    return watch is not None and watch.copies is not None


def were_found(mechanism: Mechanism) -> bool:
    """Whether an edit was ever found, where looks could be taken."""
    watch = _watches.get(mechanism)
    return watch is not None and watch.has_found and not watch.is_over


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


def _displaced(optimizer: Any) -> list[Tensor]:
    """The parameters that have a displacement."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if DISPLACEMENT in optimizer.state.get(param, {}) and param.numel()
    ]


def _own_part(param: Tensor) -> Tensor:
    """The part of a parameter that this process holds, as real numbers."""
    return vectors.real(here(param.detach()))


def _take(call: Call, step: int) -> Tensor | None:
    """Some weights, which are others in each look; None where there are none."""
    params = [param for param in _displaced(call.optimizer) if param.device.type != "meta"]
    any_number = (step * 2654435761) >> 9  # one that goes up with the step may miss every second
    if len(params) > _TENSORS:
        first = any_number % len(params)
        params = (params[first:] + params[:first])[:_TENSORS]
    many = min(_SAMPLE // max(len(params), 1), _MOST)
    pieces = []
    for flat in map(_in_memory_order, map(_own_part, params)):
        stride = max(flat.numel() // many, 1)
        size = min(many, flat.numel() // stride)
        begin = flat.storage_offset() + any_number % stride
        pieces.append(flat.as_strided((size,), (stride,), begin).to(call.mechanism.home))
    return torch.cat(pieces) if pieces else None


def _in_memory_order(part: Tensor) -> Tensor:
    """A tensor whose dimensions are ordered as they lie in memory, contiguous."""
    if part.is_contiguous():
        return part
    return part.permute(sorted(range(part.dim()), key=part.stride, reverse=True)).contiguous()


def _look(call: Call, watch: _Watch) -> None:
    now, sample, watch.sample = _take(call, watch.steps), watch.sample, None
    if now is None or sample is None or now.shape != sample.shape or now.dtype != sample.dtype:
        return
    is_other = _are_other(now, sample).any() & (call.mechanism.counts.read().steps == watch.at)
    if _is_so(watch, is_other):
        watch.found, watch.until = watch.found + 1, watch.steps + _ATTENTION
        watch.has_found = True
    watch.is_over = watch.others is not None and watch.others.have_stepped
    is_followed = not watch.is_over and watch.found >= _ENOUGH
    if watch.is_over or is_followed:
        _listen_no_more(watch)
    elif watch.found and watch.others is None:
        watch.others = _Others(call.optimizer)
    if is_followed:
        # What was taken back until now is in Δ, no one knows where.
        with torch.no_grad():
            for param in _displaced(call.optimizer):
                here(call.optimizer.state[param][DISPLACEMENT]).zero_()
        watch.copies, watch.found = {}, 0
        _forget_arrivals(call)


def _are_other(now: Tensor, before: Tensor) -> Tensor:
    """Which weights were changed; none that is NaN or infinite."""
    sizes = before.nan_to_num(0.0, 0.0, 0.0).abs()
    least = _ROUNDING * torch.finfo(now.dtype).eps * (sizes + sizes.mean())
    return (now - before).abs().nan_to_num(0.0, 0.0, 0.0) > least


def _is_so(watch: _Watch, found: Tensor) -> bool:
    """What was found; on a GPU, what the look before has found, so that no step waits."""
    if found.device.type == "cuda":
        if watch.answer is None:
            watch.answer = Question(found.device)
            last = False
        else:
            last = watch.answer.wait()
        watch.answer.ask(found)
        return last
    if watch.answer is None:
        watch.answer = torch.zeros((), dtype=torch.int64)
    watch.answer.copy_(found)
    return bool(ctypes.c_int64.from_address(watch.answer.data_ptr()).value)


class _Others:
    """Listens to the steps of other optimizers, and knows whether one has moved the same weights.
    One that wraps this one moves them in a step of this one."""

    _all: ClassVar[list["_Others"]] = []
    _own: ReferenceType[Any]

    def __init__(self, optimizer: Any) -> None:
        for one in [one for one in self._all if one._own() is None]:
            one.stop()
        self._all.append(self)
        self.have_stepped = False
        self._own = ref(optimizer)
        self._groups = {id(group) for group in optimizer.param_groups}
        self._params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._own_steps = 0
        self._begun: dict[int, int] = {}
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    def _begin(self, other: Optimizer, *_: Any) -> None:
        if self._own() is not None:
            self._begun[id(other)] = self._own_steps

    def _end(self, other: Optimizer, *_: Any) -> None:
        found = vars(other).get("param_groups") or []
        groups = [group for group in found if isinstance(group, dict)]
        if any(id(group) in self._groups for group in groups):  # it is the whole of this part
            self._own_steps += 1
        elif self._begun.pop(id(other), None) == self._own_steps:
            held = (id(param) for group in groups for param in group.get("params", ()))
            self.have_stepped = self.have_stepped or any(one in self._params for one in held)

    def stop(self) -> None:
        """Listen no more. It is called within a step: while hooks run, none can be taken off."""
        self._all.remove(self)
        for handle in self._handles:
            handle.remove()


def _listen_no_more(watch: _Watch) -> None:
    if watch.others is not None:
        watch.others.stop()
        watch.others = None


def _copy(optimizer: Any, watch: _Watch) -> None:
    watch.copies = {param: _own_part(param).clone() for param in _displaced(optimizer)}


def _follow(optimizer: Any, mechanism: Mechanism, watch: _Watch) -> None:
    """Have the displacements follow what was done to the weights since the copies were made. These
    are gone then: after an interrupt no edit is followed twice."""
    copies, watch.copies = watch.copies or {}, {}
    numbers = mechanism.scalars.read()
    length = numbers.scale * numbers.share
    is_known = (length > 0) & (mechanism.counts.read().steps == watch.at)
    per_step = torch.where(is_known, 1 / length, 0.0)
    found = []
    with torch.no_grad():
        for param in _displaced(optimizer):
            part, stored = _own_part(param), here(optimizer.state[param][DISPLACEMENT])
            copy = copies.get(param)
            if copy is None or (copy.shape, copy.device) != (part.shape, part.device):
                continue
            wide = vectors.working_dtype(part)
            found.append(_are_other(part, copy.to(part)).any().to(mechanism.home))
            edit = (part.to(wide) - copy.to(wide)).nan_to_num(0.0, 0.0, 0.0)
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
