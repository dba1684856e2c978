"""The supervisor's side of the notes: what the script's processes have written so far."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechanic.run.rows import Row, unpack

Rates = dict[str, float | None]
"""The learning rates of a group, by their names in it"""


@dataclass(eq=False)
class Track:
    """What is known of one optimizer of one process."""

    label: str
    """Its class's name, with a number where there are several"""
    process: int
    name: str = ""
    status: str = ""
    """tuned; own: mechanized by the script; dry: watched only; left: not chosen; refused"""
    reason: str = ""
    max_scale: float = float("inf")
    betas: list[float] = field(default_factory=list)
    groups: list[Rates] = field(default_factory=list)
    resumed: bool = False
    """Whether it had learned before its first step here: from a checkpoint, or before a fork"""
    rows: list[Row] = field(default_factory=list)
    """Thinned, and without the last step if that one was left out"""
    last: Row | None = None

    def read(self, event: dict[str, Any]) -> None:
        """Take in what the process tells."""
        self.groups = event["groups"]
        self.resumed = event.get("resumed", self.resumed)
        if event["event"] == "made":
            self.name, self.status = event["optimizer"], event["status"]
            self.reason, self.max_scale = event["reason"], event["max_scale"]
            self.betas = event["betas"]

    def close(self) -> list[Row]:
        """At the end: the last step becomes part of the history, if it was left out."""
        if self.last is None or (self.rows and self.rows[-1].step >= self.last.step):
            return []
        self.rows.append(self.last)
        return [self.last]

    @property
    def latest(self) -> Row | None:
        """The last step so far."""
        if self.last is None or (self.rows and self.rows[-1].step > self.last.step):
            return self.rows[-1] if self.rows else None
        return self.last

    @property
    def steps(self) -> int:
        """How many there were so far."""
        return self.latest.step if self.latest else 0


class _Files:
    """The three files of one optimizer, read as they grow."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._events = self._rows = 0

    def events(self) -> Iterator[dict[str, Any]]:
        data = self._from(".events", self._events)
        whole = data[: data.rfind(b"\n") + 1]
        self._events += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def rows(self) -> list[Row]:
        rows, size = unpack(self._from(".rows", self._rows))
        self._rows += size
        return rows

    def last(self) -> Row | None:
        rows, _ = unpack(self._from(".last", 0))
        return rows[0] if rows else None

    def _from(self, suffix: str, offset: int) -> bytes:
        with open(f"{self._stem}{suffix}", "rb") as file:
            file.seek(offset)
            return file.read()


class Spool:
    """The folder of notes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._files: dict[str, _Files] = {}
        self._tracks: dict[str, Track] = {}
        self._silent: set[str] = set()

    @property
    def tracks(self) -> list[Track]:
        """The optimizers so far, in the order in which they were made."""
        return [track for stem, track in sorted(self._tracks.items()) if stem not in self._silent]

    @property
    def failures(self) -> list[str]:
        """What went wrong in processes of the script before there was anything to note."""
        return sorted({path.read_text() for path in self._folder.glob("*.failed")})

    def poll(self) -> list[tuple[Track, list[dict[str, Any]], list[Row]]]:
        """What is new: of each optimizer the events and the rows."""
        stems = sorted(name[:-7] for name in os.listdir(self._folder) if name.endswith(".events"))
        news = []
        for stem in stems:
            if stem in self._silent:
                continue
            files = self._files.setdefault(stem, _Files(self._folder / stem))
            events = list(files.events())
            if any(event["event"] == "another rank" for event in events):
                self._silent.add(stem)
                continue
            track = self._track(stem, events)
            if track is None:
                continue
            for event in events:
                track.read(event)
            rows = files.rows()
            track.rows += rows
            track.last = files.last() or track.last
            if events or rows:
                news.append((track, events, rows))
        return news

    def _track(self, stem: str, events: list[dict[str, Any]]) -> Track | None:
        if stem not in self._tracks and events:
            name = events[0]["optimizer"]
            number = 1 + sum(track.name == name for track in self._tracks.values())
            process = int(stem.split("-")[1])
            self._tracks[stem] = Track(name if number == 1 else f"{name} {number}", process)
        return self._tracks.get(stem)
