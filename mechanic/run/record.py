"""In the script's process: one row a step, written so that no death of the process loses it."""

import atexit
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

from mechanic.run.rows import Thinning, pack
from mechanic.run.settings import Settings, is_first_rank

MECHANISM = "_mechanic"  # as in mechanic.torch.attach, which cannot be imported this early

_numbers = count()


class Watch:
    """The notes on one optimizer: `describe` tells what it is, `note` takes a step down."""

    def __init__(
        self, settings: Settings, optimizer: Optimizer, name: str, status: str, reason: str
    ) -> None:
        self.steps = 0
        self._name, self._spool = name, settings.spool
        self._freeze_after = settings.freeze_after
        self._files: _Files | None = None
        self._device: _OnDevice | None = None
        self._thinning = Thinning()
        self._groups = 0
        self.describe(optimizer, status, reason)

    def describe(self, optimizer: Optimizer, status: str, reason: str) -> None:
        """Tell what the optimizer is, and what was done with it."""
        self.status = status
        options = getattr(optimizer, "_options", None)
        self._description = {
            "event": "made",
            "optimizer": self._name,
            "status": status,
            "reason": reason,
            "max_scale": getattr(options, "max_scale", math.inf),
            "betas": list(getattr(options, "betas", ())),
            "groups": [_rates(group) for group in optimizer.param_groups],
        }
        self._tell(self._description)

    def note(self, optimizer: Optimizer) -> None:
        """After a step."""
        self.steps += 1
        mechanism = getattr(optimizer, MECHANISM, None)
        if self.steps == self._freeze_after and self.status == "tuned" and mechanism is not None:
            mechanism.frozen = True
        if self._spool is None:
            return
        try:
            if len(optimizer.param_groups) != self._groups:
                self._meet(optimizer, mechanism)
            self._write_row(optimizer, mechanism)
        except Exception as error:  # a full disk, say; training goes on
            self._mute(error)

    def forget(self) -> None:
        """Leave the files to the process that this one was forked from; start anew."""
        if self._files is not None:
            self._files.close()
        self.steps = self._groups = 0
        self._files = self._device = None
        self._thinning = Thinning()

    def _write_row(self, optimizer: Optimizer, mechanism: Any) -> None:
        lrs = [group.get("lr", math.nan) for group in optimizer.param_groups]
        on_host = mechanism is None or mechanism.scale.is_cpu
        for i, lr in enumerate(lrs):
            if isinstance(lr, Tensor):
                if lr.is_cpu:
                    lrs[i] = lr.item()
                else:
                    on_host = False
        now = time.time()
        if not on_host:
            if self._device is None:
                self._device = _OnDevice(self._keep)
            self._device.add(self.steps, now, mechanism, lrs)
        elif mechanism is None:
            self._keep(self.steps, pack(self.steps, now, math.nan, 0, lrs, (), ()))
        else:
            numbers = mechanism.scale.item(), mechanism.skipped.item()
            tuners = mechanism.state.s.tolist(), mechanism.state.r.tolist()
            self._keep(self.steps, pack(self.steps, now, *numbers, lrs, *tuners))

    def _keep(self, step: int, row: bytes) -> None:
        if self._files is None:
            return
        if self._thinning.keeps(step):
            self._files.rows.append(row)
        else:  # it may turn out to be the last one
            self._files.last.replace(row)

    def _meet(self, optimizer: Optimizer, mechanism: Any) -> None:
        """At the first step, when schedulers have noted the lr they start from, and whenever there
        are new groups."""
        if not self._groups and _is_another_rank():
            self._tell({"event": "another rank"})
            self._spool = self._files = None
            return
        event: dict[str, Any] = {"event": "groups", "step": self.steps}
        if not self._groups:  # a checkpoint may have been loaded
            event["resumed"] = mechanism is not None and int(mechanism.updates) > 1
        self._groups = len(optimizer.param_groups)
        self._tell(event | {"groups": [_rates(group) for group in optimizer.param_groups]})

    def _tell(self, event: dict[str, Any]) -> None:
        if self._spool is None or not is_first_rank() or (not self._files and _is_another_rank()):
            self._spool = None
            return
        try:
            if self._files is None:
                self._files = _Files(self._spool)
                if event is not self._description:
                    self._files.tell(self._description)
            self._files.tell(event)
        except OSError as error:
            self._mute(error)

    def _mute(self, error: Exception) -> None:
        self._spool = self._files = None
        sys.stderr.write(f"mechanic run: {self._name} is no longer recorded: {error!r}\n")


class _Files:
    """What a process leaves behind of one optimizer: lines of JSON, rows, and the last row."""

    def __init__(self, spool: str) -> None:
        path = os.path.join(spool, f"{time.time_ns():020}-{os.getpid()}-{next(_numbers)}")
        self.last = _Mapped(f"{path}.last")
        self.rows = _Mapped(f"{path}.rows")
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._events = os.open(f"{path}.events", flags, 0o600)

    def tell(self, event: dict[str, Any]) -> None:
        os.write(self._events, (json.dumps(event) + "\n").encode())

    def close(self) -> None:
        self.last.close()
        self.rows.close()
        os.close(self._events)


class _Mapped:
    """A file that is written through memory, which costs a step less than a call of the system.

    What is in it is the file's at once, however the process ends. Its room is made before it is
    used: zeros, which are no row. To run out of disk there is an error, in memory it were a crash.
    """

    _ROOM = 1 << 16

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._size = self._at = 0
        self._grow()

    def _grow(self) -> None:
        if os.pwrite(self._file, bytes(self._ROOM), self._size) < self._ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += self._ROOM
        self._map = mmap.mmap(self._file, self._size)

    def append(self, data: bytes) -> None:
        end = self._at + len(data)
        while end > self._size:
            self._grow()
        self._map[self._at : end] = data
        self._at = end

    def replace(self, data: bytes) -> None:
        self._at = 0
        self.append(data)

    def close(self) -> None:
        self._map.close()
        os.close(self._file)


class _OnDevice:
    """Rows whose numbers are on an accelerator, gathered there and copied now and then, so that
    no step waits for the device.

    A process that is killed takes at most `_ROWS` of them along, or those of a second.
    """

    _ROWS = 64

    def __init__(self, keep: Callable[[int, bytes], None]) -> None:
        self._keep = keep
        self._gathered: list[_Pending] = []
        self._copies: list[_Copy] = []
        self._since = time.monotonic()
        atexit.register(self._finish)

    def add(self, step: int, now: float, mechanism: Any, lrs: list[Any]) -> None:
        """Take a row; some of the learning rates are tensors on the device too."""
        parts = [lr for lr in lrs if isinstance(lr, Tensor)]
        betas = 0
        if mechanism is not None:
            state = mechanism.state
            parts = [mechanism.scale, mechanism.skipped, state.s, state.r, *parts]
            betas = len(state.s)
        home = parts[0]
        if home.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a copy would be captured too
        with torch.no_grad():
            row = torch.cat([part.detach().to(home).reshape(-1) for part in parts])
        self._gathered.append(_Pending(step, now, betas, lrs, row))
        if len(self._gathered) >= self._ROWS or time.monotonic() - self._since > 1:
            self._copies.append(_Copy(self._gathered))
            self._gathered, self._since = [], time.monotonic()
        while self._copies and self._copies[0].is_done():
            self._copies.pop(0).write(self._keep)

    def _finish(self) -> None:
        if self._gathered:
            self._copies.append(_Copy(self._gathered))
        for copy in self._copies:
            copy.write(self._keep)


class _Pending(NamedTuple):
    """A row of which some numbers are on the device still, in `values`."""

    step: int
    time: float
    betas: int
    lrs: list[Any]
    values: Tensor

    def bytes(self, values: list[float]) -> bytes:
        numbers = iter(values)
        scale, skipped = math.nan, 0.0
        if self.betas:
            scale, skipped = next(numbers), next(numbers)
        scales, wealth = (list(islice(numbers, self.betas)) for _ in range(2))
        lrs = [next(numbers) if isinstance(lr, Tensor) else lr for lr in self.lrs]
        return pack(self.step, self.time, scale, skipped, lrs, scales, wealth)


class _Copy:
    """Rows on their way to the host."""

    def __init__(self, rows: list[_Pending]) -> None:
        self._rows = rows
        together = torch.cat([row.values for row in rows])
        self._done: Any = None
        if together.is_cuda:
            self._values = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(together.device))
        else:
            self._values = together.cpu()

    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())

    def write(self, keep: Callable[[int, bytes], None]) -> None:
        if self._done is not None:
            self._done.synchronize()
        values = iter(self._values.tolist())
        for row in self._rows:
            keep(row.step, row.bytes(list(islice(values, row.values.numel()))))


def _rates(group: dict[str, Any]) -> dict[str, float | None]:
    """The learning rates of a group: its own, and those that schedulers note in it."""
    rates = {name: group.get(name) for name in ("lr", "initial_lr", "max_lr")}
    return {name: None if rate is None else float(rate) for name, rate in rates.items()}


def _is_another_rank() -> bool:
    """Whether another process of a distributed run reports."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_rank() > 0)
