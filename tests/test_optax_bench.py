"""The suite `jax` of the bench: its runs are those of torch, its model is a language model, and its
commands, storage and report are those of the other suites."""

import csv
import math
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from optax_runs import row

from mechanic.bench import optax_run
from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import SUITES
from mechanic.bench.suites import jax as suite
from mechanic.bench.task import BuildSettings, OptaxProblem, Problem, Task, cosine
from mechanic.bench.train import DivergedError, Outcome, train

CPU = torch.device("cpu")
HYPERPARAMETERS = {"adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1}}
STEPS = 40


def drawn(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(8, 5)).astype(np.float32) for _ in iter(int, 1))


def loss(weights: Any, x: Any) -> Any:
    return ((x @ (weights - 1)) ** 2).mean()


def in_jax(settings: BuildSettings) -> OptaxProblem:
    return OptaxProblem(
        jnp.full(5, -2.0),
        batches=drawn(settings.seed),
        loss=loss,
        evaluate=lambda weights: {"train_loss": float(((weights - 1) ** 2).sum())},
        steps=STEPS,
        schedule=cosine(0.2),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
    )


def in_torch(settings: BuildSettings) -> Problem:
    model = torch.nn.Linear(5, 1, bias=False)
    torch.nn.init.constant_(model.weight, -2.0)
    # In JAX the first batch is there to compile the step.
    batches = map(torch.tensor, islice(drawn(settings.seed), 1, None))
    return Problem(
        model,
        batches=batches,
        loss=lambda x: loss(model.weight.T, x),
        evaluate=lambda: {"train_loss": float(((model.weight.detach() - 1) ** 2).sum())},
        steps=STEPS,
        schedule=cosine(0.2),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
    )


def run(library: Any, method: str, lr: float) -> Outcome:
    build: Any = in_jax if library == "optax" else in_torch
    task = Task("jax", "toy", {"adamw": [lr]}, build, "", "", None, library=library)
    return train(task, METHODS[method], "adamw", lr, BuildSettings("smoke", 0, CPU, Data()))


@pytest.mark.parametrize(
    ("method", "lr"),
    [
        row("adamw", 0.1),
        row("mechanic", 1.0, by_day=False),
        row("mechanic-paper", 1.0, by_day=False),
        row("mechanic-optax", 1.0, by_day=False),
    ],
)
def test_a_run_is_that_of_torch(method: str, lr: float) -> None:
    ours, theirs = run("optax", method, lr), run("torch", method, lr)
    assert ours.start_loss == theirs.start_loss == 45.0
    # The start of the paper's rule is far smaller, and the run is short.
    assert theirs.metrics["train_loss"] < (44.5 if method == "mechanic-paper" else 44.0)
    assert ours.metrics["train_loss"] == pytest.approx(theirs.metrics["train_loss"], rel=1e-3)
    assert ours.curve.step == theirs.curve.step
    np.testing.assert_allclose(ours.curve.loss, theirs.curve.loss, rtol=1e-3)
    # The tuner of torch has learned from a step when its rate is told, and so has ours.
    np.testing.assert_allclose(ours.curve.lr, theirs.curve.lr, rtol=2e-3)
    if method == "adamw":
        with pytest.raises(DivergedError, match=r"the loss is (inf|nan) at step"):
            run("optax", method, 1e38)


def test_methods_are_those_that_there_are_in_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = SUITES["jax"](Data())
    assert task.missing == ""
    assert {name for name, own in METHODS.items() if "optax" in own.libraries} == set(
        optax_run._BUILDERS
    )
    for name, method in METHODS.items():
        assert bool(method.typed_rates(task, (1.0,))) == (name in optax_run._BUILDERS)
        torch_task = replace(task, library="torch")
        assert not (name.startswith("optax-") and method.typed_rates(torch_task, (1.0,)))
    with pytest.raises(ValueError, match="the suite jax alone"):
        METHODS["optax-prodigy"].build(in_torch(BuildSettings("smoke", 0, CPU, Data())), "", 1.0)
    monkeypatch.setitem(sys.modules, "optax", None)
    (task,) = SUITES["jax"](Data())
    assert task.missing == 'optax is not installed: pip install ".[optax]" in a clone.'


def test_a_device_that_jax_has_not() -> None:
    assert optax_run.device_of(CPU) in jax.devices("cpu")
    with pytest.raises(ValueError, match=r"JAX cannot use the device meta.*--device cpu"):
        optax_run.device_of(torch.device("meta"))


@pytest.mark.nightly
def test_the_peers_learn() -> None:
    for method in ("optax-mechanize", "optax-prodigy"):
        outcome = run("optax", method, 1.0)
        assert outcome.metrics["train_loss"] < outcome.start_loss
        assert all(math.isfinite(rate) and rate > 0 for rate in outcome.curve.lr)


@pytest.mark.nightly
def test_the_model_is_a_language_model(data: Data) -> None:
    (task,) = SUITES["jax"](data)
    problems = [task.build(BuildSettings("smoke", seed, CPU, data)) for seed in (0, 0, 1)]
    one, again, other = (jax.tree.leaves(problem.params) for problem in problems)
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert not all((a == b).all() for a, b in zip(one, other, strict=True))
    batches = [next(problem.batches) for problem in problems]
    np.testing.assert_array_equal(batches[0], batches[1])
    assert (batches[0] != batches[2]).any()
    problem, tokens = problems[0], batches[0][:, :-1]
    size = suite.SIZES["smoke"]
    assert tokens.shape == (size.batch, size.context)
    assert abs(problem.evaluate(problem.params)["train_loss"] - math.log(256)) < 0.1
    grads = jax.grad(problem.loss)(problem.params, batches[0])
    assert all((grad != 0).any() for grad in jax.tree.leaves(grads))

    # No byte sees a later one, and each sees the ones before.
    logits = suite._logits(size.width, problem.params, tokens)
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    after = suite._logits(size.width, problem.params, changed)
    np.testing.assert_allclose(after[:, :5], logits[:, :5], atol=1e-6)
    assert (abs(after[:, 6:] - logits[:, 6:]).max(-1) > 1e-6).all()


@pytest.mark.nightly
def test_the_command_the_storage_and_the_report(tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "mechanic", *words]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)

    bench = ("bench", "jax", "--budget", "smoke", "--seeds", "1", "--jobs", "1")
    done = command(*bench, "--methods", "adamw", "mechanic", "prodigy", "optax-prodigy")
    assert done.returncode == 0, done.stderr
    assert "9 runs, 1 at a time" in done.stderr  # 7 learning rates; prodigy is torch's
    again = command(*bench, "--methods", "adamw", "mechanic", "optax-prodigy")
    assert "train loss" not in again.stderr
    nothing = command(*bench, "--methods", "prodigy")
    assert (nothing.returncode, "Nothing to run." in nothing.stderr) == (1, True)
    assert command("report").returncode == 0
    with (tmp_path / "mechanic-report" / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert {own["method"] for own in runs} == {"adamw", "mechanic", "optax-prodigy"}
    assert {own["status"] for own in runs} == {"done"}
    for package in ("jax", "optax"):
        assert {own[f"environment.{package}"] for own in runs} == {version(package)}
