"""The runs of one rule on the rows of `mechanic bench`, in the form that the report reads.

    python research/runs_of.py AB > ab.csv
    python benchmarks/report.py --default ab.csv    # the report with AB in place of the default

`results/rules.csv` holds the runs. Only AB has runs on all rows.
"""

import csv
import sys
from pathlib import Path

HERE = Path(__file__).parent
SWEPT = ("convex_cpu", "short_h200", "dropout_scaling_h200")
SEEDS = 3  # those of the sweeps
FIELDS = (
    *("suite", "task", "budget", "method", "kind", "base", "lr", "seed", "status", "start_loss"),
    *("metrics.test_accuracy", "metrics.test_loss", "metrics.train_loss"),
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("Usage: python research/runs_of.py RULE")
    results = HERE.parent / "benchmarks" / "results"
    swept = [run for folder in SWEPT for run in read(results / folder / "runs.csv")]
    suites = {run["task"]: run["suite"] for run in swept}
    found = [
        run
        for run in read(HERE / "results" / "rules.csv")
        if run["rule"] == sys.argv[1] and run["length"] == "1" and not run["adapters"]
        if run["task"] in suites and int(run["seed"]) < SEEDS
    ]
    missing = {(run["task"], run["base"]) for run in swept if run["kind"] == "sweep"}
    missing -= {(run["task"], run["base"]) for run in found if float(run["lr"]) == 1.0}
    if missing:
        raise SystemExit(f"rules.csv has no runs of {sys.argv[1]} on {len(missing)} of the rows.")
    table = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n", extrasaction="ignore")
    table.writeheader()
    for run in found:
        metrics = {f"metrics.{name}": value for name, value in run.items()}
        named = dict.fromkeys(("method", "kind"), "mechanic") | {"budget": "short"}
        table.writerow(metrics | run | named | {"suite": suites[run["task"]], "status": "done"})


if __name__ == "__main__":
    main()
