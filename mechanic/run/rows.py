"""One step of one optimizer as bytes: the script's process writes them, the supervisor reads them.

A row is a sequence of float64 numbers. It begins with its length and ends with its step number once
more, so that the reader recognises a row that is only half written.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

UNRECORDED = ".unrecorded"
"""The ending of a file that tells that an optimizer is no longer recorded."""

_HEAD = 8  # length, step, time, scale, mean scale, skipped, number of groups, number of betas
_WIDTH = 8  # bytes of a float64
_DENSE = 1000  # every step up to this one is kept


class HistoryRow(NamedTuple):
    """One step of one optimizer."""

    step: int
    """Counted from 1 in this run."""
    time: float
    """Seconds since the epoch."""
    scale: float
    """The learned scale; NaN where none is learned."""
    mean_scale: float
    """The mean of the scale so far, in which each step counts by its lr; NaN as above."""
    skipped: int
    """The number of steps skipped so far."""
    lr: tuple[float, ...]
    """The lr of each group, as typed and scheduled."""
    scales: tuple[float, ...]
    """The scale of each tuner; there is one tuner for each β."""

    @property
    def effective_lr(self) -> tuple[float, ...]:
        """The learning rate in force, for each group."""
        return self.lr if math.isnan(self.scale) else tuple(self.scale * lr for lr in self.lr)


@lru_cache(maxsize=64)
def _struct(length: int) -> Struct:
    return Struct(f"<{length}d")


def pack(
    step: int,
    time: float,
    scale: float,
    mean_scale: float,
    skipped: float,
    lr: Sequence[float],
    scales: Sequence[float],
) -> bytes:
    """The bytes of a row.

    >>> row = HistoryRow(3, 0.5, 2.0, 1.5, 1, (0.1,), (1.5, 0.5))
    >>> unpack(pack(*row)) == ([row], len(pack(*row)))
    True
    """
    groups, betas = len(lr), len(scales)
    length = _HEAD + groups + betas + 1
    head = length, step, time, scale, mean_scale, skipped, groups, betas
    return _struct(length).pack(*head, *lr, *scales, step)


def unpack(data: bytes) -> tuple[list[HistoryRow], int]:
    """The complete rows at the start of `data`, and their number of bytes."""
    rows: list[HistoryRow] = []
    offset = 0
    while offset + _WIDTH <= len(data):
        (length,) = _struct(1).unpack_from(data, offset)
        if length <= _HEAD or offset + int(length) * _WIDTH > len(data):
            break
        values = _struct(int(length)).unpack_from(data, offset)
        _, step, time, scale, mean_scale, skipped, groups, betas = values[:_HEAD]
        if values[-1] != step or length != _HEAD + groups + betas + 1:
            break
        lr_end = _HEAD + int(groups)
        lr, scales = values[_HEAD:lr_end], values[lr_end:-1]
        rows.append(HistoryRow(int(step), time, scale, mean_scale, int(skipped), lr, scales))
        offset += int(length) * _WIDTH
    return rows, offset


class Thinning:
    """Which steps a history keeps: all up to 1,000, then every 10th up to 10,000, and so on.

    >>> thinning = Thinning()
    >>> kept = [step for step in range(1, 100_001) if thinning.keeps(step)]
    >>> len(kept), kept[999:1002], kept[-1] - kept[-2]
    (2800, [1000, 1010, 1020], 100)
    """

    def __init__(self) -> None:
        self._every, self._until = 1, _DENSE

    def keeps(self, step: int) -> bool:
        """Whether a step is kept. Ask in the order of the steps."""
        if step > self._until:
            self._every, self._until = 10 * self._every, 10 * self._until
        return step % self._every == 0
