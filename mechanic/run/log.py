"""The log folder: history.jsonl while the script runs, events for TensorBoard where that is
installed, and at the end summary.json.

`read` reads the history again.
"""

import importlib.util
import json
import math
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History

HISTORY, SUMMARY = "history.jsonl", "summary.json"


class Log:
    """Writes a log folder, line by line. A full disk ends the log, not the run."""

    def __init__(self, folder: Path, start: dict[str, Any]) -> None:
        self.folder = folder
        self.problem = ""
        """Why the log is incomplete; empty if it is not."""
        folder.mkdir(parents=True)
        self._history = open(folder / HISTORY, "wb", buffering=0)  # noqa: SIM115 - closed by close
        self._events = _TensorBoardEvents(folder) if has_tensorboard() else None
        self._write([{"event": "start", **start}])

    def add(self, history: History, events: list[dict[str, Any]], rows: list[HistoryRow]) -> None:
        """Write the new events and rows of an optimizer."""
        lines = [_event_line(history, event) for event in events]
        self._write([*lines, *(_row_line(history, row) for row in rows)])
        if self._events and rows and not self.problem:
            try:
                self._events.add(history, rows)
            except OSError as error:
                self._stop(error)

    def close(self, end: dict[str, Any]) -> None:
        """Write the last line and the summary."""
        self._write([{"event": "end", "time": end["ended"], "exit_code": end["exit_code"]}])
        try:
            if not self.problem:
                text = json.dumps(finite_or_none(end), indent=2, allow_nan=False)
                (self.folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
            self._history.close()
            if self._events:
                self._events.close()
        except OSError as error:
            self._stop(error)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        texts = (json.dumps(finite_or_none(line), allow_nan=False) for line in lines)
        data = "".join(text + "\n" for text in texts).encode()
        try:
            while data and not self.problem:
                data = data[self._history.write(data) :]
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.problem = self.problem or f"{self.folder} could not be written to the end: {error}"


def has_tensorboard() -> bool:
    """Whether the log has events for TensorBoard too."""
    return importlib.util.find_spec("tensorboard") is not None


class _TensorBoardEvents:
    """Writes TensorBoard events with TensorBoard's own record writer, but without a thread."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self._file: BinaryIO = open(folder / name, "wb")  # noqa: SIM115 - closed by close
        self._writer = RecordWriter(self._file)
        self._writer.write(
            Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
        )
        self._file.flush()

    def add(self, history: History, rows: list[HistoryRow]) -> None:
        for row in rows:
            values = [
                self._summary.Value(tag=f"{history.label}/{tag}", simple_value=value)
                for tag, value in _scalars(row).items()
                if math.isfinite(value)
            ]
            event = self._event(
                wall_time=row.time, step=row.step, summary=self._summary(value=values)
            )
            self._writer.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _scalars(row: HistoryRow) -> dict[str, float]:
    return {
        "scale": row.scale,
        **{f"effective_lr/{i}": lr for i, lr in enumerate(row.effective_lr)},
        **{f"lr/{i}": lr for i, lr in enumerate(row.lr)},
        "skipped": row.skipped,
    }


def _event_line(history: History, event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "optimizer": history.label, "process": history.process}


def _row_line(history: History, row: HistoryRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "time": row.time,
        "optimizer": history.label,
        "scale": row.scale,
        "mean_scale": row.mean_scale,
        "effective_lr": row.effective_lr,
        "lr": row.lr,
        "scales": row.scales,
        "skipped": row.skipped,
    }


def finite_or_none(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of the history in a log folder. Those that are damaged or incomplete are left out,
    which a warning tells of all but the last.

    Raises:
        ValueError: if there is no history, or it cannot be read.
    """
    path = folder / HISTORY
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError as error:
        fix = "Look at its name and its permissions."
        raise ValueError(f"{path} cannot be read: {error}. {fix}") from error
    if text is None:
        raise ValueError(f"there is no {HISTORY} in {folder}; give folders that --log has written.")
    lines = list(map(_read, text.splitlines()))
    damaged = [number for number, line in enumerate(lines, 1) if line is None]
    if damaged and damaged != [len(lines)]:
        said = f"{path} is damaged in {len(damaged):,} lines, first in line {damaged[0]:,}"
        warnings.warn(f"{said}; they were left out.", stacklevel=3)
    return [line for line in lines if line is not None]


def _read(line: str) -> dict[str, Any] | None:
    """An event, or a step with all that is drawn of it; None where a line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if "event" in row:
        return row
    is_sound = "scale" in row and isinstance(row.get("optimizer"), str)
    if not is_sound or type(row.get("step")) is not int or not are_numbers(row.get("effective_lr")):
        return None
    return row if are_numbers([row["step"], row["scale"]]) else None


def are_numbers(values: Any) -> bool:
    """Whether a value of JSON is a list of numbers. None stands for NaN and infinity."""
    return isinstance(values, list) and all(
        value is None or (type(value) in (int, float) and abs(value) < 1e300) for value in values
    )
