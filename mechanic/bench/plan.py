"""What `mechanic bench` is asked for, and the runs that follow from it."""

from dataclasses import dataclass
from typing import NamedTuple

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS, choose, version
from mechanic.bench.study import Grid
from mechanic.bench.suites import SUITES
from mechanic.bench.task import Budget, Task


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    suites: tuple[str, ...]
    tasks: tuple[str, ...]
    """Empty for all."""
    methods: tuple[str, ...]
    """Empty for all."""
    seeds: int
    budget: Budget
    typed: tuple[float, ...]
    """The learning rates to type for Mechanic."""
    data: Data
    device: str
    storage: str
    jobs: int
    retry_failed: bool


class Plan(NamedTuple):
    """What follows from a request."""

    grids: list[Grid]
    skipped: list[str]
    """What cannot run here, and why, a line each."""


def tasks_of(request: Request) -> list[Task]:
    """All of the suites asked for, whether they can run here or not."""
    tasks = [task for suite in request.suites for task in SUITES[suite](request.data)]
    if unknown := set(request.tasks) - {task.name for task in tasks}:
        there = ", ".join(task.name for task in tasks)
        raise ValueError(
            f"--tasks: no task is named {', '.join(sorted(unknown))}; there are {there}"
        )
    return [task for task in tasks if not request.tasks or task.name in request.tasks]


def make_plan(request: Request) -> Plan:
    """Every cell to run, and what is left out."""
    grids: list[Grid] = []
    skipped: dict[str, None] = {}  # each line once, in order
    for task in tasks_of(request):
        if task.missing:
            skipped[f"{task.suite}/{task.name}: {task.missing}"] = None
            continue
        data = request.data.identity(*task.uses)
        for method in choose(task, request.methods):
            for base, lrs in method.cells(task, request.typed).items():
                key = task.suite, task.name, request.budget, method.name, method.kind, base
                grid = Grid(*key, task.metric, data, lrs, tuple(range(request.seeds)))
                needed = {method.package, METHODS[base].package if base else method.package}
                if absent := [package for package in sorted(needed) if version(package) is None]:
                    fix = f"pip install {absent[0]}"
                    skipped[f"{grid.label}: {absent[0]} is not installed; {fix}"] = None
                else:
                    grids.append(grid)
    return Plan(grids, list(skipped))
