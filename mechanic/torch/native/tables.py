"""The tables that the passes read, as `passes.c` declares them."""

import ctypes
import math
from array import array
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

from torch import Tensor

from mechanic.torch.measure import FARTHEST
from mechanic.torch.scalars import BESIDE_STATE

CHUNK = 1 << 15
"""The elements that are worked on at a time; of its size the sums depend in their last digits."""

FORMULAS = ("adam", "adamw", "sgd", "momentum", "nesterov", "lion")
"""The names of the formulas in the order of their numbers."""

SETTINGS = ("lr", "unit", "sign", "a", "b", "eps", "decay", "base_lr", "formula")
"""The columns of the table of groups."""

EMPTY = 16
"""The address of a tensor without elements: it is not 0, and is never read."""

_POINTERS = ("tensors", "chunks", "written", "groups", "rates", "packed", "counts")
_SIZES = ("tensor_count", "chunk_count", "written_count", "group_count")
_PLACES = ("scale_at", "share_at", "with_x", "with_u")


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_PLACES)),
        *((name, ctypes.c_double) for name in ("max_norm", "farthest")),
    )


class Row:
    """A parameter, what belongs to it, and its group."""

    def __init__(
        self, x: Tensor, delta: Tensor, slots: list[Tensor], counter: Tensor | None, group: int
    ) -> None:
        self.size, self.group = x.numel(), group
        written = [x, delta, *slots, *([] if counter is None else [counter])]
        sizes = [(tensor.data_ptr(), 4 * tensor.numel()) for tensor in written]
        self.regions = [(begin, begin + size) for begin, size in sizes if size]
        """The memory that a step writes to"""
        places = [tensor.data_ptr() for tensor in (x, delta, *slots)]
        counter_at = 0 if counter is None else counter.data_ptr()
        self.numbers = (*[*places, 0, 0][:4], counter_at, self.size, group)
        """The row of the table of tensors"""


class Tables:
    """The tables of one optimizer, in memory that stays where it is. `numbers` are the tuner's,
    the counts, and the learning rates in force."""

    def __init__(self, rows: list[Row], numbers: list[Tensor]) -> None:
        packed, counts, *rates = numbers
        self.size = sum(row.size for row in rows)
        chunks = [
            (place, begin, min(CHUNK, row.size - begin))
            for place, row in enumerate(rows)
            for begin in range(0, row.size, CHUNK)
        ]
        regions = sorted(region for row in rows for region in row.regions)
        self.overlap = any(one[1] > two[0] for one, two in pairwise(regions))
        """Whether two of the tensors that a step writes to share memory"""
        self._settings: list[float] = []
        self._groups: Any = (ctypes.c_double * (len(SETTINGS) * len(rates)))()
        tables: list[Iterable[Iterable[int]]] = [[row.numbers for row in rows], chunks, regions]
        self._tables = [array("q", chain.from_iterable(table)) for table in tables]
        self._rates = array("q", [rate.data_ptr() for rate in rates])
        places = [table.buffer_info()[0] for table in self._tables]
        places += [ctypes.addressof(self._groups), self._rates.buffer_info()[0]]
        places += [packed.data_ptr(), counts.data_ptr()]
        rows_of = [BESIDE_STATE.index(name) * packed.shape[1] for name in ("scale", "share")]
        sizes = len(rows), len(chunks), len(regions), len(rates)
        self.plan = _Plan(*places, *sizes, *rows_of, 0, 0, math.inf, FARTHEST)

    def set(self, settings: list[float], *, with_x: bool, with_u: bool, max_norm: float) -> None:
        """Write down how the groups are set now, and what is asked of the sums."""
        if settings != self._settings:
            self._groups[:] = settings
            self._settings = settings
        self.plan.with_x, self.plan.with_u, self.plan.max_norm = with_x, with_u, max_norm
