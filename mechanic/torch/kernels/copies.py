"""Copies of all parameters, for a base that runs by itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels.layout import Layout
from mechanic.torch.twin import Twin, stand_in


class PackedCopies:
    """A twin whose parameters lie side by side, those of a dtype together. The tensors are made
    once, and their memory is there only while a step needs it. A base may keep them nevertheless,
    or anything that shares their memory: then they are left to it, and others are made."""

    def __init__(self, optimizer: Any, layout: Layout) -> None:
        self._layout = layout
        self._make(optimizer)
        self._free()

    def _make(self, optimizer: Any) -> None:
        layout = self._layout
        self.memory = {
            dtype: torch.empty(size, dtype=dtype, device=layout.device)
            for dtype, size in layout.copy_sizes.items()
        }
        params = [entry.param for entry in layout.entries]
        self._views = [
            self.memory[param.dtype].as_strided(param.shape, param.stride(), begin)
            for param, begin in zip(params, layout.places_in_copy, strict=True)
        ]
        pairs = zip(params, self._views, strict=True)
        self.twin = Twin(optimizer, {param: stand_in(param, view) for param, view in pairs})
        self._references: list[int] = []

    @contextmanager
    def allocated(self, optimizer: Any) -> Iterator[None]:
        """Have the memory for a while."""
        if not self.memory:
            self._make(optimizer)
        for tensor in self.memory.values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        try:
            yield
        finally:
            if self._are_kept():
                self.memory, self._views, self.twin = {}, [], Twin(optimizer, {})
            else:
                self._free()

    def count_references(self) -> None:
        """Before a base runs that may keep what it is given."""
        self._references = self._count()

    def _count(self) -> list[int]:
        """How many hold the tensors, in Python and in C++, and how many tensors their memory."""
        own = self.twin.stand_ins.values()
        return [
            *map(sys.getrefcount, own),
            *(tensor._use_count() for tensor in own),  # type: ignore[attr-defined]
            *(
                torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
                for tensor in self.memory.values()
            ),
        ]

    def _are_kept(self) -> bool:
        before, self._references = self._references, []
        return bool(before) and any(map(int.__gt__, self._count(), before))

    def _free(self) -> None:
        self.twin.let_go()
        for tensor in self.memory.values():
            tensor.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Bring to their places the copies that the base has given other memory."""
        stand_ins = list(self.twin.stand_ins.values())
        if list(map(Tensor.data_ptr, stand_ins)) == list(map(Tensor.data_ptr, self._views)):
            return
        for view, own in zip(self._views, stand_ins, strict=True):
            if own.data_ptr() != view.data_ptr():
                view.copy_(own)
                own.data = view
