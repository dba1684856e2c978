"""What is said in sentences, the same on the page and in Markdown."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from mechanic.bench.record import Run
from mechanic.bench.report.look import count_of, number, percent
from mechanic.bench.score import Comparison, Duel, Result, Row, short, summarize

EXPLANATION = (
    "Excess is (loss − best) / (start − best) of the train loss at the end: 0 % is the best "
    "learning rate of the base's sweep, 100 % is where training began, below 0 % is better than "
    "the sweep. A method of which any seed diverged or failed, or that ended above the start, "
    "counts as 100 % and ranks last."
)
NOISE = (
    "≈ marks a difference to the best of the sweep within seed noise: zero lies in the 95 % "
    "interval (Student's t, seeds paired). The best of the sweep was chosen in hindsight on these "
    "very seeds, which favours the sweep."
)
PLOTS = (
    "Bands reach from the lowest to the highest seed. ✕ on the upper edge: a seed diverged or "
    "failed at this learning rate; ▲: the loss lies above the plot. ◆: the highest learning rate "
    "that a method had in force on this base, which is also the lr of the tables. ± is the "
    "standard deviation over seeds."
)
ONE_SEED = "With one seed nothing can be said about noise: any difference may be chance."
_FIRST_KEYS = ("device", "cpu", "operators", "python", "torch", "mechanic")


def runs_of(comparison: Comparison) -> list[Run]:
    """Each run once; a peer's stand in the rows of all bases."""
    return list({id(run): run for row in comparison.rows for run in row.all_runs}.values())


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was run, where and when."""
    runs = runs_of(comparison)
    rows = Counter(row.suite for row in comparison.rows)
    tasks = {suite: len({r.task for r in comparison.rows if r.suite == suite}) for suite in rows}
    suites = [
        f"{suite} ({count_of(tasks[suite], 'task')}, {count_of(rows[suite], 'row')})"
        for suite in rows
    ]
    seeds = sorted({run.seed for run in runs})
    ended = Counter(run.status for run in runs)
    states = [f"{ended[state]} {state}" for state in ("done", "diverged", "failed") if ended[state]]
    methods = [method.label for method in comparison.methods]
    found = [
        ("Suites", ", ".join(suites)),
        ("Sweeps", f"{sweep_cost(comparison.rows)} learning rates for each base on a task"),
        ("Methods", ", ".join(methods) or "none that is learning-rate-free"),
        ("Seeds", f"{len(seeds)} ({', '.join(map(str, seeds))})"),
        ("Runs", f"{len(runs)}: {', '.join(states)}; {duration(sum(r.seconds for r in runs))}"),
    ]
    dates = sorted({run.environment.get("date", "")[:10] for run in runs} - {""})
    if dates:
        found.append(("Dates", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"))
    values = _environment(runs)
    found += [(key, _tally(values[key])) for key in values if key in _FIRST_KEYS]
    packages = [f"{key} {_tally(values[key])}" for key in values if key not in _FIRST_KEYS]
    return [*found, ("other packages", ", ".join(packages))] if packages else found


def _environment(runs: Iterable[Run]) -> dict[str, Counter[str]]:
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        for key, value in run.environment.items():
            if key != "date":
                values[key][value] += 1
    order = sorted(values, key=lambda k: (_FIRST_KEYS.index(k) if k in _FIRST_KEYS else 99, k))
    return {key: values[key] for key in order}


def _tally(values: Counter[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} ({count_of(times, 'run')})" for value, times in values.most_common())


def duration(seconds: float) -> str:
    """Of training, in a unit that suits."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit} of training"
    return f"{seconds:.3g} s of training"


def sweep_cost(rows: Iterable[Row]) -> str:
    """How many runs a sweep takes: "9", or "7 to 9"."""
    sizes = sorted({len(row.sweep.runs) for row in rows if row.sweep})
    if not sizes:
        return "no"
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


SMOKE = "Smoke runs are a few steps long: they show that all runs, and compare nothing."


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before believing a number."""
    found = [
        f"{name(row)} is left out of the overall table: {row.left_out}."
        for row in comparison.rows
        if row.left_out
    ]
    if comparison.budget == "smoke":
        found.insert(0, SMOKE)
    found += _mixed_environments(comparison.rows)
    edges = [
        f"{name(row)} ({row.sweep.edge})"
        for row in comparison.scored
        if row.sweep and row.sweep.edge
    ]
    if edges:
        found.append(
            f"The best learning rate lies on the edge of the grid on {len(edges)} of the rows, "
            f"so that a wider grid may hold a better one: {', '.join(edges)}."
        )
    short_of = [name(row) for row in comparison.rows if _seeds_differ(row)]
    if short_of:
        found.append(
            "Unfinished: not all methods were run with the same seeds, and differences are of the "
            f"seeds in common, on {', '.join(short_of)}."
        )
    if comparison.scored and all(_seeds(row) == 1 for row in comparison.scored):
        found.append(ONE_SEED)
    return found


def _seeds(row: Row) -> int:
    return len({run.seed for run in row.all_runs})


def _seeds_differ(row: Row) -> bool:
    groups = [result.runs for result in row.results] + list(
        (row.sweep.runs if row.sweep else {}).values()
    )
    return len({frozenset(run.seed for run in runs) for runs in groups}) > 1


def _mixed_environments(rows: Iterable[Row]) -> list[str]:
    tasks: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for row in rows:
        tasks[row.suite, row.task] += row.all_runs
    mixed: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (_, task), runs in tasks.items():
        for key, values in _environment(runs).items():
            if len(values) > 1:
                mixed[key, tuple(sorted(values))].append(task)
    return [
        f"Runs of different environments are compared with each other, {key} "
        f"{' and '.join(values)}, on {', '.join(found)}."
        for (key, values), found in mixed.items()
    ]


def name(row: Row) -> str:
    """Of a row, for people."""
    return f"{row.task} ({row.base})" if row.base else row.task


def against_sweep(comparison: Comparison) -> tuple[int, int, int, int]:
    """Mechanic's default and the sweep: rows better, worse, within noise and untold."""
    results = [row.result(comparison.default) for row in comparison.scored if comparison.default]
    found = [result for result in results if result and not math.isnan(result.counted)]
    verdicts = Counter(_against_best(result) for result in found)
    return verdicts["better"], verdicts["worse"], verdicts["within"], verdicts["untold"]


def _against_best(result: Result) -> str:
    if result.trouble:
        return "worse"
    assert result.excess is not None
    return result.excess.verdict


def headline(comparison: Comparison) -> str:
    """How Mechanic's default fares, to be followed by where."""
    summaries = summarize(comparison)
    ours = next(summary for summary in summaries if summary.method == comparison.default)
    return (
        f": mean excess {percent(ours.mean)} over the best of a sweep, in 1 run where the sweep "
        f"takes {sweep_cost(comparison.scored)}; {percent(ours.worst)} on its worst row; "
        f"mean rank {ours.rank:.1f} of {len(summaries)} learning-rate-free methods. "
        "Against the best of the sweep it is "
    )


def verdict(better: int, worse: int, within: int, untold: int) -> str:
    """Where it wins, in words: "better on 3 rows, worse on 1, within seed noise on 5"."""
    parts = [
        (better, "better"),
        (worse, "worse"),
        (within, "within seed noise"),
        (untold, "undecided"),
    ]
    said = [f"{word} on {times}" for times, word in parts if times]
    return f"{', '.join(said)} of {count_of(better + worse + within + untold, 'row')}"


def duel_counts(duel: Duel) -> tuple[int, int, int, int]:
    """In the order of `verdict`."""
    return duel.better, duel.worse, duel.within, duel.untold


def best_of_sweep(row: Row) -> str:
    """The sweep of a row in one sentence."""
    if row.sweep is None:
        return "No sweep to compare with."
    lrs = list(row.sweep.runs)
    grid = f"{count_of(len(lrs), 'learning rate')} from {short(lrs[0])} to {short(lrs[-1])}"
    if row.sweep.best_lr is None:
        return f"None of {grid} came through with all seeds."
    best = fmean(run.metrics["train_loss"] for run in row.sweep.best)
    edge = f", on the edge of the grid ({row.sweep.edge})" if row.sweep.edge else ""
    return (
        f"Best of {grid}: train loss {number(best)} at {short(row.sweep.best_lr)}{edge}; "
        f"{number(row.start)} at the start."
    )


def cell(result: Result | None) -> str:
    """A method on a row of the overall table."""
    if result is None or (math.isnan(result.counted) and not result.trouble):
        return ""
    if result.trouble:
        return result.trouble
    assert result.excess is not None
    return f"{'≈ ' if result.excess.within_noise else ''}{percent(result.excess.mean)}"


def mean_spread(values: Sequence[float]) -> str:
    """A mean, and the standard deviation over seeds where there are several."""
    if len(values) < 2:
        return number(values[0]) if values else "–"
    return f"{number(fmean(values))} ± {stdev(values):.1g}"


def mishaps(rows: Iterable[Row]) -> list[tuple[str, str, str, str]]:
    """Runs of a task that diverged or failed: method, lr, "diverged, seeds 0 and 2", why."""
    runs = {id(run): run for row in rows for run in row.all_runs if run.status != "done"}
    found: dict[tuple[str, str, float, str, str], list[int]] = defaultdict(list)
    for run in runs.values():
        found[run.method, run.base, run.lr, run.status, run.reason].append(run.seed)
    return [
        (
            f"{method} ({base})" if base and base != method else method,
            short(lr),
            f"{status}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}",
            reason or "no reason recorded",
        )
        for (method, base, lr, status, reason), seeds in sorted(found.items())
    ]
