"""What the user asks of `mechanic bench`, and the runs that follow from it."""

from dataclasses import dataclass
from typing import NamedTuple

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS, choose, version
from mechanic.bench.study import Grid
from mechanic.bench.suites import SUITES
from mechanic.bench.task import Budget, Task


@dataclass(frozen=True)
class BenchRequest:
    """A checked command line."""

    suites: tuple[str, ...]
    tasks: tuple[str, ...]
    """Empty for all tasks."""
    methods: tuple[str, ...]
    """Empty for all methods."""
    seeds: int
    budget: Budget
    typed: tuple[float, ...]
    """The learning rates to type for Mechanic."""
    data: Data
    device: str
    storage: str
    jobs: int
    retry_failed: bool


class BenchPlan(NamedTuple):
    """The runs that follow from a request."""

    grids: list[Grid]
    skipped: list[str]
    """One line for each thing that cannot run here, with the reason."""


def tasks_of(request: BenchRequest) -> list[Task]:
    """The tasks of a request, whether they can run here or not."""
    tasks = [task for suite in request.suites for task in SUITES[suite](request.data)]
    if unknown := set(request.tasks) - {task.name for task in tasks}:
        known = ", ".join(task.name for task in tasks)
        raise ValueError(
            f"--tasks: no task is named {', '.join(sorted(unknown))}; choose from {known}"
        )
    return [task for task in tasks if not request.tasks or task.name in request.tasks]


def make_plan(request: BenchRequest) -> BenchPlan:
    """Find all runs of a request, and what is left out."""
    grids: list[Grid] = []
    skipped: dict[str, None] = {}  # each line once, in order
    for task in tasks_of(request):
        if task.missing:
            skipped[f"{task.suite}/{task.name}: {task.missing}"] = None
            continue
        data = request.data.identity(*task.uses) if task.uses else ""
        for method in choose(task, request.methods):
            for base, lrs in method.typed_rates(task, request.typed).items():
                key = task.suite, task.name, request.budget, method.name, method.kind, base
                grid = Grid(*key, task.metric, data, lrs, tuple(range(request.seeds)))
                needed = {method.package, METHODS[base].package if base else method.package}
                if absent := [package for package in sorted(needed) if version(package) is None]:
                    fix = f"pip install {absent[0]}"
                    skipped[f"{grid.label}: {absent[0]} is not installed; {fix}"] = None
                else:
                    grids.append(grid)
    return BenchPlan(grids, list(skipped))
