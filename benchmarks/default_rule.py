"""The default rule beside sweeps and peers, from the runs that are kept.

    python benchmarks/default_rule.py        # seconds: it trains nothing
    python benchmarks/default_rule.py AB     # another rule of which there are runs on all rows

Reads `results/default_rule.csv` (the runs of the rule as it ships are those of "AA") and what
`mechanic bench` has kept of sweeps and peers (`results/bench/`), and scores them as `mechanic
report` does.
"""

import csv
import sys
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
        for folder in ("short_h200", "convex_cpu", "dropout_scaling_h200")
        for line in read(f"bench/{folder}/runs.csv")
        if line["kind"] != "mechanic"
    ]


def own(suites: dict[str, str], rule: str) -> list[Run]:
    """Those of the rule, on the tasks of these suites with the bench's seeds."""
    return [
        Run(
            *(suites[line["task"]], line["task"], "short", "mechanic", "mechanic", line["base"]),
            lr=float(line["lr"]),
            seed=int(line["seed"]),
            status="done",
            start_loss=float(line["start_loss"]),
            metrics={key: float(line[key]) for key in ("train_loss", "test_loss") if line[key]},
        )
        for line in read("default_rule.csv")
        if line["rule"] == rule and line["length"] == "1" and not line["adapters"]
        if line["task"] in suites and int(line["seed"]) < SEEDS
    ]


def show(row: Row, typed: Row) -> str:
    """A row of the first table; `typed` is the same with a result at each typed lr."""
    assert row.sweep is not None
    best, gained = fmean(final_losses(row.sweep.best).values()), gain(row.sweep)
    ends = final_losses(row.results[0].runs).values()
    each = [100 * (end - best) / gained for end in ends]
    at = {result.method.lr: f"{result.counted:+.2f}" for result in typed.results}
    tests = (
        f"{fmean(final_losses(found, 'test_loss').values()):.4g}"
        for found in (row.results[0].runs, row.sweep.best)
    )
    cells = [
        *(row.task, row.base, f"{fmean(each):+.2f}", ", ".join(f"{one:+.2f}" for one in each)),
        *(", ".join(at[lr] for lr in TYPED), *tests),
    ]
    return f"| {' | '.join(cells)} |"


def at_each_lr(runs: list[Run]) -> list[Run]:
    """Those whose seed was run at all of the typed lrs."""
    seen = {(run.task, run.base, run.seed, run.lr) for run in runs}
    return [run for run in runs if all((run.task, run.base, run.seed, lr) in seen for lr in TYPED)]


def main() -> None:
    bench = others()
    rule = sys.argv[1] if len(sys.argv) > 1 else "AA"
    ours = own({run.task: run.suite for run in bench}, rule)
    if not ours:
        raise SystemExit(f"There are no runs of the rule {rule} in default_rule.csv.")
    at_one = [*bench, *(run for run in ours if run.lr == 1.0)]
    (comparison,) = compare(at_one)
    (typed,) = compare([*(run for run in bench if run.kind == "sweep"), *at_each_lr(ours)])
    print("1e-4, 1 and 1e4 are of the seeds that were run at each, beside the same of the sweep.\n")
    print("| task | base | excess | each seed | 1e-4, 1, 1e4 | test loss | the sweep's |")
    print("|---|---|---|---|---|---|---|")
    for rows in zip(comparison.scored, typed.scored, strict=True):
        print(show(*rows))

    with_peers = {run.task for run in bench if run.kind == "peer"}
    (ranked,) = compare([run for run in at_one if run.task in with_peers])
    print("\n| method, where there are peers | rows | mean rank | mean excess |\n|---|---|---|---|")
    for summary in summarize(ranked):
        found = f"{summary.rank:.2f} | {summary.mean:+.1f}"
        print(f"| {summary.method.label} | {summary.rows} | {found} |")

    (convex,) = compare([run for run in at_one if run.suite == "convex"])
    (networks,) = compare([run for run in at_one if run.suite != "convex"])
    parts = {"convex": convex, "networks": networks, "with peers": ranked, "all": comparison}
    print("\n| rows | how many | mean | of suites | median | worst | above 2 % |")
    print("|---|---|---|---|---|---|---|")
    for name, part in parts.items():
        (own_summary,) = (found for found in summarize(part) if found.method == part.default)
        scores = [row.results[0].counted for row in part.scored]
        middle = own_summary.mean, fmean(own_summary.by_suite.values()), median(scores)
        cells = [name, str(own_summary.rows), *(f"{value:+.2f}" for value in middle)]
        cells += [f"{own_summary.worst:+.1f}", str(sum(score > 2 for score in scores))]
        print(f"| {' | '.join(cells)} |")

    each = [[result.counted for result in row.results] for row in typed.scored]
    apart = sum(max(found) - min(found) > 0.5 for found in each)
    most = max(max(found) - min(found) for found in each)
    print(f"\nThe typed lrs differ by {most:.2g} % at most, by more than 0.5 % in {apart} rows.")


if __name__ == "__main__":
    main()
