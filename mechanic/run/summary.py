"""What the user sees of a run: the status line while it lasts, the summary at its end."""

import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from mechanic.run.advice import Findings, Spread, analyze, class_names, why_nothing
from mechanic.run.log import has_tensorboard
from mechanic.run.request import RunRequest
from mechanic.run.spool import History

WIDTH = 79
"""Of the lines on a terminal."""
_RECENT = 5.0  # seconds over which steps per second are counted
_STATUS_TEXTS = {
    "tuned": "tuned",
    "own": "mechanized by the script",
    "dry": "watched only",
    "left": "left alone",
    "refused": "not tuned",
}


@dataclass(frozen=True)
class Ending:
    """How the script ended."""

    request: RunRequest
    code: int
    """Its exit code, or minus the number of the signal that killed it."""
    started: float
    ended: float

    @property
    def text(self) -> str:
        """How the script ended, for the summary."""
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"killed by {signal.Signals(-self.code).name}"


def status_lines(histories: Sequence[History]) -> list[str]:
    """The state of every optimizer in one line, at length and ever shorter; none before the first
    step."""
    running = [one for one in histories if one.latest and one.status != "left"]
    if not running:
        return []
    steps = {one.latest.step for one in running if one.latest}
    same = f"  step {steps.pop():,}" if len(steps) == 1 else ""
    several = "  |  ".join(map(_status, running))
    brief = "  |  ".join(f"{one.label}  lr {_rates(one)}" for one in running)
    briefest = " | ".join(f"{one.label} {_rates(one, digits=0)}" for one in running)
    lines = [f"mechanic  {several}", f"mechanic{same}  |  {brief}", brief, briefest]
    if len(running) == 1:
        (history,) = running
        lines.insert(0, f"mechanic  {_status(history, between=_speed(history))}")
    return lines


def _status(history: History, between: str = "") -> str:
    step = history.latest.step if history.latest else 0
    return f"{history.label}  step {step:,}{between}  lr {_rates(history)}"


def _speed(history: History) -> str:
    latest = history.latest
    assert latest is not None
    recent = next((row for row in history.rows if row.time >= latest.time - _RECENT), latest)
    seconds = latest.time - recent.time
    speed = f"{(latest.step - recent.step) / seconds:.3g}/s" if seconds > 0 else "-/s"
    scale = "" if latest.scale != latest.scale else f"  scale {latest.scale:.2e}"
    return f"  {speed}{scale}"


def _rates(history: History, digits: int = 2) -> str:
    """The lr in force, from the smallest to the largest of the groups."""
    rates = history.latest.effective_lr if history.latest else ()
    low, high = f"{min(rates):.{digits}e}", f"{max(rates):.{digits}e}"
    return low if low == high else f"{low} to {high}"


def as_text(
    ending: Ending,
    histories: Sequence[History],
    problems: Sequence[str],
    failures: Sequence[str] = (),
) -> str:
    """The summary, for a terminal."""
    target = ending.request.target
    name = " ".join(target[: 2 if target[0] == "-m" else 1])
    duration = _duration(ending.ended - ending.started)
    lines = ["", *textwrap.wrap(f"mechanic run: {name}: {ending.text}, {duration}", WIDTH)]
    shown = [one for one in histories if one.steps or one.status == "refused"]
    several = len({one.process for one in shown}) > 1
    for history in shown:
        process = f", process {history.process}" if several else ""
        lines += ["", *_optimizer_lines(history, analyze(history), process)]
    if not any(one.steps for one in histories) and not failures:
        lines += warning_lines(why_nothing(histories, has_failed=ending.code != 0))
    for pattern in ending.request.only:
        if not any(fnmatchcase(one.name, pattern) for one in histories):
            names = class_names(histories) or "none"
            lines += warning_lines(
                f"--only {pattern} matched no optimizer. The script made: {names}."
            )
    for text in (*failures, *problems):
        lines += warning_lines(text)
    if ending.request.log:
        lines += ["", f"log: {ending.request.log}"]
        if not has_tensorboard():
            lines += hint_lines("TensorBoard's events need tensorboard: pip install tensorboard")
    return "\n".join(lines) + "\n"


def _optimizer_lines(history: History, found: Findings, process: str) -> list[str]:
    status = _STATUS_TEXTS[history.status]
    if history.status == "left":
        status += f" ({history.reason})"
    lines = [f"{history.label}: {status}, {count_steps(history.steps)}{process}"]
    rows: list[tuple[str, str]] = [(f"{found.typed_name} typed", _each(found.typed))]
    if found.scale is not None:
        for typed, groups in _distinct(found.typed):
            rows.append((f"{found.typed_name} learned{groups}", _spread(found.scale.times(typed))))
    if _is_scheduled(history):
        rows.append(("lr in force", _in_force(history)))
    if found.ramp is not None:
        rows.append(("ramp", f"{count_steps(found.ramp)} to half the mean scale"))
    elif history.resumed:
        rows.append(("ramp", "none: it had learned before, from a checkpoint"))
    if found.scale is not None:
        rows.append(("skipped", f"{found.skipped:,} steps with NaN or inf in the gradients"))
    if found.suggested:
        rows.append(("to paste", paste(found)))
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        lines += textwrap.wrap(
            f"  {name:<{width}}{text}", WIDTH, subsequent_indent=" " * (width + 2)
        )
    for warning in found.warnings:
        lines += warning_lines(warning)
    if not found.warnings:
        lines += [line for hint in found.hints for line in hint_lines(hint)]
    return lines


def count_steps(steps: int) -> str:
    """A number of steps, in words.

    >>> count_steps(1), count_steps(1500)
    ('1 step', '1,500 steps')
    """
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def warning_lines(text: str) -> list[str]:
    """A warning, in lines for a terminal."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ! ", subsequent_indent="    ")


def hint_lines(text: str) -> list[str]:
    """A hint, in lines for a terminal."""
    return textwrap.wrap(f"hint: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ")


def _distinct(typed: Sequence[float]) -> Iterable[tuple[float, str]]:
    """Each learning rate once, with the groups that have it."""
    for lr in dict.fromkeys(typed):
        groups = [str(i) for i, other in enumerate(typed) if other == lr]
        if len(groups) == len(typed):
            yield lr, ""
        else:
            few = len(groups) < 4
            text = ", ".join(groups) if few else f"{groups[0]}, {groups[1]}, …, {groups[-1]}"
            yield lr, f", group{'s' if len(groups) > 1 else ''} {text}"


def _each(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in dict.fromkeys(numbers))


def _spread(spread: Spread) -> str:
    return (
        f"{spread.final:.3g} at the end, median {spread.median:.3g}, "
        f"{spread.low:.2g} to {spread.high:.2g}"
    )


def paste(found: Findings) -> str:
    """The lr to type, as it is typed."""
    each = [
        f"{found.typed_name}={found.suggested[found.typed.index(typed)]:.3g}"
        + (f" ({groups[2:]})" if groups else "")
        for typed, groups in _distinct(found.typed)
    ]
    return ", ".join(each)


def _is_scheduled(history: History) -> bool:
    return any(row.lr != history.rows[0].lr for row in history.rows)


def _in_force(history: History) -> str:
    rates = [lr for row in history.rows for lr in row.effective_lr]
    return f"{min(rates):.2g} to {max(rates):.2g}, with its schedule"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def as_json(ending: Ending, histories: Sequence[History]) -> dict[str, Any]:
    """The summary, for programs."""
    return {
        "ended": ending.ended,
        "exit_code": ending.code if ending.code >= 0 else 128 - ending.code,
        "signal": signal.Signals(-ending.code).name if ending.code < 0 else None,
        "optimizers": [
            {
                "optimizer": history.label,
                "class": history.name,
                "status": history.status,
                "reason": history.reason,
                "process": history.process,
                "steps": history.steps,
                **asdict(analyze(history)),
            }
            for history in histories
        ],
    }
