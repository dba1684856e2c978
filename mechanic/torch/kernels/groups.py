"""The table of the groups' settings, and what a step makes of it for each group."""

import math
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.flag import Flag
from mechanic.torch.kernels import columns
from mechanic.torch.kernels.known import KnownBase, hyperparameters
from mechanic.torch.kernels.layout import Entry
from mechanic.torch.kernels.upload import upload
from mechanic.torch.rates import Rate, proportional_lr, typed_lr


class GroupTable:
    """The groups of an optimizer, as the kernels see them."""

    def __init__(self, bases: list[KnownBase], entries: list[Entry], device: torch.device) -> None:
        self.bases = bases
        self.half = {entry.group for entry in entries if entry.kind.x == torch.float16}
        """The groups that hold float16"""
        self.settings: tuple[list[list[float]], Tensor | None] = ([], None)
        """The settings as they are typed, and the table of them on the device"""
        self.has_tensor_lr = False
        empty = torch.zeros((), dtype=torch.float32, device=device)
        self.coefficients = empty.new_zeros(len(bases), columns.COEFFICIENTS.value)
        """What a step does to each group, which the kernel `tune` writes for those after it"""
        self.rates = empty.new_zeros(len(bases))
        self.effective_lrs = list(self.rates.unbind())
        """The learning rates in force, which `tune` writes"""
        self._entries = entries
        self._groups = {entry.group for entry in entries}
        self._max_norm: tuple[float, Tensor | None] = (math.inf, None)
        self._flags = upload([0, 1], torch.int32, device).unbind()

    def place(
        self,
        optimizer: Any,
        rates: list[Rate],
        addresses: list[int],
        captured: list[Any] | None,
    ) -> Tensor:
        """The table of the settings, on the device."""
        present = self._groups
        if 0 in addresses:
            pairs = zip(self._entries, addresses, strict=True)
            present = {entry.group for entry, address in pairs if address}
        rows = [
            self._row(optimizer, index, rates[index], index in present)
            for index in range(len(rates))
        ]
        had, placed = self.settings
        if placed is None or had != rows or captured is not None:
            placed = upload(rows, torch.float64, self.rates.device, captured)
            if captured is None:
                self.settings = (rows, placed)
        lrs = [group.get("lr") for group in optimizer.param_groups]
        self.has_tensor_lr = any(isinstance(lr, Tensor) for lr in lrs)
        for index, lr in enumerate(lrs):
            if isinstance(lr, Tensor):
                row = placed[index]
                row[columns.LR.value].copy_(lr.reshape(()), non_blocking=True)
                unit: Any = rates[index].unit
                row[columns.UNIT.value].copy_(unit, non_blocking=True)
        return placed

    def _row(self, optimizer: Any, index: int, rate: Rate, is_present: bool) -> list[float]:
        """The settings of one group; a learning rate that is a tensor is filled in later."""
        group = optimizer.param_groups[index]
        lr, base_lr, unit = typed_lr(group), rate.base_lr, rate.unit
        if isinstance(lr, Tensor):
            lr = unit = 0.0
        if base_lr is None or isinstance(base_lr, Tensor):
            base_lr = proportional_lr(half=index in self.half)  # a known base is run at this one
        own = hyperparameters(optimizer, self.bases[index], group)
        sign = -1.0 if group.get("maximize") else 1.0
        return list(map(float, (lr, unit, sign, is_present, *own, *own.logs, base_lr)))

    def max_norm(self, value: float, captured: list[Any] | None) -> Tensor | None:
        """The norm that gradients are clipped to, on the device; None for no limit."""
        if value != self._max_norm[0]:
            self._max_norm = (value, upload(value, torch.float64, self.rates.device, captured))
        return self._max_norm[1]

    def place_flag(self, flag: Flag) -> Tensor:
        """A flag on the device, without an upload."""
        return self._flags[flag.is_yes] if flag.is_known else flag.on(self.rates.device)
