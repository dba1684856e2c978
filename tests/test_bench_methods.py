"""What trains: every method runs in every suite, as its authors mean it, and is judged fairly."""

import math

import pytest
import torch
from cases import case
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS, RunningMethod, choose
from mechanic.bench.suites import SUITES
from mechanic.bench.task import BuildSettings, Problem, Task, constant, linear
from mechanic.bench.train import DivergedError, Outcome, train
from mechanic.torch import mechanize

CPU = torch.device("cpu")
IN_TORCH = [name for name, method in METHODS.items() if "torch" in method.libraries]
pytestmark = pytest.mark.usefixtures("one_thread")


# By day every method in the first suite, and three of them, ours among them, in each other one
CASES = [
    case(
        *(suite, method),
        name=f"{suite}-{method}",
        by_day=suite != "jax"  # which test_optax_bench.py runs
        and (i == 0 or method == "mechanic" or (j - 2 * i) % len(METHODS) < 2),
    )
    for i, suite in enumerate(SUITES)
    for j, method in enumerate(METHODS)
]


@pytest.mark.parametrize(("suite", "method"), CASES)
def test_every_method_runs_in_every_suite(suite: str, method: str, data: Data) -> None:
    for task in SUITES[suite](data)[:1]:
        for base, lrs in METHODS[method].typed_rates(task, (1.0,)).items():
            lr = lrs[len(lrs) // 2]
            outcome = train(task, METHODS[method], base, lr, BuildSettings("smoke", 0, CPU, data))
            assert math.isfinite(outcome.metrics["train_loss"])
            assert outcome.metrics["train_loss"] != outcome.start_loss  # it moved
            assert all(math.isfinite(rate) for rate in outcome.curve.lr)
            assert outcome.curve.step[-1] == len(outcome.curve.loss)  # smoke: a point a step


def quadratic(steps: int = 50, **changes: object) -> Task:
    """Noisy, and the same to every method."""

    def build(setting: BuildSettings) -> Problem:
        torch.manual_seed(setting.seed)
        model = torch.nn.Linear(10, 1, bias=False)
        target = torch.randn(1, 10)
        generator = torch.Generator().manual_seed(setting.seed)
        batches = (torch.randn(16, 10, generator=generator) for _ in iter(int, 1))

        def loss(x: torch.Tensor) -> torch.Tensor:
            return (model(x) - x @ target.T).square().mean()

        given = {
            "evaluate": lambda: {
                "train_loss": float((model.weight.detach() - target).square().sum())
            },
            "steps": steps,
            "schedule": linear(0.1),
        }
        return Problem(model, batches, loss, **{**given, **changes})  # type: ignore[arg-type]

    return Task(
        "test",
        "quadratic",
        {"sgd": [0.1], "adamw": [0.1]},
        build,
        "train_loss",
        "",
        ("tabular", ""),
    )


def run(task: Task, method: str, base: str, lr: float) -> Outcome:
    return train(task, METHODS[method], base, lr, BuildSettings("smoke", 0, CPU, Data()))


def test_mechanic_in_the_bench_is_mechanize_in_a_loop() -> None:
    outcome = run(quadratic(), "mechanic", "adamw", 1.0)
    problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
    optimizer = mechanize(torch.optim.AdamW(problem.model.parameters(), lr=1.0, weight_decay=0.0))
    scheduler = LambdaLR(optimizer, lambda k: linear(0.1)(min((k + 0.5) / 50, 1.0)))
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = problem.loss(next(problem.batches))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert outcome.curve.loss == losses
    assert outcome.metrics == problem.evaluate()


def test_hyperparameters_reach_the_base_and_the_peers() -> None:
    given = {"adamw": {"betas": (0.8, 0.9), "weight_decay": 0.3}, "sgd": {"momentum": 0.5}}
    task = quadratic(hyperparameters=given)
    problem = task.build(BuildSettings("smoke", 0, CPU, Data()))
    plus = "prodigy-plus-schedule-free"
    for method in ("adamw", "mechanic", "mechanic-pytorch", "prodigy", plus, "dadaptation"):
        base = "" if method in ("prodigy", plus) else "adamw"
        group = METHODS[method].build(problem, base, 1.0).optimizer.param_groups[0]
        assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.3), method
    for method in ("sgd", "mechanic", "schedulefree-sgd", "dadaptation"):
        group = METHODS[method].build(problem, "sgd", 1.0).optimizer.param_groups[0]
        assert group["momentum"] == 0.5, method


def test_the_schedule_acts_where_a_method_takes_one() -> None:
    for method, base in (("adamw", "adamw"), ("prodigy", ""), ("mechanic-pytorch", "adamw")):
        task = quadratic(steps=20)
        live = METHODS[method].build(task.build(BuildSettings("smoke", 0, CPU, Data())), base, 1.0)
        assert live.scheduled, method
    rates = run(quadratic(), "adamw", "adamw", 0.1).curve.lr
    assert max(rates) == pytest.approx(0.1, rel=0.11)
    assert rates[-1] < 0.01 * max(rates) + 0.0023
    unscheduled = "dog", "ldog", "schedulefree-adamw", "schedulefree-sgd"
    for method in (*unscheduled, "prodigy-plus-schedule-free"):
        problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
        assert not METHODS[method].build(problem, "sgd", 1.0).scheduled, method


def test_a_run_that_diverges_says_when() -> None:
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step \d+ of 50"):
        run(quadratic(), "sgd", "sgd", 1e6)


def test_one_bad_batch_is_no_divergence() -> None:
    def poison(task: Task) -> Task:
        def build(setting: BuildSettings) -> Problem:
            problem = task.build(setting)
            batches = (
                x * float("nan") if k == 20 else x for k, x in enumerate(problem.batches)
            )  # fmt: skip
            return Problem(**{**vars(problem), "batches": batches})

        return Task(**{**vars(task), "build": build})

    assert run(poison(quadratic(300)), "mechanic", "adamw", 1.0).metrics["train_loss"] < 1.0
    with pytest.raises(DivergedError):
        run(poison(quadratic(300)), "adamw", "adamw", 0.1)


def test_dog_is_judged_by_its_average() -> None:
    problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
    live = METHODS["dog"].build(problem, "", 1.0)
    average = torch.zeros(1, 10)
    for t in range(1, 31):
        live.optimizer.zero_grad()
        problem.loss(next(problem.batches)).backward()
        live.optimizer.step()
        live.after_step()
        share = 9 / (8 + t)  # Shamir and Zhang's, with DoG's gamma of 8
        average = (1 - share) * average + share * problem.model.weight.detach()
    assert not torch.allclose(problem.model.weight, average)
    live.before_evaluation()
    torch.testing.assert_close(problem.model.weight.detach(), average)


def take_steps(live: RunningMethod, problem: Problem, steps: int) -> None:
    for _ in range(steps):
        live.optimizer.zero_grad()
        problem.loss(next(problem.batches)).backward()
        live.optimizer.step()


def test_schedule_free_is_judged_at_x_not_y() -> None:
    problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
    live = METHODS["schedulefree-adamw"].build(problem, "", 0.1)
    take_steps(live, problem, 30)
    y = problem.model.weight.detach().clone()
    z = live.optimizer.state[problem.model.weight]["z"]
    live.before_evaluation()
    x = problem.model.weight.detach()
    assert not torch.allclose(x, y)
    torch.testing.assert_close(0.9 * x + 0.1 * z, y)  # y is nine parts x and one part z


def test_prodigy_plus_schedule_free_is_judged_at_x_not_y() -> None:
    problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
    live = METHODS["prodigy-plus-schedule-free"].build(problem, "", 1.0)
    take_steps(live, problem, 200)
    assert live.rate() > 1e-4  # it has left its first guess of 1e-6
    y = problem.model.weight.detach().clone()
    z = live.optimizer.state[problem.model.weight]["z"].clone()
    live.before_evaluation()
    x = problem.model.weight.detach()
    assert not torch.allclose(x, y)
    torch.testing.assert_close(0.9 * x + 0.1 * z, y)


def test_prodigy_plus_schedule_free_runs_as_its_readme_says() -> None:
    """Neither scheduled nor clipped, where the methods beside it are both."""
    tight = quadratic(60, clip=1e-3)
    problem = tight.build(BuildSettings("smoke", 0, CPU, Data()))
    live = METHODS["prodigy-plus-schedule-free"].build(problem, "", 1.0)
    assert (live.scheduled, live.clipped, live.averages) == (False, False, True)
    name = "prodigy-plus-schedule-free"
    free, clipped = (run(quadratic(60, clip=c), name, "", 1.0) for c in (None, 1e-3))
    assert free.metrics == clipped.metrics
    assert free.curve == clipped.curve
    one, other = (run(quadratic(60, clip=c), "prodigy", "", 1.0) for c in (None, 1e-3))
    assert one.curve != other.curve


EMA = 0.9


def averaged_by_hand(method: str, base: str, lr: float, steps: int) -> torch.Tensor:
    """A float64 moving average of the weights, beside the same method in a loop."""
    problem = quadratic(steps).build(BuildSettings("smoke", 0, CPU, Data()))
    live = METHODS[method].build(problem, base, lr)
    schedule = linear(0.1)
    scheduler = LambdaLR(live.optimizer, lambda k: schedule(min((k + 0.5) / steps, 1.0)))
    mean = problem.model.weight.detach().double().clone()
    for step in range(1, steps + 1):
        live.optimizer.zero_grad()
        problem.loss(next(problem.batches)).backward()
        live.optimizer.step()
        scheduler.step()
        decay = min(EMA, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * problem.model.weight.detach().double()
    return mean


@pytest.mark.parametrize(("method", "lr"), [("adamw", 0.03), ("mechanic", 1.0)])
def test_a_task_with_an_average_is_evaluated_with_it(method: str, lr: float) -> None:
    kept: list[torch.Tensor] = []
    build = quadratic(200, ema=EMA).build

    def remember(setting: BuildSettings) -> Problem:
        problem = build(setting)
        kept.append(problem.model.weight)
        return problem

    task = Task(**{**vars(quadratic(200)), "build": remember})
    outcome, plain = run(task, method, "adamw", lr), run(quadratic(200), method, "adamw", lr)
    expected = averaged_by_hand(method, "adamw", lr, 200)
    torch.testing.assert_close(kept[0].detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert outcome.curve == plain.curve  # training does not see the average
    assert outcome.metrics != plain.metrics


@pytest.mark.parametrize("method", ["dog", "schedulefree-adamw", "prodigy-plus-schedule-free"])
def test_a_method_with_an_average_of_its_own_keeps_to_it(method: str) -> None:
    given = METHODS[method].lr
    with_average, without = (run(quadratic(60, ema=e), method, "", given) for e in (EMA, None))
    assert with_average.metrics == without.metrics


@pytest.mark.parametrize("method", [name for name in IN_TORCH if "lion" not in name])
def test_frozen_weights_are_seen_by_no_method(method: str) -> None:
    problem = quadratic().build(BuildSettings("smoke", 0, CPU, Data()))
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    problem.model.add_module("frozen", frozen)
    before = frozen.weight.clone()
    base = next(base for base in METHODS[method].bases if base in ("", "sgd", "adamw"))
    live = METHODS[method].build(problem, base, 0.01 if METHODS[method].kind == "sweep" else 1.0)
    seen = [p for group in live.optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in seen] == [id(problem.model.weight)]
    for _ in range(3):
        live.optimizer.zero_grad()
        problem.loss(next(problem.batches)).backward()
        live.optimizer.step()
        live.after_step()
    live.before_evaluation()
    assert torch.equal(frozen.weight, before)


def test_constant_is_constant_after_its_warm_up() -> None:
    assert [constant(0.1)(done) for done in (0.05, 0.1, 0.5, 0.999)] == [0.5, 1, 1, 1]
    assert constant()(0.0) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dadaptations_rate_is_that_of_sgd(momentum: float) -> None:
    """On a constant gradient, SGD at the rate it tells moves as it does."""
    model = torch.nn.Linear(1, 1, bias=False)
    given = {"hyperparameters": {"sgd": {"momentum": momentum}}, "schedule": lambda done: 1.0}
    task = quadratic(400, **given)
    problem = task.build(BuildSettings("smoke", 0, CPU, Data()))
    problem = Problem(**{**vars(problem), "model": model})
    live = METHODS["dadaptation"].build(problem, "sgd", 1.0)
    moved = []
    for _ in range(400):
        before = model.weight.item()
        model.weight.grad = torch.full((1, 1), 3.0)
        live.optimizer.step()
        moved.append(before - model.weight.item())
        if live.optimizer.param_groups[0]["d"] > 1:
            live.optimizer.param_groups[0]["growth_rate"] = 1.0
    assert moved[-1] == pytest.approx(3.0 * live.rate() / (1 - momentum), rel=0.05)


def test_tasks_choose_their_methods(data: Data) -> None:
    names = {
        task.name: [method.name for method in choose(task, ())]
        for suite in ("vision", "scaling", "dropout")
        for task in SUITES[suite](data)
    }
    assert "mechanic-paper-lambda-0.1" in names["resnet18-cifar10"]  # Table 2 of the paper
    assert "mechanic-paper-lambda-0.1" not in names["vit-cifar10"]
    scaling = next(chosen for name, chosen in names.items() if "batch-x" in name)
    assert scaling == ["mechanic", "mechanic-paper"]
    assert [m.name for m in choose(SUITES["scaling"](data)[0], ("dog",))] == ["dog"]
