"""The scripts of examples/unmodified/, which do not import this library, under `mechanic run`.

The bound is on the number that a script prints last, the loss over its training set: with the lr
typed 100 times too small and 100 times too large for the best of a sweep, `mechanic run` ends
within a few percent of that best. The sweep is run here, around the best lr of the wider one in
benchmarks/results/run_examples_cpu.md, which benchmarks/run_examples.py makes.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
import run_examples
from run_examples import GRIDS, SCRIPTS, script, sweep, tuned
from running import PATH, Logged, call

# Arguments with which a script takes some tens of steps, and the optimizers that it makes.
QUICK = {
    "plain_loop": ("--epochs", "1", "--batch-size", "512"),
    "trainer": ("--epochs", "0.05"),
    "lightning_module": ("--epochs", "2"),
    "accelerate_loop": ("--epochs", "1", "--batch-size", "64"),
    "grad_scaler": ("--epochs", "1", "--batch-size", "256"),
    "accumulation": ("--epochs", "1", "--batch-size", "32"),
    "gan": ("--epochs", "2"),
}
MADE = dict.fromkeys(QUICK, 1) | {"gan": 2}
WEDGED = 1e-5  # an lr at which none of them would get anywhere

FEW_PERCENT = 1.05
# What differs from run to run: seconds, steps a second, and the length of a bar beside them.
TIMES = re.compile(
    r"'\w*(runtime|per_second)': '?[\d.e-]+'?|[\d.]+(s/it|it/s)|\d+:\d\d:\d\d|[━╸╺ ]+"
)


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run_examples.ENVIRONMENT, "PYTHONPATH", PATH)


def test_these_are_the_examples_that_know_nothing_of_the_library():
    scripts = list(SCRIPTS.glob("*.py"))
    assert not [path.name for path in scripts if "mechani" in path.read_text().lower()]
    assert {path.stem for path in scripts} == QUICK.keys() == GRIDS.keys()


slow = pytest.mark.nightly


@slow
@pytest.mark.parametrize("name", QUICK)
def test_runs_unmodified_and_is_tuned(name: str, tmp_path: Path):
    run = call(tmp_path, "--log", "log", *arguments(name))
    assert run.returncode == 0, run.stderr
    made = Logged(tmp_path / "log").summary["optimizers"]
    assert len(made) == MADE[name]
    for one in made:
        rows = Logged(tmp_path / "log").of(one["optimizer"])
        assert one["status"] == "tuned"
        assert len(rows) == one["steps"] >= 20
        scales = [row["scale"] for row in rows]
        assert max(scales) > 2 * min(scales) > 0


@slow
@pytest.mark.parametrize("name", QUICK)
def test_watched_it_prints_what_it_prints_under_python(name: str, tmp_path: Path):
    plain = call(tmp_path, *arguments(name), python=True)
    watched = call(tmp_path, "--dry-run", *arguments(name))
    assert plain.returncode == watched.returncode == 0, watched.stderr
    assert lines(watched.stdout) == lines(plain.stdout)
    assert lines(plain.stdout)


def arguments(name: str) -> tuple[str, ...]:
    return (script(name), *QUICK[name], "--lr", str(WEDGED))


def lines(output: str) -> list[str]:
    """What a script printed, its timings aside."""
    return [TIMES.sub(" ", line) for line in output.replace("\r", "\n").splitlines()]


@slow
def test_a_module_that_a_package_ships(tmp_path: Path):
    """Accelerate's own script: ten trainings, and assertions that they end at the same weights."""
    module = "accelerate.test_utils.scripts.test_script"
    done = call(tmp_path, "--log", "log", "-m", module)
    assert done.returncode == 0, done.stderr
    made = Logged(tmp_path / "log").summary["optimizers"]
    assert len(made) == 10
    for one in made:
        assert (one["class"], one["status"]) == ("SGD", "tuned")
        assert one["scale"]["high"] > 3 * one["scale"]["low"] > 0


class Outcome(NamedTuple):
    """As multiples of the loss at the best lr of the sweep, the means over the seeds."""

    typed_too_small: float
    typed_too_large: float
    beside: float  # plain, at the worse of the lrs half a decade from the best


def outcome(name: str, grid: Sequence[float], seeds: Sequence[int], *more: str) -> Outcome:
    losses = sweep(name, grid, seeds, *more)
    lrs = list(losses)
    best = min(lrs, key=losses.__getitem__)
    assert best not in (lrs[0], lrs[-1]), f"the grid of {name} must hold its best inside: {losses}"
    small, large = (
        fmean(tuned(name, typed, seed, *more).loss for seed in seeds)
        for typed in (best / 100, best * 100)
    )
    beside = max(losses[lrs[lrs.index(best) + way]] for way in (-1, 1))
    return Outcome(*(loss / losses[best] for loss in (small, large, beside)))


@pytest.mark.parametrize(
    ("name", "grid", "epochs"),
    [
        pytest.param("plain_loop", [0.01, 0.03, 0.1], "1", marks=slow),
        pytest.param("plain_loop", [0.01, 0.03, 0.1], "3", marks=slow),
        pytest.param("grad_scaler", [0.03, 0.1, 0.3], "4", marks=slow),
    ],
)
def test_a_wrong_lr_ends_near_the_best_of_a_sweep(name: str, grid: list[float], epochs: str):
    found = outcome(name, grid, [0], "--epochs", epochs)
    assert max(found.typed_too_small, found.typed_too_large) < FEW_PERCENT


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(GRIDS.keys() - {"gan"}))
def test_a_wrong_lr_ends_near_the_best_over_three_seeds(name: str):
    found = outcome(name, GRIDS[name], seeds=range(3))
    assert max(found.typed_too_small, found.typed_too_large) < FEW_PERCENT


@pytest.mark.nightly
def test_a_gan_typed_wrong_draws_no_worse_than_one_typed_half_a_decade_off():
    """Neither of its losses says how good it is. The distance that does is 30 % above the best of
    the sweep: no few percent, but as good as an lr within a factor of three of the best."""
    found = outcome("gan", GRIDS["gan"], seeds=range(3))
    assert max(found.typed_too_small, found.typed_too_large) < found.beside
