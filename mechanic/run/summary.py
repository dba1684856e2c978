"""What people see of a run: the status line while it lasts, the summary after it."""

import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from mechanic.run.advice import Findings, Spread, find
from mechanic.run.request import Request
from mechanic.run.spool import Track

_WIDTH = 79
_RECENT = 5.0  # seconds over which steps a second are counted
_KINDS = {
    "tuned": "tuned",
    "own": "mechanized by the script",
    "dry": "watched only",
    "left": "left alone",
    "refused": "not tuned",
}


@dataclass(frozen=True)
class Ending:
    """How the script ended."""

    request: Request
    code: int
    """Its exit code, or minus the signal that killed it"""
    started: float
    ended: float

    @property
    def words(self) -> str:
        """How, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name}"


def status_line(tracks: Sequence[Track]) -> str:
    """What is going on, in one line; empty before the first step."""
    running = [track for track in tracks if track.latest and track.status != "left"]
    return "mechanic  " + "  |  ".join(map(_status, running)) if running else ""


def _status(track: Track) -> str:
    latest = track.latest
    assert latest is not None
    recent = next((row for row in track.rows if row.time >= latest.time - _RECENT), latest)
    took = latest.time - recent.time
    rate = f"{(latest.step - recent.step) / took:.3g}/s" if took > 0 else "-/s"
    scale = "" if latest.scale != latest.scale else f"  scale {latest.scale:.2e}"
    low, high = min(latest.effective_lr), max(latest.effective_lr)
    lr = f"{low:.2e}" if low == high else f"{low:.2e} to {high:.2e}"
    return f"{track.label}  step {latest.step:,}  {rate}{scale}  lr {lr}"


def as_text(
    ending: Ending, tracks: Sequence[Track], trouble: Sequence[str], failures: Sequence[str] = ()
) -> str:
    """The summary, for a terminal."""
    took = _duration(ending.ended - ending.started)
    name = " ".join(ending.request.shown[: 2 if ending.request.shown[0] == "-m" else 1])
    lines = ["", *textwrap.wrap(f"mechanic run: {name}: {ending.words}, {took}", _WIDTH)]
    stepped = [track for track in tracks if track.steps or track.status == "refused"]
    several = len({track.process for track in stepped}) > 1
    for track in stepped:
        where = f", process {track.process}" if several else ""
        lines += ["", *_optimizer_lines(track, find(track), where)]
    if not any(track.steps for track in tracks) and not failures:
        lines += _wrapped(_why_nothing(tracks), "  ! ")
    unmatched = [name for name in ending.request.only if not _matched(name, tracks)]
    for pattern in unmatched:
        made = ", ".join(sorted({track.name for track in tracks})) or "none"
        lines += _wrapped(f"--only {pattern} matched no optimizer; made were: {made}.", "  ! ")
    for text in (*failures, *trouble):
        lines += _wrapped(text, "  ! ")
    if ending.request.log:
        lines += ["", f"log: {ending.request.log}"]
    return "\n".join(lines) + "\n"


def _matched(pattern: str, tracks: Sequence[Track]) -> bool:
    return any(fnmatchcase(track.name, pattern) for track in tracks)


def _why_nothing(tracks: Sequence[Track]) -> str:
    if not tracks:
        return "the script made no torch optimizer, so there was nothing to tune."
    names = ", ".join(sorted({track.name for track in tracks}))
    return f"no optimizer made a step; made were: {names}."


def _optimizer_lines(track: Track, found: Findings, where: str) -> list[str]:
    kind = _KINDS[track.status] + (f" ({track.reason})" if track.status == "left" else "")
    steps = f"{track.steps:,} step{'' if track.steps == 1 else 's'}"
    lines = [f"{track.label}: {kind}, {steps}{where}"]
    rows: list[tuple[str, str]] = [(f"{found.typed_name} typed", _each(found.typed))]
    if found.scale is not None:
        for typed, which in _distinct(found.typed):
            rows.append((f"{found.typed_name} learned{which}", _spread(found.scale.times(typed))))
    if _is_scheduled(track):
        rows.append(("lr in force", _in_force(track)))
    if found.ramp is not None:
        steps = f"{found.ramp:,} step{'' if found.ramp == 1 else 's'}"
        rows.append(("ramp", f"{steps} to half the scale it came to"))
    elif track.resumed:
        rows.append(("ramp", "none: it had learned before, from a checkpoint"))
    if found.scale is not None:
        rows.append(("skipped", f"{found.skipped:,} steps with NaN or inf in the gradients"))
    if found.suggested:
        rows.append(("to paste", _paste(found)))
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        lines += textwrap.wrap(
            f"  {name:<{width}}{text}", _WIDTH, subsequent_indent=" " * (width + 2)
        )
    for warning in found.warnings:
        lines += _wrapped(warning, "  ! ")
    return lines


def _wrapped(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def _distinct(typed: Sequence[float]) -> Iterable[tuple[float, str]]:
    """Each learning rate once, with the groups that have it."""
    for lr in dict.fromkeys(typed):
        own = [str(i) for i, other in enumerate(typed) if other == lr]
        if len(own) == len(typed):
            yield lr, ""
        else:
            which = ", ".join(own) if len(own) < 4 else f"{own[0]}, {own[1]}, …, {own[-1]}"
            yield lr, f", group{'s' if len(own) > 1 else ''} {which}"


def _each(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in dict.fromkeys(numbers))


def _spread(spread: Spread) -> str:
    return (
        f"{spread.final:.3g} at the end, median {spread.median:.3g}, "
        f"{spread.low:.2g} to {spread.high:.2g}"
    )


def _paste(found: Findings) -> str:
    each = [
        f"{found.typed_name}={found.suggested[found.typed.index(typed)]:.3g}"
        + (f" ({where[2:]})" if where else "")
        for typed, where in _distinct(found.typed)
    ]
    return ", ".join(each)


def _is_scheduled(track: Track) -> bool:
    return any(row.lr != track.rows[0].lr for row in track.rows)


def _in_force(track: Track) -> str:
    rates = [lr for row in track.rows for lr in row.effective_lr]
    return f"{min(rates):.2g} to {max(rates):.2g}, with its schedule"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def as_json(ending: Ending, tracks: Sequence[Track]) -> dict[str, Any]:
    """The summary, for programs."""
    return {
        "ended": ending.ended,
        "exit_code": ending.code if ending.code >= 0 else 128 - ending.code,
        "signal": signal.Signals(-ending.code).name if ending.code < 0 else None,
        "optimizers": [
            {
                "optimizer": track.label,
                "class": track.name,
                "status": track.status,
                "reason": track.reason,
                "process": track.process,
                "steps": track.steps,
                **asdict(find(track)),
            }
            for track in tracks
        ],
    }
