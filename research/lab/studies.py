"""The studies: what a rule costs beside the best of a sweep, task by task."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from . import variants
from .population import Problem, Rule, run
from .problems import Source
from .rules import Fixed
from .tasks import Tasks
from .variants import Rules

MIDDLE = (0.2, 0.6)  # the part of training over which a scale is compared with the best lr
MOMENTS = (0.05, 0.2, 0.5, 0.9)  # of training, at which its course is shown
HOPELESS = 100.0  # an excess in percent: nothing was learned
FEW = 3  # so many variants in all are shown task by task


class Study(NamedTuple):
    """What is compared; the tasks are those by default."""

    rules: Callable[[], Rules]
    tasks: str


STUDIES = {
    "before": Study(variants.before, "small"),
    "first": Study(variants.first, "few"),
    "cosine": Study(variants.cosine, "few"),
    "now": Study(variants.now, "few"),
    "settings": Study(variants.settings, "settings"),
}


class Sweep(NamedTuple):
    """What the base comes to with the best learning rate."""

    lr: float
    loss: float
    start: float
    at_edge: bool
    """Whether the best is the first or the last that was tried."""


class Row(NamedTuple):
    """A rule on a task."""

    excess: Tensor
    """The loss over the best of the sweep, in percent of what training gained, by variant."""
    scale: Tensor
    """The median scale over the middle of training, over the best lr, by variant."""
    course: Tensor
    """The scale over the best lr, by step and variant."""


Results = dict[str, tuple[Sweep, list[Row]]]  # by task; a row for each rule


def sweep(problem: Problem, seeds: Sequence[int]) -> Sweep:
    """The best learning rate of the problem's grid."""
    outcome = run(problem, Fixed(problem.lrs), seeds)
    losses = outcome.final.nan_to_num(1e9, 1e9, 1e9).mean(1)
    best = int(losses.argmin())
    at_edge = best in (0, len(losses) - 1)
    return Sweep(problem.lrs[best], float(losses[best]), outcome.start, at_edge)


def compare(problem: Problem, best: Sweep, rule: Rule, seeds: Sequence[int]) -> Row:
    """The rule beside the best of the sweep."""
    outcome = run(problem, rule, seeds)
    excess = (outcome.final - best.loss) / (best.start - best.loss) * 100
    excess = excess.nan_to_num(HOPELESS, HOPELESS, HOPELESS).clamp(max=HOPELESS)
    first, last = (int(part * problem.steps) for part in MIDDLE)
    middle = outcome.scales[first:last].median(0).values.median(1).values
    return Row(excess.mean(1), middle / best.lr, outcome.scales.median(2).values / best.lr)


def study(name: str, tasks: Tasks, source: Source, seeds: Sequence[int]) -> str:
    """Run it and tell the results, as Markdown."""
    rules = STUDIES[name].rules()
    results: Results = {}
    for key, make in tasks.items():
        began, problem = time.monotonic(), make(source)
        best = sweep(problem, seeds)
        results[key] = best, [compare(problem, best, rule, seeds) for rule in rules.values()]
        print(f"{key}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    tables = [
        f"## {title}\n\n{summary(rule, [(key, rows[k]) for key, (_, rows) in results.items()])}"
        for k, (title, rule) in enumerate(rules.items())
    ]
    if sum(len(rule.names) for rule in rules.values()) <= FEW:
        tables.append(f"## Task by task\n\n{details(rules, results)}")
    return "\n\n".join(tables)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rule: Rule, rows: Sequence[tuple[str, Row]]) -> str:
    """Variants against bases: the mean and worst excess, the geometric mean of S/best."""
    bases = sorted({key.split("/")[1] for key, _ in rows})
    lines = []
    for v, variant in enumerate(rule.names):
        every = [float(row.excess[v]) for _, row in rows]
        cells = [variant, f"{sum(every) / len(every):+.2f}", f"{max(every):+.1f}"]
        for base in bases:
            of_base = [row for key, row in rows if key.split("/")[1] == base]
            excess = [float(row.excess[v]) for row in of_base]
            logs = [math.log(max(1e-30, float(row.scale[v]))) for row in of_base]
            scale = math.exp(sum(logs) / len(logs))
            cells.append(
                f"{sum(excess) / len(excess):+.2f} (worst {max(excess):+.1f}, S/best {scale:.2f})"
            )
        lines.append(cells)
    return markdown(["variant", "mean excess, %", "worst", *bases], lines)


def details(rules: Rules, results: Results) -> str:
    """Tasks against variants: the excess, and S/best in the course of training."""
    head = ["task", "best lr"]
    lines = []
    for rule in rules.values():
        for variant in rule.names:
            head += [f"{variant}, %", "S/best at " + ", ".join(f"{m:.0%}" for m in MOMENTS)]
    for key, (best, rows) in results.items():
        cells = [key, f"{best.lr:.3g}{' (edge)' if best.at_edge else ''}"]
        for row in rows:
            for excess, course in zip(row.excess, row.course.T, strict=True):
                shown = [f"{float(course[int(m * len(course))]):.2g}" for m in MOMENTS]
                cells += [f"{float(excess):+.2f}", ", ".join(shown)]
        lines.append(cells)
    return markdown(head, lines)
