"""Where the gradients lie. Unlike all other tensors, they may move from step to step."""

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels.layout import Entry
from mechanic.torch.kernels.upload import upload

EMPTY = 16  # the address of a gradient without elements: it is not 0, and is never read


class Gradients:
    """Finds the addresses of gradients, and brings them to the device."""

    def __init__(self, entries: list[Entry], device: torch.device) -> None:
        params = [entry.part for entry in entries]
        self._kinds = [entry.kind for entry in entries]
        self._types = [kind.grad for kind in self._kinds]
        self._sizes = list(map(Tensor.numel, params))
        self._strides = [None if p.is_contiguous() else p.stride() for p in params]
        self._is_simple = not any(self._strides) and all(kind.is_aligned for kind in self._kinds)
        self._device = device
        self._index = -1 if device.index is None else device.index
        self._placed: tuple[list[int], Tensor | None] = ([], None)

    def find(self, grads: list[Any]) -> list[int] | None:
        """The address of each gradient, 0 where there is none; None if one of them does not lie as
        its parameter does."""
        if self._is_simple and set(map(type, grads)) == {Tensor}:
            found = list(map(Tensor.data_ptr, grads))
            if (
                [grad.dtype for grad in grads] == self._types
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
        kind, strides = self._kinds[place], self._strides[place]
        if type(grad) is not Tensor or grad.dtype != kind.grad or grad.is_sparse or grad.is_neg():
            return None
        if grad.get_device() != self._index or grad.numel() != self._sizes[place]:
            return None
        if not grad.is_contiguous() if strides is None else grad.stride() != strides:
            return None
        address = grad.data_ptr()
        return None if kind.is_aligned and address % 16 else address or EMPTY

    def place(self, addresses: list[int], captured: list[Any] | None) -> Tensor:
        """The addresses, on the device."""
        had, placed = self._placed
        if placed is None or had != addresses or captured is not None:
            placed = upload(addresses, torch.int64, self._device, captured)
            if captured is None:
                self._placed = (addresses, placed)
        return placed
