"""The tuner's numbers on the device."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mechanic import tuner
from mechanic.arrays import Array, divide
from mechanic.options import Options
from mechanic.torch.capture import is_capturing, is_traced


class Numbers(NamedTuple):
    """What the tuner knows, at one moment, in tensors or in floats."""

    state: tuner.State
    scale: Array
    """The scale S that made the parameters"""
    share: Array
    """Δ is this share of the displacements that the optimizer's state stores"""
    signal: Array
    """⟨Δ, g⟩ of the last step"""
    reference_square: Array
    """‖x‖² of the parameters when they were first seen"""
    size: Array
    """The number of elements behind `reference_square`"""
    typed_total: Array
    """The sum over all steps and groups of the learning rate that was typed and scheduled"""
    applied_total: Array
    """The same, with each step's learning rates times its scale"""

    def as_floats(self) -> "Numbers":
        """The same numbers, read; there is one β."""
        state = type(self.state)(*map(float, self.state))
        return Numbers(state, *map(float, self[1:]))

    @property
    def mean_scale(self) -> Array:
        """The mean of the scale so far, in which each step counts by its learning rate."""
        return divide(self.applied_total, self.typed_total)


class Observed(NamedTuple):
    """Sums over gradients that the tuner learns from in place of the step's own."""

    dg: Tensor
    gg: Tensor | float

    def put_into(self, sums: tuner.Sums) -> tuner.Sums:
        """The sums of a step, with these in place of its own."""
        return sums._replace(dg=self.dg, gg=self.gg)


BESIDE_STATE = Numbers._fields[1:]


def rows_of(options: Options) -> tuple[str, ...]:
    """The names of the numbers, in the order of their rows in `Scalars.packed`."""
    return (*BESIDE_STATE, *tuner.state_type(options)._fields)


class Scalars:
    """The tuner's numbers, packed into one tensor that is written in place: the replays of a CUDA
    graph find it where it was captured, and one copy writes all of it.

    A row holds one number for each β, or one number that stands in all of its columns.
    """

    def __init__(self, options: Options, home: torch.device) -> None:
        dtype = scalar_dtype(home)
        state = tuner.init(options, torch.tensor(options.betas, dtype=dtype, device=home))
        zero = torch.zeros((), dtype=dtype, device=home)
        others = dict.fromkeys(BESIDE_STATE, zero) | {"scale": state.s.sum(), "share": zero + 1}
        self.packed = pack(Numbers(state, **others))
        self._state_type = type(state)
        self.observed: Observed | None = None
        """What the next step learns from in place of its gradients"""

    def read(self) -> Numbers:
        """The numbers, as views of what is stored."""
        rows, firsts = self.packed.unbind(), self.packed[:, 0].unbind()
        count, names = len(BESIDE_STATE), self._state_type._fields
        state = [
            row if name in tuner.PER_BETA else first
            for name, row, first in zip(names, rows[count:], firsts[count:], strict=True)
        ]
        return Numbers(self._state_type(*state), *firsts[:count])

    @property
    def scale(self) -> Tensor:
        """The scale S, as a view."""
        return self.packed[BESIDE_STATE.index("scale"), 0]

    @property
    def shared(self) -> Tensor:
        """The rows that are the same in all processes. The totals of learning rates are not where
        each process has rates of its own."""
        totals = BESIDE_STATE.index("typed_total"), len(BESIDE_STATE)
        return torch.cat([self.packed[: totals[0]], self.packed[totals[1] :]])

    def to(self, home: torch.device) -> None:
        """Move to another device."""
        self.packed, self.observed = self.packed.to(home, scalar_dtype(home)), None


def pack(numbers: Numbers) -> Tensor:
    """The numbers as the rows of one tensor."""
    state, *beside = numbers
    values = [*beside, *state]
    if type(numbers.scale) is float:
        return torch.tensor(values, dtype=torch.float64, device="cpu").unsqueeze(1)
    return torch.stack([value.expand(len(state.beta)) for value in values])


def can_look(home: torch.device) -> bool:
    """Whether the tuner's numbers can be read without waiting for a device, and no one traces what
    is done to them."""
    return home.type == "cpu" and not is_traced() and not is_in_torch_dispatch_mode()


def can_wait(home: torch.device) -> bool:
    """Whether the tuner's numbers can be read, if need be by waiting for a device: no one traces
    the step or captures it in a CUDA graph."""
    is_recorded = is_traced() or is_in_torch_dispatch_mode() or is_capturing(home)
    return home.type != "meta" and not is_recorded


def are_floats(options: Options, home: torch.device) -> bool:
    """Whether the rule computes with floats: there is one β, and the numbers can be read."""
    return len(options.betas) == 1 and can_look(home)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """float64, so that h² neither overflows nor vanishes; float32 where there is no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
