"""The default rule beside sweeps and peers, from the runs that are kept.

    python benchmarks/default_rule.py        # seconds: it trains nothing

Reads `results/default_rule.csv` (the runs of the rule as it ships are those of "AA") and what
`mechanic bench` has kept of sweeps and peers (`results/bench/`), and scores them as `mechanic
report` does.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from mechanic.bench.record import Run
from mechanic.bench.score import Row, compare, final_losses, gain, summarize

RESULTS = Path(__file__).with_name("results")
TYPED = (1e-4, 1.0, 1e4)
SEEDS = 3


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def others() -> list[Run]:
    """The sweeps and peers."""
    return [
        Run(
            *(line[name] for name in ("suite", "task", "budget", "method", "kind", "base")),  # type: ignore[arg-type]
            lr=float(line["lr"]),
            seed=int(line["seed"]),
            status=line["status"],  # type: ignore[arg-type]
            start_loss=float(line["start_loss"]),
            metrics={
                key.removeprefix("metrics."): float(value)
                for key, value in line.items()
                if key.startswith("metrics.") and value
            },
        )
        for folder in ("short_h200", "convex_cpu")
        for line in read(f"bench/{folder}/runs.csv")
        if line["kind"] != "mechanic"
    ]


def own(lines: list[dict[str, str]], rule: str, suites: dict[str, str]) -> list[Run]:
    """Those of a form of the rule, on the tasks of these suites with the bench's seeds."""
    return [
        Run(
            *(suites[line["task"]], line["task"], "short", "mechanic", "mechanic", line["base"]),
            lr=float(line["lr"]),
            seed=int(line["seed"]),
            status="done",
            start_loss=float(line["start_loss"]),
            metrics={key: float(line[key]) for key in ("train_loss", "test_loss") if line[key]},
        )
        for line in lines
        if line["rule"] == rule and line["length"] == "1" and not line["adapters"]
        if line["task"] in suites and int(line["seed"]) < SEEDS
    ]


def excess(row: Row, runs: Sequence[Run]) -> list[float]:
    """How much more loss than the best of the sweep each of these runs has, in % of its gain."""
    assert row.sweep is not None
    best, gained = fmean(final_losses(row.sweep.best).values()), gain(row.sweep)
    return [100 * (end - best) / gained for end in final_losses(runs).values()]


def show(row: Row, at: dict[float, float]) -> str:
    """A row of the first table; `at` has the excess at each typed lr."""
    assert row.sweep is not None
    each = excess(row, row.results[0].runs)
    typed = ", ".join(f"{at[lr]:+.2f}" if lr in at else "not run" for lr in TYPED)
    tests = (
        f"{fmean(final_losses(found, 'test_loss').values()):.4g}"
        for found in (row.results[0].runs, row.sweep.best)
    )
    cells = [
        *(row.task, row.base, f"{fmean(each):+.2f}", ", ".join(f"{one:+.2f}" for one in each)),
        *(typed, *tests),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    bench = others()
    suites = {run.task: run.suite for run in bench}
    lines = read("default_rule.csv")
    ours = own(lines, "AA", suites)
    (comparison,) = compare([*bench, *(run for run in ours if run.lr == 1.0)])
    typed = [
        {
            lr: fmean(excess(row, runs))
            for lr in TYPED
            if (runs := [run for run in ours if (run.task, run.base, run.lr) == (*key, lr)])
        }
        for row in comparison.scored
        for key in [(row.task, row.base)]
    ]
    print("| task | base | excess | each seed | 1e-4, 1, 1e4 | test loss | the sweep's |")
    print("|---|---|---|---|---|---|---|")
    for row, at in zip(comparison.scored, typed, strict=True):
        print(show(row, at))
    print("\n| method | rows | mean rank | mean excess |\n|---|---|---|---|")
    for summary in summarize(comparison):
        found = f"{summary.rank:.2f} | {summary.mean:+.1f}"
        print(f"| {summary.method.label} | {summary.rows} | {found} |")
        if summary.method == comparison.default:
            mean = fmean(summary.by_suite.values())

    scores = [row.results[0].counted for row in comparison.scored]
    for name, is_convex in (("Networks", False), ("Convex", True)):
        part = [
            score
            for row, score in zip(comparison.scored, scores, strict=True)
            if (row.suite == "convex") == is_convex
        ]
        print(f"\n{name} {fmean(part):+.2f}, median {median(part):+.2f}, worst {max(part):+.1f}.")
    above = sum(score > 2 for score in scores)
    print(f"\nMean of suites {mean:+.2f}, of rows {fmean(scores):+.2f}; above 2 %: {above} rows.")

    together = [fmean(at.values()) for at in typed]
    above = sum(score > 2 for score in together)
    print(f"\nThe typed lrs together: {fmean(together):+.2f}, worst {max(together):+.1f};", end=" ")
    print(f"above 2 %: {above} rows.", end=" ")
    apart = sum(max(at.values()) - min(at.values()) > 0.5 for at in typed)
    print(f"They differ by more than 0.5 % in {apart} rows.")


if __name__ == "__main__":
    main()
