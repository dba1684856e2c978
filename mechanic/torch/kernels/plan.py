"""Where the tensors of an optimizer lie, for the kernels to find them.

A plan is made once and holds as long as the tensors stay where they are. Gradients may move: their
addresses are a list apart.
"""

import functools
import math
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels import passes
from mechanic.torch.kernels.known import ANY, Base, settings
from mechanic.torch.mechanism import DISPLACEMENT
from mechanic.torch.rates import Rate, proportional_lr
from mechanic.torch.skipping import refuse_to_decide

if TYPE_CHECKING:
    from mechanic.torch.kernels.arrivals import Arrivals

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGE = 1 << 16  # from so many elements on, a gradient is summed up as it arrives

EMPTY = 16  # the address of a gradient without elements: one that is not 0, and never read


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
        self._sizes = list(map(Tensor.numel, self.params))
        self._layouts = list(map(Tensor.stride, self.params))
        self._index = self.params[0].get_device()
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
        empty = torch.zeros((), dtype=torch.float32, device=self.device)
        is_cuda = self.device.type == "cuda"
        self.made = empty.new_zeros(groups, passes.MADE.value)
        self.rates = empty.new_zeros(groups)
        self.effective_lrs = list(self.rates.unbind())
        self.verdict = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.biases = empty.new_ones(len(self.entries), 2)
        self.no, self.yes = upload([0, 1], torch.int32, self.device).unbind()
        self._max_norm: tuple[float, Tensor | None] = (math.inf, None)
        self._grads: tuple[list[int], Tensor | None] = ([], None)
        self.typed: tuple[list[list[float]], Tensor | None] = ([], None)
        """The groups' settings, and the table of them"""
        self.has_tensor_lr = False
        self._answer = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=is_cuda)
        self._asked = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.compiled: dict[Any, Any] = {}

    def _lay_out(self) -> None:
        self.chunk, self.parts = passes.CHUNK, passes.CHUNK // passes.BLOCK
        chunks = [-(-size // self.chunk) for size in self._sizes]
        first = [0, *accumulate(chunks)]
        self.total = first[-1]
        self.ranges = list(pairwise(first))
        self._mirrored: list[float] = []
        self._mirror = torch.zeros(len(chunks), dtype=torch.float32, device=self.device)
        self.copy_sizes = dict.fromkeys((entry.kind.x for entry in self.entries), 0)
        self._in_copy: list[int] = []
        """Where each parameter begins in the copy of those of its dtype"""
        rows: list[list[int]] = []
        for entry, size in zip(self.entries, self._sizes, strict=True):
            kept = [*entry.kept, *[0] * (3 - len(entry.kept))]
            step = self._mirror.data_ptr() + 4 * len(rows)
            if self.has_steps_here:
                step = entry.state["step"].data_ptr()
            place = self.copy_sizes[entry.kind.x]
            self._in_copy.append(place)
            self.copy_sizes[entry.kind.x] = place + -(-size // 16) * 16
            rows.append([entry.param.data_ptr(), *kept, step, size, entry.group, place])
        self.table = upload(rows, torch.int64, self.device)
        rows = [[tensor, own] for tensor, count in enumerate(chunks) for own in range(count)]
        self.chunks = upload(rows, torch.int32, self.device)
        size = passes.SUMS * self.total
        self.partials = torch.zeros(size, dtype=torch.float64, device=self.device)
        self.sections = self._cut([entry.kind._replace(is_large=False) for entry in self.entries])
        self.sums = self._cut([entry.kind for entry in self.entries])

    def _cut(self, kinds: list[Kind]) -> list[Section]:
        """The sections of tensors of one kind, which follow one another."""
        sections = []
        for kind in dict.fromkeys(kinds):
            own = [place for place, other in enumerate(kinds) if other == kind]
            begin, end = self.ranges[own[0]][0], self.ranges[own[-1]][1]
            if end > begin:
                sections.append(self.section(kind, begin, end))
        return sections

    def section(self, kind: Kind, begin: int, end: int) -> Section:
        """The launch over a range of the chunks."""
        return Section(kind, begin, end - begin, self.chunks[begin:], self.partials[begin:])

    def find_grads(
        self, optimizer: Optimizer, arrivals: "Arrivals | None"
    ) -> tuple[list[int] | None, bool]:
        """The address of each gradient, 0 where there is none; None if the plan does not hold any
        more, as far as sums go. And whether they are what has arrived. Asked before anything is
        launched, it is made to be fast."""
        groups = optimizer.param_groups
        if not all(
            _are_same(g["params"], own) for g, own in zip(groups, self._params, strict=True)
        ):
            return None, False
        if any(param.grad is not None for param in self._unseen):
            return None, False
        if list(map(Tensor.numel, self.params)) != self._sizes:
            return None, False
        if not _lie_at(self._deltas_at, _read_displacement, self._states):
            return None, False
        grads: list[Any] = [param.grad for param in self.params]
        if arrivals is not None:
            found = arrivals.addresses(grads)
            if found is not None:
                return found, True
        return self._find(grads), False

    def _find(self, grads: list[Any]) -> list[int] | None:
        if self._is_simple and set(map(type, grads)) == {Tensor}:
            found = list(map(Tensor.data_ptr, grads))
            if (
                [grad.dtype for grad in grads] == self._grad_types
                and {grad.layout for grad in grads} == {torch.strided}
                and set(map(Tensor.get_device, grads)) == {self._index}
                and all(map(Tensor.is_contiguous, grads))
                and not any(map(Tensor.is_neg, grads))
                and functools.reduce(operator.or_, found) % 16 == 0
                and 0 not in found
            ):
                return found
        addresses = []
        for place, grad in enumerate(grads):
            address = 0 if grad is None else self.address_of(place, grad)
            if address is None:
                return None
            addresses.append(address)
        return addresses

    def address_of(self, place: int, grad: Tensor) -> int | None:
        """Where a gradient lies, if it lies as its parameter does."""
        kind, strides = self.entries[place].kind, self._strides[place]
        if type(grad) is not Tensor or grad.dtype != kind.grad or grad.is_sparse or grad.is_neg():
            return None
        if grad.get_device() != self._index or grad.numel() != self._sizes[place]:
            return None
        if not grad.is_contiguous() if strides is None else grad.stride() != strides:
            return None
        address = grad.data_ptr()
        return None if kind.is_aligned and address % 16 else address or EMPTY

    def has_in_place(self, place: int) -> bool:
        """Whether a parameter and its displacement are where they were."""
        at, state = [self._deltas_at[place]], [self._states[place]]
        is_there = self.params[place].data_ptr() == self._params_at[place]
        return is_there and _lie_at(at, _read_displacement, state)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether everything else is where it was."""
        if list(map(Tensor.data_ptr, self.params)) != self._params_at:
            return False
        if list(map(Tensor.stride, self.params)) != self._layouts:
            return False
        own = optimizer.state
        return (
            _are_same(own.values(), self._all_states)
            or all(own.get(entry.param) is entry.state for entry in self.entries)
        ) and all(_lie_at(at, read, states) for read, states, at in self._slots)

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
            if base_lr is None or isinstance(base_lr, Tensor):
                base_lr = proportional_lr(half=index in self.half)  # of a known base
            numbers = [lr, unit, sign, index in present, a, b, eps, decay, *own.logs, base_lr]
            rows.append([float(number) for number in numbers])
        self.has_tensor_lr = bool(tensors)
        had, placed = self.typed
        if placed is None or had != rows or keep is not None:
            placed = upload(rows, torch.float64, self.device, keep)
            if keep is None:
                self.typed = (rows, placed)
        for index, lr, unit in tensors:
            row = placed[index]
            row[passes.LR.value].copy_(lr.reshape(()), non_blocking=True)
            row[passes.UNIT.value].copy_(unit, non_blocking=True)
        return placed

    def max_norm(self, value: float, keep: list[Any] | None) -> Tensor | None:
        """A number on the device, None for no limit."""
        if value != self._max_norm[0]:
            self._max_norm = (value, upload(value, torch.float64, self.device, keep))
        return self._max_norm[1]

    def on_device(self) -> Any:
        """Launch on the plan's device."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Around a base that may give a parameter other memory: what it put there is brought to
        where the kernels look."""
        held = [param.data for param in self.params]
        yield
        for param, own, at in zip(self.params, held, self._params_at, strict=True):
            if param.data_ptr() != at:
                own.copy_(param.data)
                param.data = own

    def put_back(self, copies: dict[torch.dtype, Tensor]) -> None:
        """Bring the parameters to where they were when they were copied."""
        for param, begin in zip(self.params, self._in_copy, strict=True):
            before = copies[param.dtype].as_strided(param.shape, param.stride(), begin)
            param.data.copy_(before)

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


_read_displacement = operator.itemgetter(DISPLACEMENT)


def _lie_at(addresses: list[int], read: Any, states: list[dict[str, Any]]) -> bool:
    try:
        return list(map(Tensor.data_ptr, map(read, states))) == addresses
    except (KeyError, TypeError):  # it is no longer there, or no longer a tensor
        return False


def _are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
