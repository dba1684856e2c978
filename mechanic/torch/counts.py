"""How many steps were made, learned from and skipped, and the warning when many are skipped."""

import ctypes
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic.torch.capture import is_capturing, is_traced
from mechanic.torch.flag import Flag

PATIENCE = 10
"""Warn when so many steps in a row were skipped."""


class Counted(NamedTuple):
    """The counts at one moment, as views of what is stored."""

    steps: Tensor
    """Steps that moved the parameters"""
    updates: Tensor
    """Steps that the tuner has learned from"""
    skipped: Tensor
    skipped_in_a_row: Tensor


class Counts:
    """The counts of one optimizer, on the device, and what the host knows of them."""

    def __init__(self, home: torch.device) -> None:
        self.packed = torch.zeros(len(Counted._fields), dtype=torch.int64, device=home)
        """The fields of `Counted`, in their order; written in place, as a CUDA graph needs it"""
        self.skips_on_host = 0
        """`skipped_in_a_row`, where the host decides on skipping"""
        self._seen: Tensor | None = None
        self._has_warned = False

    def read(self) -> Counted:
        """The counts, as views of what is stored."""
        return Counted(*self.packed.unbind())

    def to(self, home: torch.device) -> None:
        """Move to another device."""
        self.packed, self._seen = self.packed.to(home), None

    def after(self, *, is_done: Flag, learns: Flag) -> Tensor:
        """What `packed` is after a step that was done or skipped."""
        counted, device = self.read(), self.packed.device
        done: Tensor | int = _as_int(is_done, device)
        return torch.stack(
            [
                counted.steps + done,
                counted.updates + _as_int(learns, device),
                counted.skipped + (1 - done),
                (counted.skipped_in_a_row + 1) * (1 - done),
            ]
        )

    def watch(self, is_done: Flag) -> None:
        """After a step was counted: warn, once, when many were skipped in a row."""
        if is_done.is_yes:
            self.skips_on_host = 0
        elif is_done.is_no:
            self.skips_on_host += 1
            if self.skips_on_host == PATIENCE:
                _warn(PATIENCE)
        elif self.packed.device.type != "meta" and not is_traced():
            self.watch_device()

    def watch_device(self) -> None:
        """The same where only the device knows. It writes the count to host memory when it gets
        there, so that no step waits, and the warning may come a few steps late."""
        self.skips_on_host = 0
        if is_capturing(self.packed.device):
            return  # a replay counts, but no one looks
        if self._seen is None:
            pinned = self.packed.device.type == "cuda"
            self._seen = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._seen.copy_(self.read().skipped_in_a_row, non_blocking=True)
        count = ctypes.c_int64.from_address(self._seen.data_ptr()).value
        if count < PATIENCE:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            _warn(count)


def _as_int(flag: Flag, device: torch.device) -> Tensor | int:
    return flag.on(device).to(torch.int64) if not flag.is_known else int(flag.is_yes)


def _warn(count: int) -> None:
    warnings.warn(
        f"mechanic: the last {count} steps were skipped, because their gradients or updates held "
        "NaN or inf, or numbers too large or too small for float32, and the weights have not moved "
        "since. Look for a loss that overflows (half precision without GradScaler, a logarithm of "
        "0, a division by 0); if the effective learning rate has grown too large, limit it with "
        "max_scale=.",
        RuntimeWarning,
        stacklevel=2,
    )
