"""The log folder: history.jsonl and TensorBoard events while the script runs, then summary.json."""

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from mechanic.run.rows import Row
from mechanic.run.spool import Track

HISTORY, SUMMARY = "history.jsonl", "summary.json"


class Log:
    """Writes a log folder, line by line. A disk that fills up ends the log, not the run."""

    def __init__(self, folder: Path, start: dict[str, Any]) -> None:
        self.folder = folder
        self.trouble = ""
        """Why the log is not complete"""
        folder.mkdir(parents=True)
        self._history = open(folder / HISTORY, "wb", buffering=0)  # noqa: SIM115 - closed by close
        self._events = _Events(folder)
        self._write([{"event": "start", **start}])

    def add(self, track: Track, events: list[dict[str, Any]], rows: list[Row]) -> None:
        """Take in what is new of an optimizer."""
        lines = [_describe(track, event) for event in events]
        self._write([*lines, *(_line(track, row) for row in rows)])
        if rows and not self.trouble:
            try:
                self._events.add(track, rows)
            except OSError as error:
                self._stop(error)

    def close(self, end: dict[str, Any]) -> None:
        """Write the last line and the summary."""
        self._write([{"event": "end", "time": end["ended"], "exit_code": end["exit_code"]}])
        try:
            if not self.trouble:
                text = json.dumps(plain(end), indent=2, allow_nan=False)
                (self.folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
            self._history.close()
            self._events.close()
        except OSError as error:
            self._stop(error)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines).encode()
        try:
            while data and not self.trouble:
                data = data[self._history.write(data) :]
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.trouble = self.trouble or f"{self.folder} could not be written to the end: {error}"


class _Events:
    """TensorBoard's events, written with its own record writer and no thread."""

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

    def add(self, track: Track, rows: list[Row]) -> None:
        for row in rows:
            values = [
                self._summary.Value(tag=f"{track.label}/{tag}", simple_value=value)
                for tag, value in _scalars(track, row).items()
                if math.isfinite(value)
            ]
            event = self._event(
                wall_time=row.time, step=row.step, summary=self._summary(value=values)
            )
            self._writer.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _scalars(track: Track, row: Row) -> dict[str, float]:
    return {
        "scale": row.scale,
        **{f"effective_lr/{i}": lr for i, lr in enumerate(row.effective_lr)},
        **{f"lr/{i}": lr for i, lr in enumerate(row.lr)},
        **{f"wealth/{beta}": r for beta, r in zip(track.betas, row.wealth, strict=False)},
        "skipped": row.skipped,
    }


def _describe(track: Track, event: dict[str, Any]) -> dict[str, Any]:
    kind = "optimizer" if event["event"] == "made" else event["event"]
    about = {"class": event["optimizer"]} if "optimizer" in event else {}
    event = {k: v for k, v in event.items() if k != "optimizer"}
    return {**event, "event": kind, "optimizer": track.label, **about, "process": track.process}


def _line(track: Track, row: Row) -> dict[str, Any]:
    return {
        "step": row.step,
        "time": row.time,
        "optimizer": track.label,
        "scale": row.scale,
        "effective_lr": row.effective_lr,
        "lr": row.lr,
        "scales": row.scales,
        "wealth": row.wealth,
        "skipped": row.skipped,
    }


def plain(value: Any) -> Any:
    """For JSON, which knows no NaN and no infinity: None in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
