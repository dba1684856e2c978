"""Runs come back: after a start that goes wrong, and where a step too far is hard to undo.

`recovery.py` says what the tasks are, and sweeps them.
"""

import functools
from statistics import mean

import pytest
import recovery
from cases import case

pytestmark = pytest.mark.usefixtures("compiled_steps")

BY_DAY = (("cliff", "sgd"),)


@functools.cache
def best(task: str, base: str) -> tuple[float, float]:
    """The loss at the start, and at the end with the best rate of the sweep."""
    lr = recovery.BEST[task, base]
    runs = [recovery.train(recovery.Job(task, base, lr, seed)) for seed in range(2)]
    return mean(start for _, start, _ in runs), mean(end for _, _, end in runs)


@pytest.mark.parametrize(
    "seed", [case(seed, name=f"seed {seed}", by_day=seed < 1) for seed in range(10)]
)
@pytest.mark.parametrize(
    ("task", "base"),
    [case(*row, name="-".join(row), by_day=row in BY_DAY) for row in recovery.BEST],
)
def test_the_run_comes_back(task: str, base: str, seed: int) -> None:
    """Within a tenth of what training gains with the best fixed rate."""
    start, lowest = best(task, base)
    _, _, end = recovery.train(recovery.Job(task, base, None, seed))
    assert recovery.excess(start, end, lowest) < 10
