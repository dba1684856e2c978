"""Draws histories: the scale and the learning rates over the steps, of one or several runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mechanic.run.log import read
from mechanic.run.spool import History

_NAMED = 12  # so many curves have a name in the legend
_STYLES = ("-", "--", ":", "-.")  # of the groups; where there are more, the range of all is drawn


@dataclass
class Curves:
    """What is drawn of one optimizer of one run."""

    label: str
    steps: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """The lr in force at each step, for each group."""

    def add(self, step: int, scale: float | None, rates: Sequence[float | None]) -> None:
        """Add a step."""
        self.steps.append(step)
        self.scale.append(_positive_or_nan(scale))
        self.rates.append(tuple(_positive_or_nan(rate) for rate in rates))

    @staticmethod
    def of_history(history: History) -> "Curves":
        """The curves of an optimizer whose run has just ended."""
        curves = Curves(history.label)
        for row in history.rows:
            curves.add(row.step, row.scale, row.effective_lr)
        return curves

    def groups(self) -> list[list[float]]:
        """The lr in force of each group; groups with equal values are drawn once."""
        count = max(len(rates) for rates in self.rates)
        columns = [
            tuple(rates[i] if i < len(rates) else math.nan for rates in self.rates)
            for i in range(count)
        ]
        return [list(column) for column in {repr(column): column for column in columns}.values()]


def _positive_or_nan(number: float | None) -> float:
    """A number for a logarithmic axis, which has no 0."""
    return number if number is not None and number > 0 else math.nan


def load(folder: Path, *, name: str = "") -> list[Curves]:
    """Read the curves of a log folder.

    Raises:
        ValueError: if there is no history, or no step in it.
    """
    found: dict[str, Curves] = {}
    for row in read(folder):
        if "event" not in row:
            label = row["optimizer"]
            curves = found.setdefault(label, Curves(f"{name} {label}" if name else label))
            curves.add(row["step"], row["scale"], row["effective_lr"])
    if not found:
        raise ValueError(f"{folder} has no steps to draw: no optimizer took a step in that run.")
    return list(found.values())


def load_all(folders: Sequence[Path]) -> list[Curves]:
    """Read the histories of several runs, labelled with the names of their folders."""
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


def _range(groups: list[list[float]]) -> tuple[list[float], list[float]]:
    """The lowest and the highest lr at each step; NaN where there is none."""
    seen = [[rate for rate in rates if not math.isnan(rate)] for rates in zip(*groups, strict=True)]
    ends = [(min(rates), max(rates)) if rates else (math.nan, math.nan) for rates in seen]
    return [low for low, _ in ends], [high for _, high in ends]


def draw(curves: Sequence[Curves], path: Path) -> None:
    """Draw the scale, below it the lr in force, and save the figure."""
    import matplotlib.pyplot as plt

    has_scale = any(not math.isnan(value) for one in curves for value in one.scale)
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        panels = 2 if has_scale else 1
        figure, axes = plt.subplots(
            panels, 1, figsize=(8, 1.2 + 2.6 * panels), sharex=True, squeeze=False
        )
        colors = [f"C{i % 10}" for i in range(len(curves))]
        for one, color in zip(curves, colors, strict=True):
            if has_scale:
                axes[0, 0].plot(one.steps, one.scale, color=color, label=one.label)
            groups = one.groups()
            if len(groups) > len(_STYLES):
                low, high = _range(groups)
                label = f"{one.label}, lowest to highest of {len(groups)} groups"
                axes[-1, 0].fill_between(one.steps, low, high, color=color, alpha=0.3, label=label)
                axes[-1, 0].plot(one.steps, low, one.steps, high, color=color, linewidth=0.8)
                continue
            for i, (rates, style) in enumerate(zip(groups, _STYLES, strict=False)):
                label = one.label if len(groups) == 1 else f"{one.label}, group {i}"
                axes[-1, 0].plot(one.steps, rates, style, color=color, label=label)
        if has_scale:
            axes[0, 0].set_ylabel("learned scale")
        axes[-1, 0].set_ylabel("lr in force")
        axes[-1, 0].set_xlabel("step")
        for axis in axes[:, 0]:
            axis.set_yscale("log")
            axis.grid(True, alpha=0.3, which="major")
        handles, labels = axes[-1, 0].get_legend_handles_labels()
        if len(labels) > _NAMED:
            more = f", and {len(labels) - _NAMED} more"
            handles, labels = handles[:_NAMED], labels[:_NAMED]
            labels[-1] += more
        columns = min(3, len(labels))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
        figure.set_layout_engine("constrained")
        figure.savefig(path, dpi=150)
        plt.close(figure)
