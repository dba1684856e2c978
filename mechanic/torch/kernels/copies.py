"""Copies of all parameters, for a base that runs by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels.layout import Layout
from mechanic.torch.twin import Twin, stand_in


class Copies:
    """A twin whose parameters lie side by side, those of a dtype together. The tensors are made
    once, but their memory is there only while a step needs it; or if they are not to be kept, they
    are ordinary tensors, of which a base may keep what it likes."""

    def __init__(self, optimizer: Any, layout: Layout, *, is_kept: bool = True) -> None:
        self._is_kept = is_kept
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
        if is_kept:
            self._free()

    @contextmanager
    def allocated(self) -> Iterator[None]:
        """Have the memory for a while."""
        if not self._is_kept:
            yield
            return
        for tensor in self.memory.values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        try:
            yield
        finally:
            self._free()

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
