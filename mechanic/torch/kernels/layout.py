"""Where the tensors of an optimizer lie, in tables that the kernels read."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch.kernels import columns, passes
from mechanic.torch.kernels.host import StepCounters
from mechanic.torch.kernels.known import KnownBase
from mechanic.torch.kernels.upload import upload
from mechanic.torch.sharding import PLAIN, here_like
from mechanic.torch.vectors import DISPLACEMENT

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGE = 1 << 16  # from so many elements on, a gradient is summed up as it arrives


class TensorKind(NamedTuple):
    """What the tensors of one launch have in common."""

    base: KnownBase
    x: torch.dtype
    grad: torch.dtype
    delta: torch.dtype
    slots: torch.dtype
    is_aligned: bool
    is_large: bool


class Entry(NamedTuple):
    """A parameter and what belongs to it."""

    param: Tensor
    part: Tensor
    """The part of the parameter that is here: all of it, where it is not sharded"""
    counts: bool
    """Whether that part counts here, or on another process that holds the same"""
    group: int
    state: dict[str, Any]
    addresses: tuple[int, ...]
    """Where its displacement and the base's slots lie"""
    kind: TensorKind


class Section(NamedTuple):
    """The launch over all tensors of one kind: a range of the chunks."""

    kind: TensorKind
    first: int
    programs: int
    chunks: Tensor
    partials: Tensor


def enter(
    param: Tensor,
    group: int,
    base: KnownBase,
    state: dict[str, Any],
    *,
    counts: bool,
    is_arriving: bool,
) -> Entry | None:
    """The entry of a parameter; None where the kernels cannot work on it."""
    grad = param if param.grad is None else param.grad
    names = (DISPLACEMENT, *base.slots)
    owned = tuple(state[name] for name in names if isinstance(state.get(name), Tensor))
    step = state.get("step") if base.has_steps else None
    if len(owned) < len(names) or (base.has_steps and not isinstance(step, Tensor)):
        return None
    tensors = tuple(
        part for tensor in (param, grad, *owned) if (part := here_like(tensor, param)) is not None
    )
    if len(tensors) < len(owned) + 2 or not _are_for_kernels(tensors):
        return None
    part, own_grad, *stored = tensors
    slots = {slot.dtype for slot in stored[1:]} or {torch.float32}
    if len(slots) > 1 or (step is not None and not _is_counter(step)):
        return None
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    is_large = is_arriving and part.numel() >= _LARGE
    types = part.dtype, own_grad.dtype, stored[0].dtype, slots.pop()
    kind = TensorKind(base, *types, is_aligned, is_large)
    addresses = tuple(map(Tensor.data_ptr, stored))
    return Entry(param, part, counts, group, state, addresses, kind)


def _are_for_kernels(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the kernels can read and write tensors that belong together."""
    first = tensors[0]
    return (
        all(type(tensor) in PLAIN for tensor in tensors)
        and all(tensor.dtype in _TYPES and not tensor.is_sparse for tensor in tensors)
        and all(tensor.device == first.device for tensor in tensors)
        and all(tensor.shape == first.shape for tensor in tensors)
        and _lie_alike(tensors)
    )


def _is_counter(step: Tensor) -> bool:
    return type(step) is Tensor and step.dtype == torch.float32


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


class Layout:
    """The tables of tensors and of their chunks, and the launches over them."""

    def __init__(self, entries: list[Entry], counters: StepCounters, device: torch.device) -> None:
        self.entries = entries
        self.device = device
        self.chunk = passes.CHUNK
        """The elements of a chunk"""
        sizes = [entry.part.numel() for entry in entries]
        counts = [-(-size // self.chunk) for size in sizes]
        first = [0, *accumulate(counts)]
        self.total = first[-1]
        """The number of chunks"""
        self.ranges = list(pairwise(first))
        """The chunks of each tensor"""
        self.copy_sizes = dict.fromkeys((entry.kind.x for entry in entries), 0)
        """The elements that a copy of all parameters of a dtype takes"""
        self.places_in_copy: list[int] = []
        """Where each parameter begins in the copy of those of its dtype"""
        self.table = upload(self._rows(sizes, counters), torch.int64, self.device)
        rows = [[tensor, own] for tensor, count in enumerate(counts) for own in range(count)]
        self.chunks = upload(rows, torch.int32, self.device)
        size = columns.SUMS * self.total
        self.partials = torch.zeros(size, dtype=torch.float64, device=self.device)
        """The sums of each chunk"""
        self.sections = self._cut([entry.kind._replace(is_large=False) for entry in entries])
        """The launches that update the tensors"""
        self.sum_sections = self._cut([entry.kind for entry in entries])
        """The launches that sum them up, those of large tensors apart"""

    def _rows(self, sizes: list[int], counters: StepCounters) -> list[list[int]]:
        rows: list[list[int]] = []
        for place, (entry, size) in enumerate(zip(self.entries, sizes, strict=True)):
            addresses = [*entry.addresses, *[0] * (3 - len(entry.addresses))]
            begin = self.copy_sizes[entry.kind.x]
            self.places_in_copy.append(begin)
            self.copy_sizes[entry.kind.x] = begin + -(-size // 16) * 16
            step = counters.address_of(place)
            counts = int(entry.counts)
            at = entry.part.data_ptr()
            rows.append([at, *addresses, step, size, entry.group, begin, counts])
        return rows

    def _cut(self, kinds: list[TensorKind]) -> list[Section]:
        """The sections of tensors of one kind, which follow one another."""
        sections = []
        for kind in dict.fromkeys(kinds):
            own = [place for place, other in enumerate(kinds) if other == kind]
            begin, end = self.ranges[own[0]][0], self.ranges[own[-1]][1]
            if end > begin:
                sections.append(self.section(kind, begin, end))
        return sections

    def section(self, kind: TensorKind, begin: int, end: int) -> Section:
        """The launch over a range of the chunks."""
        return Section(kind, begin, end - begin, self.chunks[begin:], self.partials[begin:])
