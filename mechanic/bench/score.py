"""What the runs say: each method against the best of a sweep, and how much of it is seed noise.

A row of the tables is a base on a task. Its sweep sets the scale: 0 % excess is the best learning
rate of the sweep, 100 % is where training began. Nothing here reads or writes.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mechanic.bench.noise import Difference, paired
from mechanic.bench.record import Kind, Run

NO_LEARNING = 100.0  # percent: what a method that diverged, failed or ended above the start counts


@dataclass(frozen=True)
class Method:
    """A column of the tables: a learning-rate-free method."""

    name: str
    kind: Kind
    lr: float | None = None
    """Typed; only where the method was run at several on one task, each a method of its own."""

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name if self.lr is None else f"{self.name} (lr {short(self.lr)})"


@dataclass(frozen=True)
class Sweep:
    """A base at every learning rate of its grid."""

    runs: Mapping[float, tuple[Run, ...]]
    """By lr, ascending."""
    best_lr: float | None
    """None where every lr has a seed that diverged or failed."""

    @property
    def best(self) -> tuple[Run, ...]:
        """The runs at the best lr."""
        return () if self.best_lr is None else self.runs[self.best_lr]

    @property
    def edge(self) -> str:
        """Which end of the grid the best lies on, if any: a wider grid might hold a better one."""
        if self.best_lr is None or len(self.runs) == 1:
            return "" if self.best_lr is None else "only"
        lrs = list(self.runs)
        return {lrs[0]: "lowest", lrs[-1]: "highest"}.get(self.best_lr, "")


@dataclass(frozen=True)
class Result:
    """A method on a row, over its seeds."""

    method: Method
    runs: tuple[Run, ...]
    excess: Difference | None
    """Percent over the best of the sweep; None in trouble, or with nothing to compare with."""
    trouble: str = ""
    """Why it counts as no learning: "diverged 2/3"."""

    @property
    def counted(self) -> float:
        """Its excess in means and ranks; NaN where it has none."""
        if self.trouble:
            return NO_LEARNING
        return self.excess.mean if self.excess else math.nan


@dataclass(frozen=True)
class Row:
    """A base on a task, and all that was run on it."""

    suite: str
    task: str
    base: str
    sweep: Sweep | None
    results: tuple[Result, ...]
    left_out: str = ""
    """Why the methods are not scored, where there is a sweep."""

    @property
    def scored(self) -> bool:
        """Whether it counts in the overall table."""
        return self.sweep is not None and not self.left_out

    @property
    def start(self) -> float:
        """The train loss before the first step, as a mean over whatever is known of it."""
        runs = self.sweep.best if self.scored and self.sweep else self.all_runs
        known = [run.start_loss for run in runs if math.isfinite(run.start_loss)]
        return fmean(known) if known else math.nan

    @property
    def all_runs(self) -> list[Run]:
        """The sweep's and the methods'."""
        swept = [run for runs in (self.sweep.runs if self.sweep else {}).values() for run in runs]
        return swept + [run for result in self.results for run in result.runs]

    @property
    def metric(self) -> str:
        """What the task shows beside the train loss; empty if nothing."""
        names = {run.metric for run in self.all_runs} - {"", "train_loss"}
        return min(names, default="")

    def result(self, method: Method) -> Result | None:
        """What a method did here, None if it was not run."""
        return next((result for result in self.results if result.method == method), None)


@dataclass(frozen=True)
class Summary:
    """A method over all rows that it was run on."""

    method: Method
    rows: int
    mean: float
    worst: float
    rank: float
    """Mean of its rank among the methods of each row; 1 is best."""
    by_suite: Mapping[str, float]
    """Its mean excess in each suite that it was run in."""


@dataclass(frozen=True)
class Duel:
    """Mechanic's default against another method: the rows on which it is better, and so on."""

    other: Method
    better: int = 0
    worse: int = 0
    within: int = 0
    """Within seed noise."""
    untold: int = 0
    """One seed, or trouble with both."""


@dataclass(frozen=True)
class Comparison:
    """All rows of one budget."""

    budget: str
    rows: tuple[Row, ...]
    methods: tuple[Method, ...]
    """Mechanic's default first, then its others, then the peers."""
    default: Method | None

    @property
    def scored(self) -> list[Row]:
        """The rows of the overall table."""
        return [row for row in self.rows if row.scored]

    @property
    def suites(self) -> list[str]:
        """Those that have a row in it."""
        return list(dict.fromkeys(row.suite for row in self.scored))

    @property
    def tasks(self) -> dict[tuple[str, str], list[Row]]:
        """The rows of each task, by suite and name."""
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            found[row.suite, row.task].append(row)
        return found

    @property
    def unswept(self) -> list[Row]:
        """The rows that have nothing to be compared with."""
        return [row for row in self.rows if row.sweep is None]


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """One comparison a budget, the smallest budget first. Of equal runs the last one counts."""
    latest = {(r.budget, r.suite, r.task, r.base, r.kind, r.method, r.lr, r.seed): r for r in runs}
    by_budget: dict[str, list[Run]] = defaultdict(list)
    for key in sorted(latest):
        by_budget[key[0]].append(latest[key])
    order = {"smoke": 0, "short": 1, "full": 2}
    budgets = sorted(by_budget, key=lambda budget: (order.get(budget, 3), budget))
    return [_compare_budget(budget, by_budget[budget]) for budget in budgets]


def _compare_budget(budget: str, runs: Sequence[Run]) -> Comparison:
    split = _typed_several(runs)
    free = {_method(run, split) for run in runs if run.kind != "sweep"}
    ours = [method for method in free if (method.name, method.kind) == ("mechanic", "mechanic")]
    # Of several typed lrs the one nearest to 1, which is what a user of Mechanic would type.
    default = min(ours, key=lambda m: (abs(math.log(m.lr or 1.0)), m.lr or 1.0), default=None)
    methods = sorted(free, key=lambda m: (m != default, m.kind, m.name, m.lr or 0.0))
    rows = []
    for suite, task in sorted({(run.suite, run.task) for run in runs}, key=_natural):
        here = [run for run in runs if (run.suite, run.task) == (suite, task)]
        for base in sorted({run.base for run in here if run.base}) or [""]:
            rows.append(_row((suite, task, base), here, methods, split))
    return Comparison(budget, tuple(rows), tuple(methods), default)


def _natural(names: tuple[str, str]) -> list[list[tuple[int, str]]]:
    """So that batch-16 comes before batch-128."""
    parts = [re.split(r"(\d+)", name) for name in names]
    return [[(int(p), "") if p.isdecimal() else (-1, p) for p in split] for split in parts]


def _typed_several(runs: Iterable[Run]) -> set[tuple[str, Kind]]:
    lrs = defaultdict(set)
    for run in runs:
        lrs[run.suite, run.task, run.base, run.method, run.kind].add(run.lr)
    return {(key[3], key[4]) for key, typed in lrs.items() if len(typed) > 1}


def _method(run: Run, split: set[tuple[str, Kind]]) -> Method:
    several = (run.method, run.kind) in split
    return Method(run.method, run.kind, run.lr if several else None)


def _row(
    key: tuple[str, str, str],
    task_runs: Sequence[Run],
    methods: Sequence[Method],
    split: set[tuple[str, Kind]],
) -> Row:
    by_lr: dict[float, list[Run]] = defaultdict(list)
    by_method: dict[Method, list[Run]] = defaultdict(list)
    for run in task_runs:
        if run.kind == "sweep" and run.base == key[2]:
            by_lr[run.lr].append(run)
        elif run.kind != "sweep" and run.base in ("", key[2]):
            by_method[_method(run, split)].append(run)
    sweep = find_best({lr: tuple(by_lr[lr]) for lr in sorted(by_lr)}) if by_lr else None
    gained = gain(sweep) if sweep else math.nan
    left_out = ""
    if sweep and sweep.best_lr is None:
        left_out = "no learning rate of the sweep came through with all seeds"
    elif sweep and math.isnan(gained):
        left_out = "the train loss at the start is not known"
    elif sweep and not gained > 0:
        left_out = "no learning rate of the sweep learned anything"
    results = tuple(
        _result(method, by_method[method], sweep, gained) for method in methods if by_method[method]
    )
    return Row(*key, sweep, results, left_out)


def _result(method: Method, runs: Sequence[Run], sweep: Sweep | None, gained: float) -> Result:
    broken = trouble(runs)
    if broken or sweep is None or sweep.best_lr is None or not gained > 0:
        return Result(method, tuple(runs), None, broken)
    excess = paired(final_losses(runs), final_losses(sweep.best), 100 / gained)
    if excess and excess.mean > NO_LEARNING:
        return Result(method, tuple(runs), None, "above start")
    return Result(method, tuple(runs), excess)


def find_best(runs: Mapping[float, tuple[Run, ...]]) -> Sweep:
    """The sweep with its best lr: lowest mean train loss; none at which a seed went wrong."""
    whole = {lr: final_losses(group) for lr, group in runs.items() if not trouble(group)}
    most = max(map(len, whole.values()), default=0)  # seeds: a sweep may be unfinished
    means = {lr: fmean(found.values()) for lr, found in whole.items() if len(found) == most}
    return Sweep(runs, min(means, key=lambda lr: means[lr], default=None))


def gain(sweep: Sweep) -> float:
    """What the best of a sweep learned: the loss at the start less that at the end."""
    return fmean(run.start_loss - final_loss(run) for run in sweep.best) if sweep.best else math.nan


def final_loss(run: Run) -> float:
    """The train loss at the end; NaN unless the run came through."""
    return run.metrics.get("train_loss", math.nan) if run.status == "done" else math.nan


def final_losses(runs: Iterable[Run], metric: str = "train_loss") -> dict[int, float]:
    """By seed, of the runs that came through."""
    done = {r.seed: r.metrics.get(metric, math.nan) for r in runs if r.status == "done"}
    return {seed: value for seed, value in done.items() if math.isfinite(value)}


def trouble(runs: Sequence[Run]) -> str:
    """How many runs diverged or failed, for people: "diverged 2/3"; empty if none."""
    # A run that claims to be done and has no finite loss is not taken at its word.
    lost = Counter(
        "diverged" if run.status == "done" else run.status
        for run in runs
        if not math.isfinite(final_loss(run))
    )
    return ", ".join(f"{status} {lost[status]}/{len(runs)}" for status in sorted(lost))


def ranks(row: Row) -> dict[Method, float]:
    """Of the methods of a row from 1, the best; equals share a rank, and trouble comes last."""
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
    """Each method over the scored rows that it was run on, the lowest mean excess first.

    Those that were not run on all rows come after those that were: their means are of other rows.
    """
    counted: dict[Method, list[float]] = defaultdict(list)
    in_suite: dict[Method, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    placed: dict[Method, list[float]] = defaultdict(list)
    for row in comparison.scored:
        for method, rank in ranks(row).items():
            result = row.result(method)
            assert result is not None
            counted[method].append(result.counted)
            in_suite[method][row.suite].append(result.counted)
            placed[method].append(rank)
    summaries = [
        Summary(
            method,
            len(values),
            fmean(values),
            max(values),
            fmean(placed[method]),
            {suite: fmean(found) for suite, found in in_suite[method].items()},
        )
        for method, values in counted.items()
    ]
    most = max((summary.rows for summary in summaries), default=0)
    return sorted(summaries, key=lambda s: (s.rows < most, s.mean, s.method.label))


def duels(comparison: Comparison) -> list[Duel]:
    """Mechanic's default against every other method, over the rows that both were run on."""
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
            return "untold"
        return "worse" if ours.trouble else "better"
    gap = paired(final_losses(ours.runs), final_losses(theirs.runs))
    return gap.verdict if gap else "untold"


def best_by_metric(sweep: Sweep, metric: str) -> tuple[float, dict[int, float]] | None:
    """The lr of the sweep that is best by another metric, and its values by seed."""
    values = {
        lr: final_losses(runs, metric) for lr, runs in sweep.runs.items() if not trouble(runs)
    }
    means = {lr: fmean(found.values()) for lr, found in values.items() if found}
    if not means:
        return None
    sign = 1.0 if metric.endswith("loss") else -1.0
    lr = min(means, key=lambda lr: sign * means[lr])
    return lr, values[lr]


def highest_rate(run: Run) -> float:
    """The highest lr in force: what a sweep types, since a schedule only lowers it."""
    return max((lr for lr in run.curve.lr if math.isfinite(lr)), default=math.nan)


def short(number: float) -> str:
    """A learning rate as one would type it: 0.01, 1e-4, 3e+4 as 3e4."""
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
