"""What the runs say: how each method compares with the best of a sweep, and what is seed noise.

A row of the tables is a base on a task. Its sweep sets the scale: an excess of 0 % is the best
learning rate of the sweep, 100 % is the loss before training. Nothing here reads or writes files.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from mechanic.bench.noise import Difference, paired
from mechanic.bench.record import MethodKind, Run
from mechanic.bench.sweep import Sweep, final_loss, final_losses, find_best, gain, trouble

NO_LEARNING = 100.0  # the excess in percent of a method that diverged, failed, or raised the loss
LOST = 20.0  # the excess in percent above which a run is lost


@dataclass(frozen=True)
class ScoredMethod:
    """A learning-rate-free method, as a column of the tables."""

    name: str
    kind: MethodKind
    lr: float | None = None
    """The typed lr, if the method was run with several on one task: each is a column then."""

    @property
    def label(self) -> str:
        """The name to show."""
        return self.name if self.lr is None else f"{self.name} (lr {format_lr(self.lr)})"


class LostRun(NamedTuple):
    """A run that should not have been left alone."""

    run: Run
    cause: str
    """In words: "diverged", "failed", "above the start" or "excess +57.1 %"."""


def find_lost(runs: Iterable[Run], sweep: Sweep | None = None) -> list[LostRun]:
    """Find the runs that are lost: those whose loss at the end is not finite, or is above that at
    their start, or has an excess over the best of the sweep of more than `LOST` percent.

    Each run is compared with the mean of the best of the sweep, over all its seeds. Without a sweep
    that has learned something, the last cause is unknown.
    """
    best = gained = math.nan
    if sweep is not None and sweep.best:
        best, gained = fmean(final_losses(sweep.best).values()), gain(sweep)
    found = []
    for run in runs:
        loss = final_loss(run)
        excess = 100 * (loss - best) / gained if gained > 0 else math.nan
        if not math.isfinite(loss):
            found.append(LostRun(run, "diverged" if run.status == "done" else run.status))
        elif loss > run.start_loss:
            found.append(LostRun(run, "above the start"))
        elif excess > LOST:
            found.append(LostRun(run, f"excess {excess:+.1f} %"))
    return found


@dataclass(frozen=True)
class Result:
    """The runs of a method on a row, one for each seed."""

    method: ScoredMethod
    runs: tuple[Run, ...]
    excess: Difference | None
    """In percent over the best of the sweep; None if runs went wrong or there is no sweep."""
    trouble: str = ""
    """What went wrong, for example "diverged 2/3": the method then counts as `NO_LEARNING`."""
    lost: tuple[LostRun, ...] = ()
    """The runs that are lost, whatever the mean over the others says."""

    @property
    def counted(self) -> float:
        """The excess that means and ranks use; NaN if there is none."""
        if self.trouble:
            return NO_LEARNING
        return self.excess.mean if self.excess else math.nan


@dataclass(frozen=True)
class ScoreRow:
    """A base on a task, with all its runs."""

    suite: str
    task: str
    base: str
    sweep: Sweep | None
    results: tuple[Result, ...]
    left_out: str = ""
    """Why the methods are not scored although there is a sweep; empty if they are."""

    @property
    def scored(self) -> bool:
        """Whether the row is in the overall table."""
        return self.sweep is not None and not self.left_out

    @property
    def start(self) -> float:
        """The mean train loss before the first step, over the runs in which it is known."""
        runs = self.sweep.best if self.scored and self.sweep else self.all_runs
        known = [run.start_loss for run in runs if math.isfinite(run.start_loss)]
        return fmean(known) if known else math.nan

    @property
    def lost_by_sweep(self) -> list[LostRun]:
        """The runs at the best lr of the sweep that are lost."""
        return find_lost(self.sweep.best, self.sweep) if self.sweep else []

    @property
    def all_runs(self) -> list[Run]:
        """The runs of the sweep and of all methods."""
        swept = [run for runs in (self.sweep.runs if self.sweep else {}).values() for run in runs]
        return swept + [run for result in self.results for run in result.runs]

    @property
    def metric(self) -> str:
        """The metric to show beside the train loss; empty if there is none."""
        names = {run.metric for run in self.all_runs} - {"", "train_loss"}
        return min(names, default="")

    def result(self, method: ScoredMethod) -> Result | None:
        """The result of a method on this row; None if it was not run."""
        return next((result for result in self.results if result.method == method), None)


@dataclass(frozen=True)
class Summary:
    """A method over all rows that it was run on."""

    method: ScoredMethod
    rows: int
    mean: float
    worst: float
    rank: float
    """The mean of its ranks among the methods of each row; 1 is best."""
    by_suite: Mapping[str, float]
    """The mean excess for each suite in which it was run."""
    lost: int
    """The number of its runs that are lost, over all rows, those without a sweep as well. A run
    that is compared with several bases counts on each of their rows."""
    runs: int
    """The number of its runs, counted in the same way."""

    @property
    def lost_of_runs(self) -> str:
        """In words: "3 of 60"."""
        return f"{self.lost} of {self.runs}"


@dataclass(frozen=True)
class Duel:
    """Mechanic's default against another method: the number of rows on which it is better, …"""

    other: ScoredMethod
    better: int = 0
    worse: int = 0
    within_noise: int = 0
    undecided: int = 0
    """Only one seed, or both methods went wrong."""


@dataclass(frozen=True)
class Comparison:
    """All rows of one budget."""

    budget: str
    rows: tuple[ScoreRow, ...]
    methods: tuple[ScoredMethod, ...]
    """Mechanic's default, then its other presets, then the peers."""
    default: ScoredMethod | None

    @property
    def scored(self) -> list[ScoreRow]:
        """The rows of the overall table."""
        return [row for row in self.rows if row.scored]

    @property
    def suites(self) -> list[str]:
        """The suites of the overall table."""
        return list(dict.fromkeys(row.suite for row in self.scored))

    @property
    def tasks(self) -> dict[tuple[str, str], list[ScoreRow]]:
        """The rows of each task, by suite and name."""
        found: dict[tuple[str, str], list[ScoreRow]] = defaultdict(list)
        for row in self.rows:
            found[row.suite, row.task].append(row)
        return found

    def results(self, method: ScoredMethod) -> list[Result]:
        """The results of a method on all rows that it was run on."""
        return [result for row in self.rows if (result := row.result(method))]

    @property
    def unswept(self) -> list[ScoreRow]:
        """The rows without a sweep."""
        return [row for row in self.rows if row.sweep is None]


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Make one comparison for each budget, the smallest budget first. If a run is given twice, the
    later one counts."""
    latest = {(r.budget, r.suite, r.task, r.base, r.kind, r.method, r.lr, r.seed): r for r in runs}
    by_budget: dict[str, list[Run]] = defaultdict(list)
    for key in sorted(latest):
        by_budget[key[0]].append(latest[key])
    order = {"smoke": 0, "short": 1, "full": 2}
    budgets = sorted(by_budget, key=lambda budget: (order.get(budget, 3), budget))
    return [_compare_budget(budget, by_budget[budget]) for budget in budgets]


def _compare_budget(budget: str, runs: Sequence[Run]) -> Comparison:
    several_lrs = _with_several_lrs(runs)
    found = {_method(run, several_lrs) for run in runs if run.kind != "sweep"}
    ours = [method for method in found if (method.name, method.kind) == ("mechanic", "mechanic")]
    # If several lrs were typed, the nearest to 1, which is what a user of Mechanic would type.
    default = min(ours, key=lambda m: (abs(math.log(m.lr or 1.0)), m.lr or 1.0), default=None)
    methods = sorted(found, key=lambda m: (m != default, m.kind, m.name, m.lr or 0.0))
    rows = []
    for suite, task in sorted({(run.suite, run.task) for run in runs}, key=_natural_order):
        task_runs = [run for run in runs if (run.suite, run.task) == (suite, task)]
        for base in sorted({run.base for run in task_runs if run.base}) or [""]:
            rows.append(_row((suite, task, base), task_runs, methods, several_lrs))
    return Comparison(budget, tuple(rows), tuple(methods), default)


def _natural_order(names: tuple[str, str]) -> list[list[tuple[int, str]]]:
    """A key for sorting that puts batch-16 before batch-128."""
    parts = [re.split(r"(\d+)", name) for name in names]
    return [[(int(p), "") if p.isdecimal() else (-1, p) for p in split] for split in parts]


def _with_several_lrs(runs: Iterable[Run]) -> set[tuple[str, MethodKind]]:
    """The methods that were run with several typed lrs on one task."""
    lrs = defaultdict(set)
    for run in runs:
        lrs[run.suite, run.task, run.base, run.method, run.kind].add(run.lr)
    return {(key[3], key[4]) for key, typed in lrs.items() if len(typed) > 1}


def _method(run: Run, several_lrs: set[tuple[str, MethodKind]]) -> ScoredMethod:
    several = (run.method, run.kind) in several_lrs
    return ScoredMethod(run.method, run.kind, run.lr if several else None)


def _row(
    key: tuple[str, str, str],
    task_runs: Sequence[Run],
    methods: Sequence[ScoredMethod],
    several_lrs: set[tuple[str, MethodKind]],
) -> ScoreRow:
    by_lr: dict[float, list[Run]] = defaultdict(list)
    by_method: dict[ScoredMethod, list[Run]] = defaultdict(list)
    for run in task_runs:
        if run.kind == "sweep" and run.base == key[2]:
            by_lr[run.lr].append(run)
        elif run.kind != "sweep" and run.base in ("", key[2]):
            by_method[_method(run, several_lrs)].append(run)
    sweep = find_best({lr: tuple(by_lr[lr]) for lr in sorted(by_lr)}) if by_lr else None
    gained = gain(sweep) if sweep else math.nan
    left_out = ""
    if sweep and sweep.best_lr is None:
        left_out = "at every learning rate of the sweep a seed diverged or failed"
    elif sweep and math.isnan(gained):
        left_out = "the train loss at the start is not known"
    elif sweep and not gained > 0:
        left_out = "no learning rate of the sweep learned anything"
    results = tuple(
        _result(method, by_method[method], sweep, gained) for method in methods if by_method[method]
    )
    return ScoreRow(*key, sweep, results, left_out)


def _result(
    method: ScoredMethod, runs: Sequence[Run], sweep: Sweep | None, gained: float
) -> Result:
    wrong, lost = trouble(runs), tuple(find_lost(runs, sweep))
    if wrong or sweep is None or sweep.best_lr is None or not gained > 0:
        return Result(method, tuple(runs), None, wrong, lost)
    excess = paired(final_losses(runs), final_losses(sweep.best), 100 / gained)
    if excess and excess.mean > NO_LEARNING:
        return Result(method, tuple(runs), None, "above start", lost)
    return Result(method, tuple(runs), excess, lost=lost)


def ranks(row: ScoreRow) -> dict[ScoredMethod, float]:
    """The ranks of the methods of a row, from 1 for the best. Equal methods share a rank. Methods
    with runs that went wrong come last."""
    keys = {
        result.method: (bool(result.trouble), result.counted)
        for result in row.results
        if not math.isnan(result.counted)
    }
    values = list(keys.values())
    return {
        method: 1 + sum(value < key for value in values) + (values.count(key) - 1) / 2
        for method, key in keys.items()
    }


def summarize(comparison: Comparison) -> list[Summary]:
    """Sum up each method over the scored rows that it was run on, the lowest mean excess first.

    Methods that were run on fewer rows come last, because their means are not comparable.
    """
    counted: dict[ScoredMethod, list[float]] = defaultdict(list)
    in_suite: dict[ScoredMethod, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ranked: dict[ScoredMethod, list[float]] = defaultdict(list)
    for row in comparison.scored:
        for method, rank in ranks(row).items():
            result = row.result(method)
            assert result is not None
            counted[method].append(result.counted)
            in_suite[method][row.suite].append(result.counted)
            ranked[method].append(rank)
    summaries = [
        Summary(
            method,
            len(values),
            fmean(values),
            max(values),
            fmean(ranked[method]),
            {suite: fmean(found) for suite, found in in_suite[method].items()},
            lost=sum(len(result.lost) for result in comparison.results(method)),
            runs=sum(len(result.runs) for result in comparison.results(method)),
        )
        for method, values in counted.items()
    ]
    most_rows = max((summary.rows for summary in summaries), default=0)
    return sorted(summaries, key=lambda s: (s.rows < most_rows, s.mean, s.method.label))


def duels(comparison: Comparison) -> list[Duel]:
    """Compare Mechanic's default with every other method, on the rows that both were run on."""
    if comparison.default is None:
        return []
    found = []
    for other in comparison.methods:
        verdicts = Counter(
            _verdict(mine, theirs)
            for row in comparison.scored
            if (mine := row.result(comparison.default)) and (theirs := row.result(other))
        )
        if other != comparison.default and verdicts:
            found.append(Duel(other, **verdicts))
    return found


def _verdict(ours: Result, theirs: Result) -> str:
    if ours.trouble or theirs.trouble:
        if ours.trouble and theirs.trouble:
            return "undecided"
        return "worse" if ours.trouble else "better"
    gap = paired(final_losses(ours.runs), final_losses(theirs.runs))
    return gap.verdict if gap else "undecided"


def highest_rate(run: Run) -> float:
    """The highest lr in force. In a sweep it is the typed lr, since schedules only lower it."""
    return max((lr for lr in run.curve.lr if math.isfinite(lr)), default=math.nan)


def format_lr(number: float) -> str:
    """A learning rate as one would type it: 0.01, 1e-4, 3e4."""
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
