"""The default rule beside sweeps and peers, from the runs that are kept.

    python benchmarks/default_rule.py        # seconds: it trains nothing

Reads `results/default_rule.csv` (the runs of the rule as it ships are those of "Z") and what
`mechanic bench` has kept of sweeps and peers (`results/bench/`). Excess is in % of what training
gained over the best of the sweep, of the train loss; a run that ended above its start counts as
100.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results")
PEERS = (
    *("prodigy", "dadaptation", "schedulefree-sgd", "mechanic-pytorch", "ldog", "dog"),
    *("schedulefree-adamw", "dadaptation-lion"),
)


class Row(NamedTuple):
    suite: str
    task: str
    base: str


class Losses(NamedTuple):
    train: float
    test: float


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    return float(text or "nan")


def score(text: str) -> float:
    """In a summary: a number, or why there is none."""
    try:
        return min(100.0, float(text))
    except ValueError:
        return 100.0


def own_runs() -> dict[tuple[str, str, float], list[Losses]]:
    """By task, base and typed lr, in the order of seeds."""
    found = defaultdict(list)
    for run in read("default_rule.csv"):
        if run["rule"] == "Z" and run["length"] == "1" and not run["adapters"]:
            key = run["task"], run["base"], float(run["lr"])
            found[key].append(Losses(float(run["train_loss"]), number(run["test_loss"])))
    return found


def test_of_the_best(row: Row, lr: float) -> float:
    """The test loss of a sweep's best, which is the best by its train loss."""
    return mean(
        number(run["metrics.test_loss"])
        for folder in ("convex_cpu", "short_h200")
        for run in read(f"bench/{folder}/runs.csv")
        if (run["task"], run["base"], run["method"]) == (row.task, row.base, row.base)
        and float(run["lr"]) == lr
    )


def main() -> None:
    summary = {
        Row(line["suite"], line["task"], line["base"]): line
        for folder in ("short_h200", "convex_cpu")
        for line in read(f"bench/{folder}/summary.csv")
    }
    own, scores = own_runs(), {}
    print("| task | base | excess | each seed | 1e-4, 1, 1e4 (seed 0) | test loss | the sweep's |")
    print("|---|---|---|---|---|---|---|")
    for row, line in summary.items():
        best, start = float(line["best_loss"]), float(line["start_loss"])
        each = {
            lr: [100 * (run.train - best) / (start - best) for run in own[row.task, row.base, lr]]
            for lr in (1e-4, 1.0, 1e4)
        }
        scores[row] = mean(each[1.0])
        test = mean(run.test for run in own[row.task, row.base, 1.0])
        seeds = ", ".join(f"{value:+.2f}" for value in each[1.0])
        typed = ", ".join(f"{values[0]:+.2f}" if values else "not run" for values in each.values())
        print(
            f"| {row.task} | {row.base} | {scores[row]:+.2f} | {seeds} | {typed} "
            f"| {test:.4g} | {test_of_the_best(row, float(line['best_lr'])):.4g} |"
        )

    ranks, excess = defaultdict(list), defaultdict(list)
    for row, line in summary.items():
        values = {"mechanic": scores[row]}
        values |= {peer: score(line[peer]) for peer in PEERS if line.get(peer)}
        for method, value in values.items():
            below = sum(other < value for other in values.values())
            equal = sum(other == value for other in values.values())
            ranks[method].append(below + (equal + 1) / 2)
            excess[method].append(value)
    print("\n| method | rows | mean rank | mean excess |\n|---|---|---|---|")
    for method in ("mechanic", *PEERS):
        shown = f"{mean(ranks[method]):.2f} | {mean(excess[method]):+.1f}"
        print(f"| {method} | {len(ranks[method])} | {shown} |")

    suites = defaultdict(list)
    for row, value in scores.items():
        suites[row.suite].append(value)
    networks = [value for row, value in scores.items() if row.suite != "convex"]
    convex = suites["convex"]
    print(f"\nNetworks {mean(networks):+.2f}, worst {max(networks):+.1f}.")
    print(f"Convex {mean(convex):+.2f}, median {median(convex):+.2f}, worst {max(convex):+.1f}.")
    print(
        f"Mean of suites {mean(map(mean, suites.values())):+.2f}, of rows "
        f"{mean(scores.values()):+.2f}; above 2 %: {sum(v > 2 for v in scores.values())} rows."
    )


if __name__ == "__main__":
    main()
