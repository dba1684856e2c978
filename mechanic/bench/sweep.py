"""A base at every learning rate of a grid: which one is best, and what it has learned."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mechanic.bench.record import Run


@dataclass(frozen=True)
class Sweep:
    """A base at every learning rate of its grid."""

    runs: Mapping[float, tuple[Run, ...]]
    """The runs by lr, in ascending order."""
    best_lr: float | None
    """None if every lr has a seed that diverged or failed."""

    @property
    def best(self) -> tuple[Run, ...]:
        """The runs at the best lr."""
        return () if self.best_lr is None else self.runs[self.best_lr]

    @property
    def edge(self) -> str:
        """The end of the grid at which the best lr lies: "lowest" or "highest", "only" in a grid of
        one lr, or empty. At an end, a wider grid might hold a better lr."""
        if self.best_lr is None or len(self.runs) == 1:
            return "" if self.best_lr is None else "only"
        lrs = list(self.runs)
        return {lrs[0]: "lowest", lrs[-1]: "highest"}.get(self.best_lr, "")


def find_best(runs: Mapping[float, tuple[Run, ...]]) -> Sweep:
    """Find the best lr of a sweep: that of the lowest mean train loss, among those at which no seed
    diverged or failed."""
    losses = {lr: final_losses(group) for lr, group in runs.items() if not trouble(group)}
    seeds = max(map(len, losses.values()), default=0)  # an lr with fewer is unfinished
    means = {lr: fmean(found.values()) for lr, found in losses.items() if len(found) == seeds}
    return Sweep(runs, min(means, key=lambda lr: means[lr], default=None))


def gain(sweep: Sweep) -> float:
    """What the best of a sweep learned: its loss at the start minus its loss at the end."""
    return fmean(run.start_loss - final_loss(run) for run in sweep.best) if sweep.best else math.nan


def final_loss(run: Run) -> float:
    """The train loss at the end; NaN if the run diverged or failed."""
    return run.metrics.get("train_loss", math.nan) if run.status == "done" else math.nan


def final_losses(runs: Iterable[Run], metric: str = "train_loss") -> dict[int, float]:
    """The final value of a metric by seed, for the runs that did not diverge or fail."""
    done = {r.seed: r.metrics.get(metric, math.nan) for r in runs if r.status == "done"}
    return {seed: value for seed, value in done.items() if math.isfinite(value)}


def trouble(runs: Sequence[Run]) -> str:
    """How many runs diverged or failed, as in "diverged 2/3"; empty if none did."""
    # A run that ended as done, but without a finite loss, counts as diverged.
    lost = Counter(
        "diverged" if run.status == "done" else run.status
        for run in runs
        if not math.isfinite(final_loss(run))
    )
    return ", ".join(f"{status} {lost[status]}/{len(runs)}" for status in sorted(lost))


def best_by_metric(sweep: Sweep, metric: str) -> tuple[float, dict[int, float]] | None:
    """The lr of the sweep that is best by the given metric, and its values by seed."""
    values = {
        lr: final_losses(runs, metric) for lr, runs in sweep.runs.items() if not trouble(runs)
    }
    means = {lr: fmean(found.values()) for lr, found in values.items() if found}
    if not means:
        return None
    sign = 1.0 if metric.endswith("loss") else -1.0
    lr = min(means, key=lambda lr: sign * means[lr])
    return lr, values[lr]
