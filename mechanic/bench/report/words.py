"""The sentences of the report, the same on the page and in Markdown."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from mechanic.bench.record import Run
from mechanic.bench.report.look import count_of, number, percent
from mechanic.bench.score import LOST, Comparison, Duel, Result, ScoreRow, format_lr, summarize

EXPLANATION = (
    "Excess is (loss − best) / (start − best) of the train loss at the end: 0 % is the best "
    "learning rate of the sweep, 100 % is the loss before training, and below 0 % is better than "
    "the sweep. A method counts as 100 % and ranks last if any of its seeds diverged or failed, or "
    "if it ended above the loss before training."
)
LOST_RUNS = (
    "A run is lost when its loss at the end is not finite, is above its loss at the start, or has "
    f"an excess of more than {LOST:.0f} % over the mean of the best of the sweep. Lost runs are "
    "counted over all rows; a run that is compared with several bases counts on each of their rows."
)
NO_LOST_RUNS = "No run of any method is lost."
NOISE = (
    "≈ marks a difference from the best of the sweep that is within seed noise: zero lies in its "
    "95 % interval (Student's t, seeds paired). The best of the sweep was chosen in hindsight on "
    "the same seeds, which favours the sweep."
)
PLOTS = (
    "Bands reach from the lowest to the highest seed. ✕ on the upper edge: a seed diverged or "
    "failed at this learning rate; ▲: the loss lies above the plot. ◆: the highest learning rate "
    "that a method had in force on this base, which the tables show as its lr. ± is the standard "
    "deviation over seeds."
)
ONE_SEED = "With only one seed the noise is unknown: any difference may be chance."
_FIRST_KEYS = ("device", "cpu", "operators", "python", "torch", "mechanic")


def runs_of(comparison: Comparison) -> list[Run]:
    """All runs of a comparison, each once: those of a peer are in the rows of all bases."""
    return list({id(run): run for row in comparison.rows for run in row.all_runs}.values())


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was run, where and when, as pairs of a title and a text."""
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
    entries = [
        ("Suites", ", ".join(suites)),
        ("Sweeps", f"{sweep_cost(comparison.rows)} learning rates for each base on a task"),
        ("Methods", ", ".join(methods) or "no learning-rate-free method"),
        ("Seeds", f"{len(seeds)} ({', '.join(map(str, seeds))})"),
        ("Runs", f"{len(runs)}: {', '.join(states)}; {duration(sum(r.seconds for r in runs))}"),
    ]
    dates = sorted({run.environment.get("date", "")[:10] for run in runs} - {""})
    if dates:
        entries.append(("Dates", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"))
    values = _environment(runs)
    entries += [(key, _tally(values[key])) for key in values if key in _FIRST_KEYS]
    packages = [f"{key} {_tally(values[key])}" for key in values if key not in _FIRST_KEYS]
    return [*entries, ("other packages", ", ".join(packages))] if packages else entries


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
    """The time of training, in a suitable unit."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit} of training"
    return f"{seconds:.3g} s of training"


def sweep_cost(rows: Iterable[ScoreRow]) -> str:
    """The number of runs that a sweep takes: "9", or "7 to 9"."""
    sizes = sorted({len(row.sweep.runs) for row in rows if row.sweep})
    if not sizes:
        return "no"
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


SMOKE = "Smoke runs take only a few steps: they show that the tasks run, and compare nothing."


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = [
        f"{row_name(row)} is left out of the overall table: {row.left_out}."
        for row in comparison.rows
        if row.left_out
    ]
    if comparison.budget == "smoke":
        found.insert(0, SMOKE)
    found += _mixed_environments(comparison.rows)
    edges = [
        f"{row_name(row)} ({row.sweep.edge})"
        for row in comparison.scored
        if row.sweep and row.sweep.edge
    ]
    if edges:
        found.append(
            f"In {count_of(len(edges), 'row')}, the best lr lies at the edge of the grid, "
            f"so that a wider grid may hold a better one: {', '.join(edges)}."
        )
    unfinished = [row_name(row) for row in comparison.rows if _seeds_differ(row)]
    if unfinished:
        found.append(
            "Unfinished: not all methods were run with the same seeds. Differences are over the "
            f"seeds in common. This concerns {', '.join(unfinished)}."
        )
    if comparison.scored and all(_seeds(row) == 1 for row in comparison.scored):
        found.append(ONE_SEED)
    return found


def _seeds(row: ScoreRow) -> int:
    return len({run.seed for run in row.all_runs})


def _seeds_differ(row: ScoreRow) -> bool:
    groups = [result.runs for result in row.results] + list(
        (row.sweep.runs if row.sweep else {}).values()
    )
    return len({frozenset(run.seed for run in runs) for runs in groups}) > 1


def _mixed_environments(rows: Iterable[ScoreRow]) -> list[str]:
    tasks: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for row in rows:
        tasks[row.suite, row.task] += row.all_runs
    mixed: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (_, task), runs in tasks.items():
        for key, values in _environment(runs).items():
            if len(values) > 1:
                mixed[key, tuple(sorted(values))].append(task)
    return [
        f"Runs of different environments are compared with each other ({key} "
        f"{' and '.join(values)}) on {', '.join(names)}."
        for (key, values), names in mixed.items()
    ]


def row_name(row: ScoreRow) -> str:
    """The name of a row in sentences."""
    return f"{row.task} ({row.base})" if row.base else row.task


def against_sweep(comparison: Comparison) -> tuple[int, int, int, int]:
    """The number of rows on which Mechanic's default is better than the best of the sweep, worse,
    within noise, and undecided."""
    results = [row.result(comparison.default) for row in comparison.scored if comparison.default]
    found = [result for result in results if result and not math.isnan(result.counted)]
    verdicts = Counter(_against_best(result) for result in found)
    return verdicts["better"], verdicts["worse"], verdicts["within_noise"], verdicts["undecided"]


def _against_best(result: Result) -> str:
    if result.trouble:
        return "worse"
    assert result.excess is not None
    return result.excess.verdict


def headline(comparison: Comparison) -> str:
    """The main result of Mechanic's default, as a sentence that `verdict` completes."""
    summaries = summarize(comparison)
    ours = next(summary for summary in summaries if summary.method == comparison.default)
    return (
        f": mean excess {percent(ours.mean)} over the best of a sweep, in 1 run where the sweep "
        f"takes {sweep_cost(comparison.scored)}; {percent(ours.worst)} on its worst row; "
        f"mean rank {ours.rank:.1f} of {len(summaries)} learning-rate-free methods; "
        f"{ours.lost} of {count_of(ours.runs, 'run')} lost. "
        "Compared with the best of the sweep, it is "
    )


def lost_of_sweep(rows: Iterable[ScoreRow]) -> str:
    """The number of runs at the best lr of a sweep that are lost: "0 of 30"."""
    swept = [row for row in rows if row.sweep]
    lost = sum(len(row.lost_by_sweep) for row in swept)
    return f"{lost} of {sum(len(row.sweep.best) for row in swept if row.sweep)}"


def verdict(better: int, worse: int, within_noise: int, undecided: int) -> str:
    """Numbers of rows in words: "better on 3, worse on 1, within seed noise on 5 of 9 rows"."""
    parts = [
        (better, "better"),
        (worse, "worse"),
        (within_noise, "within seed noise"),
        (undecided, "undecided"),
    ]
    texts = [f"{word} on {rows}" for rows, word in parts if rows]
    return f"{', '.join(texts)} of {count_of(sum(rows for rows, _ in parts), 'row')}"


def duel_counts(duel: Duel) -> tuple[int, int, int, int]:
    """The arguments of `verdict`."""
    return duel.better, duel.worse, duel.within_noise, duel.undecided


def best_of_sweep(row: ScoreRow) -> str:
    """One sentence on the sweep of a row."""
    if row.sweep is None:
        return "There is no sweep to compare with."
    lrs = list(row.sweep.runs)
    grid = f"{count_of(len(lrs), 'learning rate')} from {format_lr(lrs[0])} to {format_lr(lrs[-1])}"
    if row.sweep.best_lr is None:
        return f"At each of {grid}, a seed diverged or failed."
    best = fmean(run.metrics["train_loss"] for run in row.sweep.best)
    edge = f", at the edge of the grid ({row.sweep.edge})" if row.sweep.edge else ""
    return (
        f"Best of {grid}: train loss {number(best)} at {format_lr(row.sweep.best_lr)}{edge}; "
        f"{number(row.start)} at the start."
    )


def excess_text(result: Result | None) -> str:
    """The excess of a method in a cell of the overall table."""
    if result is None or (math.isnan(result.counted) and not result.trouble):
        return ""
    if result.trouble:
        return result.trouble
    assert result.excess is not None
    lost = f", {len(result.lost)} lost" if result.lost else ""
    return f"{'≈ ' if result.excess.within_noise else ''}{percent(result.excess.mean)}{lost}"


def mean_spread(values: Sequence[float]) -> str:
    """The mean over seeds, and the standard deviation if there are several."""
    if len(values) < 2:
        return number(values[0]) if values else "–"
    return f"{number(fmean(values))} ± {stdev(values):.1g}"


def mishaps(rows: Iterable[ScoreRow]) -> list[tuple[str, str, str, str]]:
    """The runs of a task that diverged or failed: method, lr, "diverged, seeds 0, 2", reason."""
    runs = {id(run): run for row in rows for run in row.all_runs if run.status != "done"}
    found: dict[tuple[str, str, float, str, str], list[int]] = defaultdict(list)
    for run in runs.values():
        found[run.method, run.base, run.lr, run.status, run.reason].append(run.seed)
    return [
        (
            f"{method} ({base})" if base and base != method else method,
            format_lr(lr),
            f"{status}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}",
            reason or "no reason recorded",
        )
        for (method, base, lr, status, reason), seeds in sorted(found.items())
    ]
