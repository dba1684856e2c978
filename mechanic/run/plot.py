"""Drawing histories: the scale and the learning rates over the steps, several runs together."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechanic.run.log import HISTORY
from mechanic.run.spool import Track


@dataclass
class Curves:
    """One optimizer of one run."""

    label: str
    steps: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """The lr in force, one a group"""

    def add(self, step: int, scale: float | None, rates: Sequence[float | None]) -> None:
        """Take in a step."""
        self.steps.append(step)
        self.scale.append(_drawn(scale))
        self.rates.append(tuple(_drawn(rate) for rate in rates))

    @staticmethod
    def of_track(track: Track) -> "Curves":
        """Those of a run that has just ended."""
        curves = Curves(track.label)
        for row in track.rows:
            curves.add(row.step, row.scale, row.effective_lr)
        return curves

    def groups(self) -> list[list[float]]:
        """The lr in force by group, groups that ran alike taken once."""
        count = max(len(rates) for rates in self.rates)
        columns = [
            tuple(rates[i] if i < len(rates) else math.nan for rates in self.rates)
            for i in range(count)
        ]
        return [list(column) for column in {repr(column): column for column in columns}.values()]


def _drawn(number: float | None) -> float:
    """On a logarithmic axis there is no 0."""
    return number if number is not None and number > 0 else math.nan


def load(folder: Path, *, name: str = "") -> list[Curves]:
    """The histories in a log folder; a line that was never finished is left out.

    Raises:
        ValueError: if there are none.
    """
    path = folder / HISTORY
    if not path.is_file():
        raise ValueError(f"there is no {HISTORY} in {folder}; give folders that --log has made.")
    found: dict[str, Curves] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "step" in row and "event" not in row:
            label = row["optimizer"]
            curves = found.setdefault(label, Curves(f"{name} {label}" if name else label))
            curves.add(row["step"], row["scale"], row["effective_lr"])
    if not found:
        raise ValueError(f"{folder} has no steps to draw: no optimizer made one in that run.")
    return list(found.values())


def load_all(folders: Sequence[Path]) -> list[Curves]:
    """The histories of several runs, told apart by the names of their folders."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(folders) == 1:
        names = [""]
    return [
        curves
        for folder, name in zip(folders, names, strict=True)
        for curves in load(folder, name=name)
    ]


def draw(curves: Sequence[Curves], path: Path) -> None:
    """Draw the scale above the lr in force, and save it."""
    import matplotlib.pyplot as plt

    scaled = [one for one in curves if any(not math.isnan(value) for value in one.scale)]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        panels = 2 if scaled else 1
        figure, axes = plt.subplots(
            panels, 1, figsize=(8, 1.2 + 2.6 * panels), sharex=True, squeeze=False
        )
        colors = [f"C{i % 10}" for i in range(len(curves))]
        for one, color in zip(curves, colors, strict=True):
            if scaled:
                axes[0, 0].plot(one.steps, one.scale, color=color, label=one.label)
            for i, rates in enumerate(one.groups()):
                style = ("-", "--", ":", "-.")[i % 4]
                label = one.label if len(one.groups()) == 1 else f"{one.label}, group {i}"
                axes[-1, 0].plot(one.steps, rates, style, color=color, label=label)
        if scaled:
            axes[0, 0].set_ylabel("learned scale")
        axes[-1, 0].set_ylabel("lr in force")
        axes[-1, 0].set_xlabel("step")
        for axis in axes[:, 0]:
            axis.set_yscale("log")
            axis.grid(True, alpha=0.3, which="major")
        handles = axes[-1, 0].get_legend_handles_labels()
        figure.legend(
            *handles, loc="outside upper center", ncols=min(3, len(handles[0])), frameon=False
        )
        figure.set_layout_engine("constrained")
        figure.savefig(path, dpi=150)
        plt.close(figure)
