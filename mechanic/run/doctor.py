"""`mechanic doctor`: reads a log folder, and names what went wrong in the run, with the fix."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mechanic.run.advice import Findings, analyze, why_nothing
from mechanic.run.log import are_numbers, read
from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History
from mechanic.run.summary import count_steps, hint_lines, paste, warning_lines
from mechanic.suggestion import RATES

_TUNED = ("tuned", "own")


def load(folder: Path) -> list[History]:
    """The histories in a log folder, as far as they are not damaged.

    Raises:
        ValueError: if there is no history.
    """
    lines = read(folder)
    if not lines:
        raise ValueError(
            f"the history in {folder} is empty or damaged, so there is nothing to diagnose. Run "
            "the script again: mechanic run --log FOLDER SCRIPT."
        )
    histories: dict[str, History] = {}
    for line in lines:
        label = line.get("optimizer")
        if not isinstance(label, str):
            continue
        history = histories.setdefault(label, History(label, 0, label, "tuned"))
        if "event" not in line:
            history.rows += filter(None, [_as_row(line)])
        elif _is_sound(line):
            history.update(line)
    for history in histories.values():
        history.rows = sorted({row.step: row for row in history.rows}.values())
    return list(histories.values())


def _is_sound(event: dict[str, Any]) -> bool:
    """Whether an event has all that a history takes from it."""
    groups = event.get("groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and are_numbers([group.get(name, "") for name in RATES])
        for group in groups
    ):
        return False
    texts = (event.get(name) for name in ("class", "status", "reason"))
    is_described = all(isinstance(text, str) for text in texts) and "max_scale" in event
    if event["event"] == "optimizer" and is_described and are_numbers([event["max_scale"]]):
        cap = event["max_scale"]  # JSON has no infinity
        event["max_scale"] = math.inf if cap is None else float(cap)
        return True
    return bool(event["event"] == "groups")


def _as_row(line: dict[str, Any]) -> HistoryRow | None:
    """A step; None where what is judged of it is damaged. Old logs do not count skipped steps, and
    have no mean of the scale."""
    rates, skipped, mean_scale = line.get("lr"), line.get("skipped", 0), line.get("mean_scale")
    if not (rates and are_numbers(rates) and are_numbers([mean_scale])) or type(skipped) is not int:
        return None
    lr = tuple(map(_number, rates))
    return HistoryRow(
        line["step"], 0.0, _number(line["scale"]), _number(mean_scale), skipped, lr, ()
    )


def _number(value: float | None) -> float:
    """A number of JSON, where None stands for NaN."""
    return math.nan if value is None else float(value)


def diagnose(histories: Sequence[History]) -> tuple[str, bool]:
    """What to say of a run, and whether it is healthy."""
    shown = [one for one in histories if one.steps or one.status == "refused"]
    if not any(one.steps for one in histories):
        return "\n".join(warning_lines(why_nothing(histories))), False
    lines: list[str] = []
    is_healthy = True
    for history in shown:
        found = analyze(history)
        lines += _lines(history, found)
        is_healthy = is_healthy and not found.warnings
    return "\n".join(lines), is_healthy


def _lines(history: History, found: Findings) -> list[str]:
    head = f"{history.label}: {count_steps(history.steps)}"
    if found.warnings:
        return [head, *(line for text in found.warnings for line in warning_lines(text))]
    if history.status not in _TUNED or found.scale is None:
        return [f"{head}, not tuned, so there is nothing to diagnose"]
    hints = (line for text in found.hints for line in hint_lines(text))
    pasted = f"; to paste: {paste(found)}" if found.suggested else ""
    return [f"{head}, healthy: nothing looks wrong{pasted}", *hints]
