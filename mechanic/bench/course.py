"""The course of a run, in any framework: the points of its curve, and whether it has diverged."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mechanic.bench.record import Curve

_POINTS = 100  # of a curve, or up to twice as many


class DivergedError(Exception):
    """The loss has become NaN or infinite."""


class Course:
    """What is seen of a run while it runs.

    Args:
        steps: the number of all steps.
        read: the losses of some steps as numbers. Only there does the host wait for the device.
        report: is told the number of steps done and of all steps.
    """

    def __init__(
        self,
        steps: int,
        read: Callable[[list[Any]], Sequence[float]],
        report: Callable[[int, int], None],
    ) -> None:
        self.steps, self.done = steps, 0
        self._read, self._report = read, report
        self._every = max(1, steps // _POINTS)
        self._losses: list[Any] = []
        self._points: list[tuple[int, float, float]] = []

    def add(self, loss: Any, rate: Callable[[], float]) -> None:
        """Count a step, by its loss and the lr in force.

        Raises:
            DivergedError: if no loss since the last point is finite.
        """
        self.done += 1
        self._losses.append(loss)
        if self.done % self._every and self.done != self.steps:
            return
        losses = self._read(self._losses)
        mean = sum(losses) / len(losses)
        if not any(map(math.isfinite, losses)):
            raise DivergedError(f"the loss is {mean} at step {self.done} of {self.steps}")
        self._points.append((self.done, mean, rate()))
        self._losses.clear()
        self._report(self.done, self.steps)

    @property
    def curve(self) -> Curve:
        """The points so far."""
        return Curve(*(list(column) for column in zip(*self._points, strict=True)))


def require_finite(metrics: Mapping[str, float], steps: int) -> None:
    """Refuse what a run has come to if it is not finite.

    Raises:
        DivergedError: if a metric is NaN or infinite.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise DivergedError(f"{name} is {value} at the end, after {steps} steps")
