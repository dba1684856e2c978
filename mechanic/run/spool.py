"""The supervisor's view of the spool: the folder to which the script's processes write steps."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechanic.run.rows import UNRECORDED, HistoryRow, unpack

GroupRates = dict[str, float | None]
"""The learning rates of a parameter group, by the names that they have in it."""


@dataclass(eq=False)
class History:
    """What is known of one optimizer of one process."""

    label: str
    """The name of its class, with a number where there are several."""
    process: int
    name: str = ""
    """The name of its class."""
    status: str = ""
    """`tuned`; `own`, mechanized by the script; `dry`, watched only; `left`, not chosen; or
    `refused`, by `mechanize`."""
    reason: str = ""
    max_scale: float = float("inf")
    is_relative: bool = True
    """Whether the scale starts from the size of the weights, and not from a number."""
    groups: list[GroupRates] = field(default_factory=list)
    resumed: bool = False
    """Whether the optimizer had learned a scale before its first step here: from a checkpoint, or
    before a fork."""
    had_gradients: bool = False
    """Whether a parameter had a gradient in the first step."""
    edited: bool = False
    """Whether something else was found to change the weights between steps."""
    rows: list[HistoryRow] = field(default_factory=list)
    """The steps that thinning keeps."""
    last: HistoryRow | None = None
    """The latest step that thinning drops."""

    def update(self, event: dict[str, Any]) -> None:
        """Take over what the process has written about the optimizer."""
        self.groups = event["groups"]
        self.resumed = event.get("resumed", self.resumed)
        self.had_gradients = event.get("had_gradients", self.had_gradients)
        self.edited = event.get("edited", self.edited)
        if event["event"] == "optimizer":
            self.name, self.status = event["class"], event["status"]
            self.reason, self.max_scale = event["reason"], event["max_scale"]
            self.is_relative = event.get("is_relative", True)  # logs of before lack it

    def close(self) -> list[HistoryRow]:
        """Add the last step to the rows if thinning has dropped it. Returns what was added."""
        if self.last is None or (self.rows and self.rows[-1].step >= self.last.step):
            return []
        self.rows.append(self.last)
        return [self.last]

    @property
    def latest(self) -> HistoryRow | None:
        """The latest step, kept or dropped."""
        if self.last is None or (self.rows and self.rows[-1].step > self.last.step):
            return self.rows[-1] if self.rows else None
        return self.last

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self.latest.step if self.latest else 0


class _SpoolReader:
    """Reads the three files of one optimizer while they grow."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._events_offset = self._rows_offset = 0

    def new_events(self) -> Iterator[dict[str, Any]]:
        data = self._read(".events", self._events_offset)
        complete = data[: data.rfind(b"\n") + 1]
        self._events_offset += len(complete)
        for line in complete.splitlines():
            yield json.loads(line)

    def new_rows(self) -> list[HistoryRow]:
        rows, size = unpack(self._read(".rows", self._rows_offset))
        self._rows_offset += size
        return rows

    def last_row(self) -> HistoryRow | None:
        rows, _ = unpack(self._read(".last", 0))
        return rows[0] if rows else None

    def _read(self, suffix: str, offset: int) -> bytes:
        with open(f"{self._stem}{suffix}", "rb") as file:
            file.seek(offset)
            return file.read()


class Spool:
    """The folder of recorded steps."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._readers: dict[str, _SpoolReader] = {}
        self._histories: dict[str, History] = {}
        self._ignored: set[str] = set()
        """Files of processes that turned out not to be the first rank."""

    @property
    def histories(self) -> list[History]:
        """The optimizers so far, in the order in which the script made them."""
        return [
            history
            for stem, history in sorted(self._histories.items())
            if stem not in self._ignored
        ]

    @property
    def failures(self) -> list[str]:
        """What went wrong in the script's processes, so that steps are missing here."""
        found = {path.read_text() for path in self._folder.glob("*.failed")}
        for path in self._folder.glob(f"*{UNRECORDED}"):
            name = path.name.split(".")[1]
            found.add(
                f"{name} was not recorded to its end: nothing could be written to {self._folder}. "
                "Make room there, or set TMPDIR to another folder."
            )
        return sorted(found)

    def poll(self) -> list[tuple[History, list[dict[str, Any]], list[HistoryRow]]]:
        """The new events and rows of each optimizer that has any."""
        stems = sorted(name[:-7] for name in os.listdir(self._folder) if name.endswith(".events"))
        news = []
        for stem in stems:
            if stem in self._ignored:
                continue
            reader = self._readers.setdefault(stem, _SpoolReader(self._folder / stem))
            events = list(reader.new_events())
            if any(event["event"] == "another rank" for event in events):
                self._ignored.add(stem)
                continue
            history = self._history(stem, events)
            if history is None:
                continue
            for event in events:
                history.update(event)
            rows = reader.new_rows()
            history.rows += rows
            history.last = reader.last_row() or history.last
            if events or rows:
                news.append((history, events, rows))
        return news

    def _history(self, stem: str, events: list[dict[str, Any]]) -> History | None:
        if stem not in self._histories and events:
            name = events[0]["class"]
            number = 1 + sum(history.name == name for history in self._histories.values())
            process = int(stem.split("-")[1])
            self._histories[stem] = History(name if number == 1 else f"{name} {number}", process)
        return self._histories.get(stem)
