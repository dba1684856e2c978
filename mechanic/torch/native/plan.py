"""All that the passes know of an optimizer, and whether it still holds. That is asked at every
step, and made to be fast."""

import operator
from array import array
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch.kernels.known import KnownBase
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.native.tables import EMPTY, Row, Tables
from mechanic.torch.rates import EFFECTIVE_LR
from mechanic.torch.sharding import PLAIN
from mechanic.torch.vectors import DISPLACEMENT


class Gradients(NamedTuple):
    """The gradients of a step."""

    held: list[Tensor | None]
    """Kept so that no one frees them meanwhile"""
    addresses: "array[int]"
    """Where they lie; 0 where there is none"""


class Plan:
    """Where everything lies, for all parameters that have moved. Of what belongs to the parameters
    only the addresses are kept, so that memory which is replaced is given back."""

    def __init__(
        self, optimizer: Any, mechanism: Mechanism, bases: list[KnownBase], rows: dict[Tensor, Row]
    ) -> None:
        groups = optimizer.param_groups
        self.bases = bases
        self._params = list(rows)
        self._groups = [list(group["params"]) for group in groups]
        self._unseen = [p for params in self._groups for p in params if p not in rows]
        """Parameters that have never had a gradient"""
        self._names = [_names(bases[row.group]) for row in rows.values()]
        self._numbers = _numbers(optimizer, mechanism)
        written = self._find_written(optimizer)
        self._places = list(map(Tensor.data_ptr, (*written, *self._numbers)))
        self._counts = list(map(Tensor.numel, written))
        self._sizes = list(map(Tensor.numel, self._params))
        is_simple = all(map(Tensor.is_contiguous, written))
        self._strides = None if is_simple else list(map(Tensor.stride, written))
        """How the tensors lie, if one of them is not contiguous"""
        self.tables = Tables(list(rows.values()), self._numbers)

    def written(
        self, optimizer: Any, mechanism: Mechanism, bases: list[KnownBase]
    ) -> list[Tensor] | None:
        """The tensors that a step writes to beside numbers of the tuner's; None if one of them, or
        anything else, is not where it was."""
        groups = optimizer.param_groups
        if bases != self.bases or len(groups) != len(self._groups):
            return None
        same = (_are_same(g["params"], own) for g, own in zip(groups, self._groups, strict=True))
        if not all(same) or any(param.grad is not None for param in self._unseen):
            return None
        numbers, written = _numbers(optimizer, mechanism), self._find_written(optimizer)
        is_there = (
            _are_same(numbers, self._numbers)
            and set(map(type, written)) <= _TYPES
            and {tensor.dtype for tensor in written} == {torch.float32}
            and list(map(Tensor.data_ptr, (*written, *numbers))) == self._places
            and list(map(Tensor.numel, written)) == self._counts
            and self._lie_alike(written, self._strides)
            and not any(map(Tensor.is_inference, written))
        )
        return written if is_there else None

    def _find_written(self, optimizer: Any) -> list[Any]:
        found: list[Any] = []
        for param, names in zip(self._params, self._names, strict=True):
            state = optimizer.state.get(param, {})
            found.append(param)
            found += [state.get(name) for name in names]
        return found

    @staticmethod
    def _lie_alike(tensors: list[Tensor], strides: list[tuple[int, ...]] | None) -> bool:
        if strides is None:
            return all(map(Tensor.is_contiguous, tensors))
        return list(map(Tensor.stride, tensors)) == strides

    def gradients(self) -> Gradients | None:
        """The gradients; None if one of them does not lie as its parameter does."""
        held = [param.grad for param in self._params]
        grads = [grad for grad in held if grad is not None]
        if not grads or not _can_be_read(grads):
            return None
        strides = (
            None
            if self._strides is None
            else [param.stride() for param in self._params if param.grad is not None]
        )
        sizes = self._sizes
        if len(grads) < len(held):
            sizes = [size for size, grad in zip(sizes, held, strict=True) if grad is not None]
        if list(map(Tensor.numel, grads)) != sizes or not self._lie_alike(grads, strides):
            return None
        found = list(map(Tensor.data_ptr, grads))
        if 0 in found:
            found = [at if size else EMPTY for at, size in zip(found, sizes, strict=True)]
        if 0 in found:
            return None  # it has no memory
        if len(grads) < len(held):
            places = iter(found)
            found = [0 if grad is None else next(places) for grad in held]
        return Gradients(held, array("q", found))


def make(optimizer: Any, mechanism: Mechanism, bases: list[KnownBase]) -> Plan | None:
    """A plan for all parameters that have moved; None where one of them is not for the passes."""
    rows: dict[Tensor, Row] = {}
    for index, group in enumerate(optimizer.param_groups):
        if not _is_number(group.get(EFFECTIVE_LR)):
            return None
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if param.grad is None and DISPLACEMENT not in state:
                continue
            row = _enter(param, state, bases[index], index)
            if row is None:
                return None
            rows[param] = row
    plan = Plan(optimizer, mechanism, bases, rows)
    return None if plan.tables.overlap or not plan.tables.size else plan


def _enter(param: Tensor, state: dict[str, Any], base: KnownBase, group: int) -> Row | None:
    owned: list[Any] = [state.get(name) for name in _names(base)]
    counter = owned.pop() if base.has_steps else None
    if base.has_steps and not _is_number(counter):
        return None
    tensors = [param, *owned]
    if not all(_is_plain(tensor) and tensor.shape == param.shape for tensor in tensors):
        return None
    is_simple = all(tensor.is_contiguous() for tensor in tensors)
    if not is_simple and not all(tensor.stride() == param.stride() for tensor in tensors):
        return None
    delta, *slots = owned
    return Row(param, delta, slots, counter, group) if is_simple or _is_dense(param) else None


def _names(base: KnownBase) -> list[str]:
    """The entries of a parameter's state that a step writes to."""
    return [DISPLACEMENT, *base.slots, *(["step"] if base.has_steps else [])]


def _numbers(optimizer: Any, mechanism: Mechanism) -> list[Any]:
    """The numbers of the tuner that a step writes, and the learning rates in force."""
    rates = [group.get(EFFECTIVE_LR) for group in optimizer.param_groups]
    return [mechanism.scalars.packed, mechanism.counts.packed, *rates]


_TYPES = {*PLAIN}


def _is_plain(tensor: Any) -> bool:
    """Whether the passes can write to a tensor."""
    return (
        type(tensor) in _TYPES
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_neg()
        and not tensor.is_inference()
        and tensor.data_ptr() % tensor.element_size() == 0
    )


def _is_number(tensor: Any) -> bool:
    return _is_plain(tensor) and tensor.numel() == 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie one after the other, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _can_be_read(grads: list[Tensor]) -> bool:
    """Whether gradients are tensors like any other."""
    return (
        set(map(type, grads)) == {Tensor}
        and {grad.dtype for grad in grads} == {torch.float32}
        and {grad.layout for grad in grads} == {torch.strided}
        and set(map(Tensor.get_device, grads)) == {-1}
        and not any(map(Tensor.is_neg, grads))
    )


def _are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))
