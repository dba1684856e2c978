"""Where the tensors of an optimizer lie, for the kernels to find them.

A plan is made once and holds as long as the tensors stay where they are. Gradients may move: their
addresses are a list apart.
"""

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels import passes
from mechanic.torch.kernels.known import ANY, Base, settings
from mechanic.torch.mechanism import DISPLACEMENT
from mechanic.torch.rates import Rate

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
    kept: tuple[Tensor, ...]
    """Its displacement and the base's slots"""
    step: Tensor | None
    kind: Kind


class Section(NamedTuple):
    """The launch over all tensors of one kind: a range of the chunks."""

    kind: Kind
    programs: int
    chunks: Tensor
    partials: Tensor


def make(optimizer: Optimizer, bases: list[Base] | None) -> "Plan | None":
    """A plan for all parameters that have moved; None where one of them is not for the kernels.
    `bases` are the known bases of the groups, if they are."""
    bases = bases or [ANY] * len(optimizer.param_groups)
    entries = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if param.grad is None and DISPLACEMENT not in state:
                continue
            entry = _enter(param, index, bases[index], state)
            if entry is None:
                return None
            entries.append(entry)
    devices = {entry.param.device for entry in entries}
    where = {entry.step.device for entry in entries if entry.step is not None}
    if len(devices) != 1 or len(where) > 1 or not sum(e.param.numel() for e in entries):
        return None
    return Plan(optimizer, bases, entries)


def _enter(param: Tensor, group: int, base: Base, state: dict[str, Any]) -> Entry | None:
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
    is_large = param.numel() >= _LARGE
    kind = Kind(base, param.dtype, grad.dtype, kept[0].dtype, slots.pop(), is_aligned, is_large)
    return Entry(param, group, state, kept, step, kind)


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


def upload(values: Tensor, device: torch.device, keep: list[Any] | None = None) -> Tensor:
    """Numbers on the device, without waiting. A CUDA graph copies them again at each replay: while
    one is captured, they are put into `keep`."""
    if keep is not None:
        keep.append(values)
    elif device.type == "cuda":
        values = values.pin_memory()
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
        everything = _parameters(optimizer)
        self._ids = list(map(id, everything))
        self._unseen = [param for param in everything if id(param) not in own]
        self._fixed = [t for entry in self.entries for t in (entry.param, *entry.kept)]
        self._at = list(map(Tensor.data_ptr, self._fixed))
        self._strides = [None if p.is_contiguous() else p.stride() for p in self.params]
        self.steps = [entry.step for entry in self.entries if entry.step is not None]
        self.has_steps_here = bool(self.steps) and self.steps[0].device == self.device
        self._lay_out()
        groups = len(optimizer.param_groups)
        empty = torch.zeros((), device=self.device)
        self.made = empty.new_zeros(groups, passes.MADE.value)
        self.rates = empty.new_zeros(groups)
        self.effective_lrs = list(self.rates.unbind())
        self.verdict = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.biases = empty.new_ones(len(self.entries), 2)
        self.no, self.yes = upload(torch.tensor([0, 1], dtype=torch.int32), self.device).unbind()
        self._max_norm: tuple[float, Tensor | None] = (math.inf, None)
        self._grads: tuple[list[int], Tensor | None] = ([], None)
        self._typed: tuple[list[list[float]], Tensor | None] = ([], None)
        self._has_tensor_lr = False
        self._signs: list[tuple[bool, float]] = []
        self._summed: dict[int, tuple[int, int]] = {}
        """The gradients that were summed up as they arrived: place, address and version"""

    def _lay_out(self) -> None:
        sizes = [param.numel() for param in self.params]
        chunks = [-(-size // passes.CHUNK) for size in sizes]
        first = [0, *accumulate(chunks)]
        self.total = first[-1]
        self.ranges = list(pairwise(first))
        self._mirrored: list[float] = []
        self._mirror = torch.zeros(len(sizes), device=self.device)
        self.copy_sizes = dict.fromkeys((entry.kind.x for entry in self.entries), 0)
        rows: list[list[int]] = []
        for entry, size in zip(self.entries, sizes, strict=True):
            kept = [tensor.data_ptr() for tensor in entry.kept]
            kept += [0] * (3 - len(kept))
            step = self._mirror.data_ptr() + 4 * len(rows)
            if self.has_steps_here and entry.step is not None:
                step = entry.step.data_ptr()
            place = self.copy_sizes[entry.kind.x]
            self.copy_sizes[entry.kind.x] = place + -(-size // 16) * 16
            rows.append([entry.param.data_ptr(), *kept, step, size, entry.group, place])
        self.table = upload(torch.tensor(rows, dtype=torch.int64), self.device)
        tensor = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(chunks))
        chunk = torch.arange(self.total) - torch.tensor(first[:-1])[tensor]
        self.chunks = upload(torch.stack([tensor, chunk], 1).to(torch.int32), self.device)
        self.partials = torch.zeros(passes.SUMS * self.total, device=self.device)
        self.sections = []
        for kind in dict.fromkeys(entry.kind for entry in self.entries):
            own = [place for place, entry in enumerate(self.entries) if entry.kind == kind]
            begin, end = first[own[0]], first[own[-1] + 1]
            if end > begin:
                tables = self.chunks[begin:], self.partials[begin:]
                self.sections.append(Section(kind, end - begin, *tables))

    def find_grads(self, optimizer: Optimizer) -> list[int] | None:
        """The address of each gradient, 0 where there is none; None if the plan does not hold any
        more."""
        if list(map(id, _parameters(optimizer))) != self._ids:
            return None
        if any(param.grad is not None for param in self._unseen):
            return None
        if not self._has_state_of(optimizer):
            return None
        if list(map(Tensor.data_ptr, self._fixed)) != self._at:
            return None
        addresses = []
        for param, entry, strides in zip(self.params, self.entries, self._strides, strict=True):
            grad = param.grad
            if grad is None:
                addresses.append(0)
                continue
            address = _address(grad, entry.kind, strides)
            if address is None:
                return None
            addresses.append(address)
        return addresses

    def _has_state_of(self, optimizer: Optimizer) -> bool:
        every = optimizer.state
        for param, group, state, kept, step, _ in self.entries:
            if every.get(param) is not state or state.get(DISPLACEMENT) is not kept[0]:
                return False
            slots = self.bases[group].slots
            if slots and state.get(slots[0]) is not kept[1]:
                return False
            if len(slots) > 1 and state.get(slots[1]) is not kept[2]:
                return False
            if step is not None and state.get("step") is not step:
                return False
        return True

    def place_grads(self, addresses: list[int], keep: list[Any] | None) -> Tensor:
        """The list of the gradients' addresses, on the device."""
        own, placed = self._grads
        if placed is None or own != addresses or keep is not None:
            placed = upload(torch.tensor(addresses, dtype=torch.int64), self.device, keep)
            if keep is None:
                self._grads = (addresses, placed)
        return placed

    def type_in(
        self, optimizer: Any, rates: list[Rate], present: set[int], keep: list[Any] | None
    ) -> Tensor:
        """The table of the groups' settings, on the device."""
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
            placed = upload(torch.tensor(rows, dtype=torch.float64), self.device, keep)
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
            number = torch.tensor(value, dtype=torch.float64)
            self._max_norm = (value, upload(number, self.device))
        return self._max_norm[1]

    def arrived(self, param: Tensor) -> tuple[int, int, Tensor] | None:
        """Note the gradient of a parameter as summed up; gives its place and address, and the table
        of the groups. None where it is left to the step."""
        place, grad, groups = self.places.get(param), param.grad, self._typed[1]
        if place is None or grad is None or groups is None:
            return None
        kind, strides = self.entries[place].kind, self._strides[place]
        if not kind.is_large or not self.is_known or self._has_tensor_lr:
            return None
        address = _address(grad, kind, strides)
        if address is None:
            return None
        if not self._summed:
            self._signs = _signs(self._typed[0])
        self._summed[place] = (address, grad._version)
        return place, address, groups

    def take_unsummed(self) -> list[Section]:
        """The sections that have a gradient which was not summed up as it arrived, or which has
        been changed since: clipped, unscaled."""
        summed, self._summed = self._summed, {}
        if not summed or _signs(self._typed[0]) != self._signs or self._has_tensor_lr:
            return self.sections
        left = set()
        for place, (param, entry) in enumerate(zip(self.params, self.entries, strict=True)):
            grad = param.grad
            if grad is None or summed.get(place) != (grad.data_ptr(), grad._version):
                left.add(entry.kind)
        return [section for section in self.sections if section.kind in left]

    def mirror_steps(self) -> None:
        """Where a base counts its steps on the host: bring the device's to the same."""
        steps = [float(step) for step in self.steps]
        if steps != self._mirrored:
            self._mirror.copy_(upload(torch.tensor(steps), self.device))
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


def _signs(rows: list[list[float]]) -> list[tuple[bool, float]]:
    """What of the groups' settings goes into the sums."""
    return [(row[passes.LR.value] != 0, row[passes.SIGN.value]) for row in rows]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
