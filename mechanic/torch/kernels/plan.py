"""Where the tensors of an optimizer lie, for the kernels to find them.

A plan is made once and holds as long as the tensors stay where they are. Gradients may move: their
addresses are a list apart.
"""

import functools
import math
import operator
from collections.abc import Collection
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels import passes
from mechanic.torch.kernels.known import ANY, Base, settings
from mechanic.torch.mechanism import DISPLACEMENT
from mechanic.torch.rates import Rate
from mechanic.torch.skipping import refuse_to_decide

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGE = 1 << 16  # from so many elements on, a gradient is summed up as it arrives

_EMPTY = 16  # the address of a gradient without elements: one that is not 0, and never read


class Kind(NamedTuple):
    """What the tensors of one launch have in common."""

    base: Base
    x: torch.dtype
    grad: torch.dtype
    delta: torch.dtype
    slots: torch.dtype
    is_aligned: bool
    is_large: bool


class Entry(NamedTuple):
    """A parameter and what belongs to it."""

    param: Tensor
    group: int
    state: dict[str, Any]
    kept: tuple[int, ...]
    """Where its displacement and the base's slots lie"""
    kind: Kind


class Section(NamedTuple):
    """The launch over all tensors of one kind: a range of the chunks."""

    kind: Kind
    first: int
    programs: int
    chunks: Tensor
    partials: Tensor


def make(optimizer: Optimizer, bases: list[Base] | None, *, arriving: bool) -> "Plan | None":
    """A plan for all parameters that have moved; None where one of them is not for the kernels.
    `bases` are the known bases of the groups, if they are; gradients may be summed up one by one
    when they are `arriving`."""
    bases = bases or [ANY] * len(optimizer.param_groups)
    if len({param.device for group in optimizer.param_groups for param in group["params"]}) != 1:
        return None
    entries = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if param.grad is None and DISPLACEMENT not in state:
                continue
            entry = _enter(param, index, bases[index], state, arriving=arriving)
            if entry is None:
                return None
            entries.append(entry)
    where = {e.state["step"].device for e in entries if e.kind.base.has_steps}
    if len(where) > 1 or not sum(e.param.numel() for e in entries):
        return None
    return Plan(optimizer, bases, entries)


def _enter(
    param: Tensor, group: int, base: Base, state: dict[str, Any], *, arriving: bool
) -> Entry | None:
    grad = param if param.grad is None else param.grad
    names = (DISPLACEMENT, *base.slots)
    kept = tuple(state[name] for name in names if isinstance(state.get(name), Tensor))
    step = state.get("step") if base.has_steps else None
    if len(kept) < len(names) or (base.has_steps and not isinstance(step, Tensor)):
        return None
    tensors = (param, grad, *kept)
    slots = {slot.dtype for slot in kept[1:]} or {torch.float32}
    if (
        any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or any(tensor.dtype not in _TYPES or tensor.is_sparse for tensor in tensors)
        or any(tensor.device != param.device for tensor in tensors)
        or any(tensor.shape != param.shape for tensor in tensors)
        or not _lie_alike(tensors)
        or len(slots) > 1
        or (step is not None and step.dtype != torch.float32)
    ):
        return None
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    is_large = arriving and param.numel() >= _LARGE
    kind = Kind(base, param.dtype, grad.dtype, kept[0].dtype, slots.pop(), is_aligned, is_large)
    return Entry(param, group, state, tuple(map(Tensor.data_ptr, kept)), kind)


def _lie_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether tensors have their elements in the same order, one after the other."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    expected = 1
    dims = sorted(zip(tensors[0].stride(), tensors[0].shape, strict=True))
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return all(tensor.stride() == tensors[0].stride() for tensor in tensors)


def upload(
    numbers: Any, dtype: torch.dtype, device: torch.device, keep: list[Any] | None = None
) -> Tensor:
    """Numbers on the device, without waiting. A CUDA graph copies them again at each replay: while
    one is captured, they are put into `keep`."""
    pinned = device.type == "cuda"
    values = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned)
    if keep is not None:
        keep.append(values)
    return values.to(device, non_blocking=True, copy=True)


class Plan:
    """The tables that the kernels read, and the memory that they write to, on the device."""

    def __init__(self, optimizer: Optimizer, bases: list[Base], entries: list[Entry]) -> None:
        self.bases, self.is_known = bases, bases[0] is not ANY
        self.entries = sorted(entries, key=lambda entry: repr(entry.kind))
        self.params = [entry.param for entry in self.entries]
        self.places = {param: place for place, param in enumerate(self.params)}
        self.device = self.params[0].device
        own = set(map(id, self.params))
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._unseen = [p for params in self._params for p in params if id(p) not in own]
        self._states = [entry.state for entry in self.entries]
        self._all_states = list(optimizer.state.values())
        self._deltas_at = [entry.kept[0] for entry in self.entries]
        self._params_at = list(map(Tensor.data_ptr, self.params))
        self._slots: list[tuple[Any, list[dict[str, Any]], list[int]]] = []
        self._strides = [None if p.is_contiguous() else p.stride() for p in self.params]
        self._grad_types = [entry.kind.grad for entry in self.entries]
        self._is_simple = not any(self._strides) and all(e.kind.is_aligned for e in self.entries)
        self._groups = {entry.group for entry in self.entries}
        self.half = {e.group for e in self.entries if e.kind.x == torch.float16}
        has_steps = bases[0].has_steps
        self.steps = [state["step"] for state in self._states] if has_steps else []
        self.has_steps_here = has_steps and self.steps[0].device == self.device
        for base in dict.fromkeys(entry.kind.base for entry in self.entries):
            own_states = [e.state for e in self.entries if e.kind.base == base]
            for name in (*base.slots, *(["step"] if base.has_steps else [])):
                read = operator.itemgetter(name)
                at = [read(state).data_ptr() for state in own_states]
                self._slots.append((read, own_states, at))
        self._lay_out()
        groups = len(optimizer.param_groups)
        empty = torch.zeros((), device=self.device)
        is_cuda = self.device.type == "cuda"
        self.made = empty.new_zeros(groups, passes.MADE.value)
        self.rates = empty.new_zeros(groups)
        self.effective_lrs = list(self.rates.unbind())
        self.verdict = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.biases = empty.new_ones(len(self.entries), 2)
        self.no, self.yes = upload([0, 1], torch.int32, self.device).unbind()
        self._max_norm: tuple[float, Tensor | None] = (math.inf, None)
        self._grads: tuple[list[int], Tensor | None] = ([], None)
        self._typed: tuple[list[list[float]], Tensor | None] = ([], None)
        self._has_tensor_lr = False
        self._signs: list[tuple[bool, float]] = []
        self._answer = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=is_cuda)
        self._asked = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.compiled: dict[Any, Any] = {}
        self._alones: dict[int, Section] = {}
        self._forget_arrivals()
        self._is_fresh = False
        """Whether the gradients of this step were all seen when they arrived"""

    def _lay_out(self) -> None:
        self.chunk, self.parts = passes.CHUNK, passes.CHUNK // passes.BLOCK
        sizes = [param.numel() for param in self.params]
        chunks = [-(-size // self.chunk) for size in sizes]
        first = [0, *accumulate(chunks)]
        self.total = first[-1]
        self.ranges = list(pairwise(first))
        self._mirrored: list[float] = []
        self._mirror = torch.zeros(len(sizes), device=self.device)
        self.copy_sizes = dict.fromkeys((entry.kind.x for entry in self.entries), 0)
        rows: list[list[int]] = []
        for entry, size in zip(self.entries, sizes, strict=True):
            kept = [*entry.kept, *[0] * (3 - len(entry.kept))]
            step = self._mirror.data_ptr() + 4 * len(rows)
            if self.has_steps_here:
                step = entry.state["step"].data_ptr()
            place = self.copy_sizes[entry.kind.x]
            self.copy_sizes[entry.kind.x] = place + -(-size // 16) * 16
            rows.append([entry.param.data_ptr(), *kept, step, size, entry.group, place])
        self.table = upload(rows, torch.int64, self.device)
        rows = [[tensor, own] for tensor, count in enumerate(chunks) for own in range(count)]
        self.chunks = upload(rows, torch.int32, self.device)
        self.partials = torch.zeros(passes.SUMS * self.total, device=self.device)
        self.sections = self._cut([entry.kind._replace(is_large=False) for entry in self.entries])
        self._sums = self._cut([entry.kind for entry in self.entries])

    def _cut(self, kinds: list[Kind]) -> list[Section]:
        """The sections of tensors of one kind, which follow one another."""
        sections = []
        for kind in dict.fromkeys(kinds):
            own = [place for place, other in enumerate(kinds) if other == kind]
            begin, end = self.ranges[own[0]][0], self.ranges[own[-1]][1]
            if end > begin:
                tables = self.chunks[begin:], self.partials[begin:]
                sections.append(Section(kind, begin, end - begin, *tables))
        return sections

    def find_grads(self, optimizer: Optimizer) -> list[int] | None:
        """The address of each gradient, 0 where there is none; None if the plan does not hold any
        more, as far as sums go. Asked before anything is launched, it is made to be fast."""
        groups = optimizer.param_groups
        if not all(
            _are_same(g["params"], own) for g, own in zip(groups, self._params, strict=True)
        ):
            return None
        if self._arrivals:
            self._is_fresh = self._has_arrived()
            if self._is_fresh:
                return list(self._arrived_at)
        self._is_fresh = False
        if not _lie_at(self._deltas_at, _read_displacement, self._states):
            return None
        if any(param.grad is not None for param in self._unseen):
            return None
        grads: list[Any] = [param.grad for param in self.params]
        if self._is_simple and set(map(type, grads)) == {Tensor}:
            found = list(map(Tensor.data_ptr, grads))
            if (
                [grad.dtype for grad in grads] == self._grad_types
                and {grad.layout for grad in grads} == {torch.strided}
                and all(map(Tensor.is_contiguous, grads))
                and functools.reduce(operator.or_, found) % 16 == 0
                and 0 not in found
            ):
                return found
        addresses = []
        for grad, entry, strides in zip(grads, self.entries, self._strides, strict=True):
            address = 0 if grad is None else _address(grad, entry.kind, strides)
            if address is None:
                return None
            addresses.append(address)
        return addresses

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether everything else is where it was."""
        if list(map(Tensor.data_ptr, self.params)) != self._params_at:
            return False
        return self._is_fresh or (
            _are_same(optimizer.state.values(), self._all_states)
            and all(_lie_at(at, read, states) for read, states, at in self._slots)
        )

    def place_grads(self, addresses: list[int], keep: list[Any] | None) -> Tensor:
        """The list of the gradients' addresses, on the device."""
        own, placed = self._grads
        if placed is None or own != addresses or keep is not None:
            placed = upload(addresses, torch.int64, self.device, keep)
            if keep is None:
                self._grads = (addresses, placed)
        return placed

    def type_in(
        self, optimizer: Any, rates: list[Rate], addresses: list[int], keep: list[Any] | None
    ) -> Tensor:
        """The table of the groups' settings, on the device."""
        present = self._groups
        if 0 in addresses:
            present = {e.group for e, at in zip(self.entries, addresses, strict=True) if at}
        rows: list[list[float]] = []
        tensors: list[tuple[int, Tensor, Any]] = []
        for index, group in enumerate(optimizer.param_groups):
            lr, (_, base_lr, unit) = group.get("lr", 1.0), rates[index]
            if isinstance(lr, Tensor):
                tensors.append((index, lr, unit))
                lr = unit = 0.0
            a, b, eps, decay = own = settings(optimizer, self.bases[index], group)
            sign = -1.0 if group.get("maximize") else 1.0
            base_lr = 1.0 if base_lr is None or isinstance(base_lr, Tensor) else base_lr
            numbers = [lr, unit, sign, index in present, a, b, eps, decay, *own.logs, base_lr]
            rows.append([float(number) for number in numbers])
        self._has_tensor_lr = bool(tensors)
        had, placed = self._typed
        if placed is None or had != rows or keep is not None:
            placed = upload(rows, torch.float64, self.device, keep)
            if keep is None:
                self._typed = (rows, placed)
        for index, lr, unit in tensors:
            row = placed[index]
            row[passes.LR.value].copy_(lr.reshape(()), non_blocking=True)
            row[passes.UNIT.value].copy_(unit, non_blocking=True)
        return placed

    def max_norm(self, value: float) -> Tensor | None:
        """A number on the device, None for no limit."""
        if value != self._max_norm[0]:
            self._max_norm = (value, upload(value, torch.float64, self.device))
        return self._max_norm[1]

    def arrived(self, param: Tensor) -> tuple[Section, int, Tensor] | None:
        """Note that the gradient of a parameter has arrived, where everything else of it is where
        it was. Gives its own section, its address and the table of the groups, to sum it up; None
        where that is left to the step."""
        place, grad, groups = self.places.get(param), param.grad, self._typed[1]
        if place is None or grad is None or groups is None or self._has_tensor_lr:
            return None
        _, _, state, kept, kind = self.entries[place]
        address = _address(grad, kind, self._strides[place])
        if address is None or not _lies_at(kept, state, (DISPLACEMENT, *kind.base.slots)):
            return None
        if self._arrivals == 0:
            self._signs = _signs(self._typed[0])
        self._arrived_at[place], self._versions[place] = address, grad._version
        self._arrivals += 1
        if self._arrivals % len(self.entries) == 0:
            self.place_grads(list(self._arrived_at), None)  # for the step, which it would hold up
        return (self._alone(place), address, groups) if kind.is_large else None

    def _forget_arrivals(self) -> None:
        self._arrivals = 0
        """How many gradients have arrived since the last step, those that did again counted too"""
        self._arrived_at = [0] * len(self.entries)
        self._versions = [-1] * len(self.entries)

    def _has_arrived(self) -> bool:
        """Whether all gradients are those that arrived: not clipped or unscaled since."""
        if self._arrivals < len(self.entries):
            return False
        grads: list[Any] = [param.grad for param in self.params]
        return (
            set(map(type, grads)) == {Tensor}
            and list(map(Tensor.data_ptr, grads)) == self._arrived_at
            and [grad._version for grad in grads] == self._versions
        )

    def _alone(self, place: int) -> Section:
        if place not in self._alones:
            begin, end = self.ranges[place]
            tables = self.chunks[begin:], self.partials[begin:]
            self._alones[place] = Section(self.entries[place].kind, begin, end - begin, *tables)
        return self._alones[place]

    def take_unsummed(self) -> list[Section]:
        """The sections that were not summed up as their gradients arrived."""
        arrived = self._is_fresh and _signs(self._typed[0]) == self._signs
        arrived = arrived and not self._has_tensor_lr
        self._forget_arrivals()
        return [section for section in self._sums if not (arrived and section.kind.is_large)]

    def on_device(self) -> Any:
        """Launch on the plan's device."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def ask(self, question: Tensor) -> None:
        """Have the device answer a question of yes or no; what is launched later is not waited
        for."""
        refuse_to_decide(question)
        self._answer.copy_(question, non_blocking=True)
        if self._asked is not None:
            self._asked.record()

    def wait_for_answer(self) -> bool:
        """The answer to the question, when the device has come to it."""
        if self._asked is not None:
            self._asked.synchronize()
        return bool(self._answer)

    def mirror_steps(self) -> None:
        """Where a base counts its steps on the host: bring the device's to the same."""
        steps = [float(step) for step in self.steps]
        if steps != self._mirrored:
            self._mirror.copy_(upload(steps, torch.float32, self.device))
            self._mirrored = steps

    def count_steps(self, addresses: list[int]) -> None:
        """Count a step where a base counts on the host; the device has done so already."""
        moved = [step for step, at in zip(self.steps, addresses, strict=True) if at]
        torch._foreach_add_(moved, 1.0)
        self._mirrored = [
            count + (at != 0) for count, at in zip(self._mirrored, addresses, strict=True)
        ]


def _address(grad: Tensor, kind: Kind, strides: tuple[int, ...] | None) -> int | None:
    """Where a gradient lies, if it lies as its parameter does; `strides` are those of one that is
    not contiguous."""
    if type(grad) is not Tensor or grad.dtype != kind.grad or grad.is_sparse:
        return None
    if not grad.is_contiguous() if strides is None else grad.stride() != strides:
        return None
    address = grad.data_ptr()
    return None if kind.is_aligned and address % 16 else address or _EMPTY


_read_displacement = operator.itemgetter(DISPLACEMENT)


def _lie_at(addresses: list[int], read: Any, states: list[dict[str, Any]]) -> bool:
    try:
        return list(map(Tensor.data_ptr, map(read, states))) == addresses
    except (KeyError, TypeError):  # it is no longer there, or no longer a tensor
        return False


def _lies_at(addresses: tuple[int, ...], state: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(
        _lie_at([at], operator.itemgetter(n), [state])
        for at, n in zip(addresses, names, strict=True)
    )


def _signs(rows: list[list[float]]) -> list[tuple[bool, float]]:
    """What of the groups' settings goes into the sums."""
    return [(row[passes.LR.value] != 0, row[passes.SIGN.value]) for row in rows]


def _are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
