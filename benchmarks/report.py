"""One report of all runs of `mechanic bench` that are kept in `results/`.

    python benchmarks/report.py                                          # seconds: nothing trains
    python benchmarks/report.py --readme                                 # the table of the README
    python benchmarks/report.py --output benchmarks/results/report.md    # as it is committed
    python benchmarks/report.py --default FILE.csv    # other runs in place of the default preset's

`convex_cpu`, `short_h200` and `dropout_scaling_h200` hold the sweeps, the peers and the other
presets, and `default` the runs of the default preset. All are scored as `mechanic report` does it.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

try:
    from mechanic.bench.record import Run
    from mechanic.bench.report import words
    from mechanic.bench.report.text import read_runs
    from mechanic.bench.score import (
        Comparison,
        Result,
        ScoreRow,
        compare,
        duels,
        final_losses,
        ranks,
        summarize,
    )
except ModuleNotFoundError as error:
    fix = 'pip install ".[torch,bench]" in a clone of Mechanic'
    raise SystemExit(f"benchmarks/report.py needs {error.name}: {fix}") from None

RESULTS = Path(__file__).with_name("results")
FOLDERS = ("convex_cpu", "short_h200", "dropout_scaling_h200")
TYPED = (1e-4, 1.0, 1e4)
FEW_PERCENT = 2.0
README_METHODS = {
    "mechanic": "Mechanic",
    "prodigy": "Prodigy",
    "dadaptation": "D-Adaptation",
    "schedulefree-adamw": "Schedule-Free AdamW",
    "mechanic-pytorch": "mechanic-pytorch",
}
README_ROWS = {
    ("resnet18-cifar10", "sgd"): "ResNet-18 on CIFAR-10, SGD",
    ("gpt-novels", "adamw"): "GPT on novels, AdamW",
    ("bert-novels", "adamw"): "BERT on novels, AdamW",
    ("minilm-sst2", "adamw"): "MiniLM fine-tuned on SST-2, AdamW",
}
INTRODUCTION = f"""\
# What `mechanic bench` measured

`python benchmarks/report.py --output benchmarks/results/report.md` writes this page from the runs
in this folder; [README.md](README.md) says what they are. A row is an optimizer, the base, on a
task. Budget `short`, three seeds.

{words.EXPLANATION}"""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def scored(runs: Iterable[Run]) -> Comparison:
    (comparison,) = compare(runs)  # of one budget
    return comparison


def groups(runs: Sequence[Run], with_peers: set[str]) -> Iterator[Sequence[str]]:
    """The default preset over the rows of each kind."""
    wanted = {
        "convex problems": lambda run: run.suite == "convex",
        "networks with peers": lambda run: run.suite != "convex" and run.task in with_peers,
        "dropout and scaling": lambda run: run.task not in with_peers,
        "all networks": lambda run: run.suite != "convex",
        "all with peers": lambda run: run.task in with_peers,
        "all": lambda run: True,
    }
    for name, belongs in wanted.items():
        part = scored(run for run in runs if belongs(run))
        summary = next(found for found in summarize(part) if found.method == part.default)
        found = [row.results[0].counted for row in part.scored]
        numbers = (summary.mean, fmean(summary.by_suite.values()), median(found))
        above = sum(score > FEW_PERCENT for score in found)
        yield (
            *(name, str(summary.rows), *(f"{number:+.2f}" for number in numbers)),
            *(f"{summary.worst:+.1f}", str(above), summary.lost_of_runs),
        )


def methods(comparison: Comparison, ranked: Comparison) -> Iterator[Sequence[str]]:
    """Each method over the rows that it ran on; `ranked` is without the other presets."""
    among = {summary.method: f"{summary.rank:.2f}" for summary in summarize(ranked)}
    placed = [ranks(row) for row in ranked.scored]
    for summary in summarize(comparison):
        method = summary.method
        first = sum(found.get(method) == min(found.values()) for found in placed)
        by_suite = (
            f"{summary.by_suite[suite]:+.1f}" if suite in summary.by_suite else ""
            for suite in comparison.suites
        )
        yield (
            *(method.label, str(summary.rows), among.get(method, "")),
            *(str(first) if method in among else "", f"{summary.mean:+.1f}"),
            *(f"{summary.worst:+.1f}", summary.lost_of_runs, *by_suite),
        )


def against(comparison: Comparison) -> Iterator[str]:
    """The default preset and each other method, row by row."""
    yield f"- the best of the sweep: {words.verdict(*words.against_sweep(comparison))}"
    for duel in duels(comparison):
        yield f"- {duel.other.label}: {words.verdict(*words.duel_counts(duel))}"


def every_row(comparison: Comparison) -> Iterator[Sequence[str]]:
    for row in comparison.scored:
        cells = (words.excess_text(row.result(method)) for method in comparison.methods)
        yield row.suite, row.task, row.base, *cells


def seeds(row: ScoreRow, typed: ScoreRow | None) -> Sequence[str]:
    """The default preset on a row; `typed` has a result of it for each typed lr, if it was run."""
    assert row.sweep is not None
    assert row.sweep.best_lr is not None
    best = fmean(final_losses(row.sweep.best).values())
    gained = fmean(run.start_loss for run in row.sweep.best) - best
    ends = final_losses(row.results[0].runs).values()
    results = typed.results if typed is not None else ()
    at = {result.method.lr: f"{result.counted:+.2f}" for result in results}
    tests = (
        f"{fmean(final_losses(runs, 'test_loss').values()):.4g}"
        for runs in (row.results[0].runs, row.sweep.best)
    )
    return (
        *(row.task, row.base, f"{best:.4g} at {row.sweep.best_lr:g}"),
        ", ".join(f"{100 * (end - best) / gained:+.2f}" for end in ends),
        *(", ".join(at[lr] for lr in TYPED if lr in at), *tests),
    )


def at_each_lr(runs: Sequence[Run]) -> list[Run]:
    """The runs whose seed was run at all of the typed lrs."""
    seen = {(run.task, run.base, run.seed, run.lr) for run in runs}
    return [run for run in runs if all((run.task, run.base, run.seed, lr) in seen for lr in TYPED)]


def beside_peers(others: Sequence[Run], ours: Sequence[Run]) -> Comparison:
    """The default preset and the others on the tasks that the peers ran on."""
    with_peers = {run.task for run in others if run.kind == "peer"}
    return scored(
        run for run in (*others, *(own for own in ours if own.lr == 1.0)) if run.task in with_peers
    )


def readme_table(compared: Comparison) -> str:
    """The table of the README."""
    results = {
        (row.task, row.base, result.method.label): result
        for row in compared.scored
        for result in row.results
    }
    means = {one.method.label: one for one in summarize(compared)}
    convex = {name: means[name].by_suite["convex"] for name in README_METHODS}
    lines = [
        (name, *in_bold({m: readme_cell(results[(*row, m)]) for m in README_METHODS}))
        for row, name in README_ROWS.items()
    ]
    convex_cells = {name: (mean, f"{mean:+.1f} %") for name, mean in convex.items()}
    lost = {name: (means[name].lost, means[name].lost_of_runs) for name in README_METHODS}
    lines += [
        ("12 logistic regressions, three optimizers", *in_bold(convex_cells)),
        ("lost runs, all tasks of the comparison", *in_bold(lost)),
    ]
    return table(("task", *README_METHODS.values()), lines)


def readme_cell(result: Result) -> tuple[float, str]:
    """What a cell of the README is compared by, and its text."""
    if result.trouble:
        return math.inf, f"{len(result.lost)} lost"
    return result.counted, words.excess_text(result).removeprefix("≈ ")


def in_bold(cells: Mapping[str, tuple[float, str]]) -> Iterator[str]:
    best = min(value for value, _ in cells.values())
    return (f"**{text}**" if value == best else text for value, text in cells.values())


def report(others: Sequence[Run], ours: Sequence[Run]) -> str:
    at_one = [run for run in ours if run.lr == 1.0]
    sweeps = [run for run in others if run.kind == "sweep"]
    with_peers = {run.task for run in others if run.kind == "peer"}
    everything = scored([*others, *at_one])
    default = scored([*sweeps, *at_one])
    compared = beside_peers(others, ours)
    ranked = scored(
        run
        for run in (*(other for other in others if other.kind != "mechanic"), *at_one)
        if run.task in with_peers
    )
    typed = scored([*sweeps, *at_each_lr(ours)])
    typed_of = {(row.task, row.base): row for row in typed.scored if row.results}
    each = [[result.counted for result in row.results] for row in typed_of.values()]
    apart = max(max(found) - min(found) for found in each)
    parts = [
        INTRODUCTION,
        '## The default preset\n\nExcess in percent. "Suites" is the mean of the suites\' means.',
        table(
            ("rows", "how many", "mean", "suites", "median", "worst", "above 2 %", "lost runs"),
            groups([*sweeps, *at_one], with_peers),
        ),
        "## Beside the other methods\n\nMean excess in percent over the rows that have peers. The "
        "rank of a method on a row is its place among the methods that ran there, without the "
        "other presets (`mechanic-optax` and the like), which are not ranked.",
        table(
            (
                *("method", "rows", "mean rank", "first in", "mean excess", "worst", "lost runs"),
                *compared.suites,
            ),
            methods(compared, ranked),
        ),
        "Row by row, the default preset against",
        "\n".join(against(compared)),
        f"## Every row\n\n{words.NOISE}",
        table(
            ("suite", "task", "base", *(method.label for method in everything.methods)),
            every_row(everything),
        ),
        "## Every seed of the default preset\n\n"
        "1e-4, 1 and 1e4 are typed learning rates. Their column has the excess of the seeds that "
        "were run at each of them, beside the same seeds of the sweep. Over these rows the three "
        f"differ by {apart:.2g} % at most.",
        table(
            (
                *("task", "base", "best of the sweep", "excess of each seed"),
                *("typed 1e-4, 1, 1e4", "test loss", "the sweep's"),
            ),
            (seeds(row, typed_of.get((row.task, row.base))) for row in default.scored),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--default", type=Path, help="runs of another rule, as in runs.csv")
    parser.add_argument("--readme", action="store_true", help="the table of the README alone")
    parser.add_argument("--output", type=Path, help="write the report there, not to the terminal")
    options = parser.parse_args()
    others = [run for folder in FOLDERS for run in read_runs(RESULTS / folder / "runs.csv")]
    ours = read_runs(options.default or RESULTS / "default" / "runs.csv")
    if options.readme:
        text = readme_table(beside_peers(others, ours)) + "\n"
    else:
        text = report(others, ours)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
