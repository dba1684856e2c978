"""A yes or no that the host knows, or that only the device does."""

from typing import NamedTuple

import torch
from torch import Tensor


class Flag(NamedTuple):
    """A bool, or a 0-d tensor that only the device knows: reading it would make the host wait.

    `&` and `|` combine flags, and what the host can tell without the device stays known.

    >>> (NO & Flag(torch.tensor(True))).is_no
    True
    >>> Flag(torch.tensor(True)).is_yes  # it is, but the host has not looked
    False
    """

    value: bool | Tensor

    @classmethod
    def of(cls, value: object) -> "Flag":
        """The flag of a truth value of any kind, or of a tensor."""
        return cls(value if isinstance(value, Tensor) else bool(value))

    @property
    def device(self) -> torch.device | None:
        """The device that knows the answer; None where the host does."""
        return self.value.device if isinstance(self.value, Tensor) else None

    @property
    def is_known(self) -> bool:
        """Whether the host knows the answer."""
        return not isinstance(self.value, Tensor)

    @property
    def is_yes(self) -> bool:
        """Whether the host knows that the answer is yes."""
        return self.value is True

    @property
    def is_no(self) -> bool:
        """Whether the host knows that the answer is no."""
        return self.value is False

    def __and__(self, other: "Flag") -> "Flag":
        if self.is_no or other.is_yes:
            return self
        if other.is_no or self.is_yes:
            return other
        return Flag(self.value & other.value)

    def __or__(self, other: "Flag") -> "Flag":
        if self.is_yes or other.is_no:
            return self
        if other.is_yes or self.is_no:
            return other
        return Flag(self.value | other.value)

    def opposite(self) -> "Flag":
        """Yes for no, and no for yes."""
        return Flag(~self.value if isinstance(self.value, Tensor) else not self.value)

    def __bool__(self) -> bool:
        raise TypeError("a Flag is neither true nor false by itself: ask is_yes, is_no or wait().")

    def wait(self) -> "Flag":
        """The same flag, known: the host waits for the device where it has to."""
        return Flag(bool(self.value))

    def on(self, device: torch.device) -> Tensor:
        """The flag as a tensor on a device."""
        return torch.as_tensor(self.value, dtype=torch.bool, device=device)

    def to(self, device: torch.device) -> "Flag":
        """The same flag, where the tensors of a device can be combined with it."""
        return Flag(self.value.to(device)) if isinstance(self.value, Tensor) else self

    def choose(self, yes: Tensor, no: Tensor | float) -> Tensor:
        """`yes` or `no`, as the flag says, on the device of `yes`."""
        if self.is_yes:
            return yes
        if isinstance(self.value, Tensor):
            return torch.where(self.value.to(yes.device), yes, no)
        return no if isinstance(no, Tensor) else torch.full_like(yes, no)


YES, NO = Flag(True), Flag(False)
