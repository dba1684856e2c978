"""What the script's process notes about a step, as bytes: written there, read by the supervisor.

A row is a run of float64 numbers that begins with its own length and ends with its step once more,
so that one half written is known as such.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

_HEAD = 7  # length, step, time, scale, skipped, the number of groups and of betas
_WIDTH = 8  # bytes of a float64
_DENSE = 1000  # so many steps are all kept; then so many of each power of ten


class Row(NamedTuple):
    """One step of one optimizer."""

    step: int
    """Counted from 1 in this run"""
    time: float
    """Seconds since the epoch"""
    scale: float
    """The learned scale; NaN where none is learned"""
    skipped: int
    """Steps skipped so far"""
    lr: tuple[float, ...]
    """As it is typed and scheduled, one a group"""
    scales: tuple[float, ...]
    """The tuners' scales, one a β"""
    wealth: tuple[float, ...]
    """The tuners' rewards, one a β"""

    @property
    def effective_lr(self) -> tuple[float, ...]:
        """The learning rate in force, one a group."""
        return self.lr if math.isnan(self.scale) else tuple(self.scale * lr for lr in self.lr)


@lru_cache(maxsize=64)
def _struct(length: int) -> Struct:
    return Struct(f"<{length}d")


def pack(
    step: int,
    time: float,
    scale: float,
    skipped: float,
    lr: Sequence[float],
    scales: Sequence[float],
    wealth: Sequence[float],
) -> bytes:
    """The bytes of a row.

    >>> row = Row(3, 0.5, 2.0, 1, (0.1,), (1.5, 0.5), (0.0, 4.0))
    >>> unpack(pack(*row)) == ([row], len(pack(*row)))
    True
    """
    groups, betas = len(lr), len(scales)
    length = _HEAD + groups + 2 * betas + 1
    return _struct(length).pack(
        length, step, time, scale, skipped, groups, betas, *lr, *scales, *wealth, step
    )


def unpack(data: bytes) -> tuple[list[Row], int]:
    """The whole rows at the front of `data`, and how many bytes they are."""
    rows: list[Row] = []
    at = 0
    while at + _WIDTH <= len(data):
        (length,) = _struct(1).unpack_from(data, at)
        if length <= _HEAD or at + int(length) * _WIDTH > len(data):
            break
        values = _struct(int(length)).unpack_from(data, at)
        _, step, time, scale, skipped, groups, betas = values[:_HEAD]
        if values[-1] != step or length != _HEAD + groups + 2 * betas + 1:
            break
        lr_end, scales_end = _HEAD + int(groups), _HEAD + int(groups + betas)
        parts = values[_HEAD:lr_end], values[lr_end:scales_end], values[scales_end:-1]
        rows.append(Row(int(step), time, scale, int(skipped), *parts))
        at += int(length) * _WIDTH
    return rows, at


class Thinning:
    """Which steps a history keeps: all to 1,000, then every 10th to 10,000, and so on.

    >>> thinning = Thinning()
    >>> kept = [step for step in range(1, 100_001) if thinning.keeps(step)]
    >>> len(kept), kept[999:1002], kept[-1] - kept[-2]
    (2800, [1000, 1010, 1020], 100)
    """

    def __init__(self) -> None:
        self._every, self._until = 1, _DENSE

    def keeps(self, step: int) -> bool:
        """Whether a step is kept; to be asked in the order of the steps."""
        if step > self._until:
            self._every, self._until = 10 * self._every, 10 * self._until
        return step % self._every == 0
