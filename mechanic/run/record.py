"""In the script's process: records every step, so that no death of the process loses it."""

import atexit
import contextlib
import errno
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from mechanic.run.rows import UNRECORDED, Thinning, pack
from mechanic.run.settings import RunSettings, is_first_rank
from mechanic.suggestion import RATES

MECHANISM = "_mechanic"  # as in mechanic.torch.attach, which cannot be imported this early

_file_numbers = count()


class Recorder:
    """Records one optimizer: `describe` writes what it is, `record_step` writes a step."""

    def __init__(
        self, settings: RunSettings, optimizer: Optimizer, name: str, status: str, reason: str
    ) -> None:
        self.steps = 0
        self.name, self._spool = name, settings.spool
        self._freeze_after = settings.freeze_after
        self._writer: _SpoolWriter | None = None
        self._device_rows: _DeviceRows | None = None
        self._thinning = Thinning()
        self._groups = 0
        self._has_edits = False
        self.describe(optimizer, status, reason)

    def describe(self, optimizer: Optimizer, status: str, reason: str) -> None:
        """Write what the optimizer is, and how it is treated."""
        self.status = status
        options = getattr(optimizer, "_options", None)
        self._description = {
            "event": "optimizer",
            "class": self.name,
            "status": status,
            "reason": reason,
            "max_scale": getattr(options, "max_scale", math.inf),
            "is_relative": getattr(options, "s_init", "relative") == "relative",
            "betas": list(getattr(options, "betas", ())),
            "groups": [_rates(group) for group in optimizer.param_groups],
        }
        self._write_event(self._description)

    def record_step(self, optimizer: Optimizer) -> None:
        """Write the step that the optimizer has just taken."""
        self.steps += 1
        mechanism = getattr(optimizer, MECHANISM, None)
        if self.steps == self._freeze_after and self.status == "tuned" and mechanism is not None:
            mechanism.frozen = True
        if self._spool is None:
            return
        try:
            is_new = mechanism is not None and not self._has_edits and _has_edits(mechanism)
            if is_new or len(optimizer.param_groups) != self._groups:
                self._has_edits = self._has_edits or is_new
                self._write_groups(optimizer, mechanism)
            self._record_row(optimizer, mechanism)
        except Exception as error:  # for example a full disk; training must go on
            self._stop(error)

    def start_over(self) -> None:
        """After a fork: leave the files to the parent process, and count from 0."""
        if self._writer is not None:
            self._writer.close()
        self.steps = self._groups = 0
        self._writer = self._device_rows = None
        self._thinning = Thinning()

    def _record_row(self, optimizer: Optimizer, mechanism: Any) -> None:
        # As `mechanize` sees it: a base without a learning rate of its own has 1.
        none = math.nan if mechanism is None else 1.0
        lrs: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        on_host = mechanism is None or mechanism.scale.is_cpu
        for i, lr in enumerate(lrs):
            if isinstance(lr, Tensor) and not lr.is_cpu:
                on_host = False
                continue
            number = _as_number(lr)
            lrs[i] = none if number is None else number
        now = time.time()
        if not on_host:
            if self._device_rows is None:
                self._device_rows = _DeviceRows(self._write_row)
            self._device_rows.add(self.steps, now, mechanism, lrs)
        elif mechanism is None:
            self._write_row(self.steps, pack(self.steps, now, math.nan, math.nan, 0, lrs, ()))
        else:
            numbers, skipped = mechanism.scalars.read(), mechanism.counts.read().skipped.item()
            head = self.steps, now, numbers.scale.item(), numbers.mean_scale.item(), skipped
            self._write_row(self.steps, pack(*head, lrs, numbers.state.s.tolist()))

    def _write_row(self, step: int, row: bytes) -> None:
        if self._writer is None:
            return
        if self._thinning.keeps(step):
            self._writer.rows.append(row)
        else:  # it may turn out to be the last one
            self._writer.last.replace(row)

    def _write_groups(self, optimizer: Optimizer, mechanism: Any) -> None:
        """Write the learning rates of the groups. This is done at the first step, when schedulers
        have stored the lr that they start from, and again whenever groups are added."""
        if not self._groups and _is_another_rank():
            self._write_event({"event": "another rank"})
            self._spool = self._writer = None
            return
        event: dict[str, Any] = {"event": "groups", "step": self.steps, "edited": self._has_edits}
        if not self._groups and mechanism is not None:
            counted = mechanism.counts.read()
            event["resumed"] = int(counted.updates) > 1  # a checkpoint may have been loaded
            event["had_gradients"] = int(counted.steps + counted.skipped) > 0
        self._groups = len(optimizer.param_groups)
        self._write_event(event | {"groups": [_rates(group) for group in optimizer.param_groups]})

    def _write_event(self, event: dict[str, Any]) -> None:
        if self._spool is None or not is_first_rank() or (not self._writer and _is_another_rank()):
            self._spool = None
            return
        try:
            if self._writer is None:
                self._writer = _SpoolWriter(self._spool)
                if event is not self._description:
                    self._writer.write_event(self._description)
            self._writer.write_event(event)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):  # a file without content needs no room
                path = f"{time.time_ns()}-{os.getpid()}.{self.name}{UNRECORDED}"
                open(os.path.join(str(self._spool), path), "w").close()
        self._spool = self._writer = None
        sys.stderr.write(f"mechanic run: {self.name} is no longer recorded: {error!r}\n")


def _has_edits(mechanism: Any) -> bool:
    """Whether someone else was found to change the weights between steps."""
    from mechanic.torch import edits

    return edits.are_followed(mechanism)


class _SpoolWriter:
    """The three files of one optimizer: events as lines of JSON, kept rows, and the last row."""

    def __init__(self, spool: str) -> None:
        path = os.path.join(spool, f"{time.time_ns():020}-{os.getpid()}-{next(_file_numbers)}")
        self.last = _MappedFile(f"{path}.last")
        self.rows = _MappedFile(f"{path}.rows")
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._events = os.open(f"{path}.events", flags, 0o600)

    def write_event(self, event: dict[str, Any]) -> None:
        os.write(self._events, (json.dumps(event) + "\n").encode())

    def close(self) -> None:
        self.last.close()
        self.rows.close()
        os.close(self._events)


class _MappedFile:
    """A file that is written through mapped memory, which is faster than a system call per step.

    What is written is in the file at once, however the process ends. The file is extended with
    zeros, which are no valid row, before that part is mapped: on a full disk, extending the file
    raises an error, while writing to mapped memory that has no room on disk would kill the process.
    """

    _ROOM = 1 << 16

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._size = self._offset = 0
        self._grow()

    def _grow(self) -> None:
        if os.pwrite(self._file, bytes(self._ROOM), self._size) < self._ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += self._ROOM
        self._map = mmap.mmap(self._file, self._size)

    def append(self, data: bytes) -> None:
        end = self._offset + len(data)
        while end > self._size:
            self._grow()
        self._map[self._offset : end] = data
        self._offset = end

    def replace(self, data: bytes) -> None:
        self._offset = 0
        self.append(data)

    def close(self) -> None:
        self._map.close()
        os.close(self._file)


class _DeviceRows:
    """Rows whose numbers are on an accelerator. They are collected there and copied to the host
    from time to time, so that no step waits for the device.

    If the process is killed, at most `_ROWS` rows are lost, or those of the last second.
    """

    _ROWS = 64

    def __init__(self, write_row: Callable[[int, bytes], None]) -> None:
        self._write_row = write_row
        self._pending: list[_PendingRow] = []
        self._copies: list[_CopyToHost] = []
        self._last_copy = time.monotonic()
        atexit.register(self._finish)

    def add(self, step: int, now: float, mechanism: Any, lrs: list[Any]) -> None:
        """Add a row. Some of the learning rates may be tensors on the device too."""
        parts = [lr for lr in lrs if isinstance(lr, Tensor)]
        betas = 0
        if mechanism is not None:
            numbers, skipped = mechanism.scalars.read(), mechanism.counts.read().skipped
            parts = [numbers.scale, numbers.mean_scale, skipped, numbers.state.s, *parts]
            betas = len(numbers.state.s)
        first = parts[0]
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the CUDA graph would capture the copy too
        with torch.no_grad():
            values = torch.cat([part.detach().to(first).reshape(-1) for part in parts])
        self._pending.append(_PendingRow(step, now, betas, lrs, values))
        if len(self._pending) >= self._ROWS or time.monotonic() - self._last_copy > 1:
            self._copies.append(_CopyToHost(self._pending))
            self._pending, self._last_copy = [], time.monotonic()
        while self._copies and self._copies[0].is_done():
            self._copies.pop(0).write(self._write_row)

    def _finish(self) -> None:
        if self._pending:
            self._copies.append(_CopyToHost(self._pending))
        for copy in self._copies:
            copy.write(self._write_row)


class _PendingRow(NamedTuple):
    """A row of which some numbers are still on the device, in `values`."""

    step: int
    time: float
    betas: int
    lrs: list[Any]
    values: Tensor

    def to_bytes(self, values: list[float]) -> bytes:
        numbers = iter(values)
        scale, mean_scale, skipped = math.nan, math.nan, 0.0
        if self.betas:
            scale, mean_scale, skipped = next(numbers), next(numbers), next(numbers)
        scales = list(islice(numbers, self.betas))
        lrs = [next(numbers) if isinstance(lr, Tensor) else lr for lr in self.lrs]
        return pack(self.step, self.time, scale, mean_scale, skipped, lrs, scales)


class _CopyToHost:
    """An asynchronous copy of pending rows to the host."""

    def __init__(self, rows: list[_PendingRow]) -> None:
        self._rows = rows
        values = torch.cat([row.values for row in rows])
        self._done: Any = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values.cpu()

    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())

    def write(self, write_row: Callable[[int, bytes], None]) -> None:
        if self._done is not None:
            self._done.synchronize()
        values = iter(self._values.tolist())
        for row in self._rows:
            write_row(row.step, row.to_bytes(list(islice(values, row.values.numel()))))


def _rates(group: dict[str, Any]) -> dict[str, float | None]:
    """The learning rates of a group: its own, and those that schedulers store in it."""
    return {name: _as_number(group.get(name)) for name in RATES}


def _as_number(rate: Any) -> float | None:
    try:
        return None if rate is None else float(rate)
    except (TypeError, ValueError, RuntimeError):  # a base may keep anything under these names
        return None


def _is_another_rank() -> bool:
    """Whether this process belongs to a distributed run that another process reports."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_rank() > 0)
