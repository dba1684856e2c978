"""`torch.compile` of the model, and of the step."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from bases import BY_ID, Base, make_problem, scheduled_bases, train
from cases import case
from comparing import assert_same_run
from torch.optim import lr_scheduler

from mechanic.torch import mechanize, tuner
from mechanic.torch.edits import are_followed


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    """What a test that compiles needs; torch's own imports for it warn of their future."""
    test = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")(test)
    return pytest.mark.usefixtures("fresh_compiler")(test)


@compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@scheduled_bases
def test_a_compiled_model(base: Base, backend: str) -> None:
    one, two = (make_problem(dtype=torch.float64, hidden=16) for _ in range(2))
    eager, opt = (mechanize(base.factory(p.params)) for p in (one, two))
    two.model = torch.compile(two.model, backend=backend)
    train(eager, one, 25)
    train(opt, two, 25)
    assert_same_run(eager, opt)


@compiled
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        case("AdamW", True, name="opt.step"),
        case("SGD-momentum", False, name="function", by_day=False),  # as the next one, and slower
    ],
)
def test_a_compiled_step(name: str, whole: bool) -> None:
    one, two = (make_problem(dtype=torch.float64, hidden=16) for _ in range(2))
    eager, opt = (mechanize(BY_ID[name].factory(p.params)) for p in (one, two))
    step = torch.compile(opt.step if whole else lambda: opt.step(), backend="eager")
    train(eager, one, 25)
    for i in range(25):
        two.backward(i)
        step()
    assert_same_run(eager, opt, rtol=1e-4)  # compiled, torch's Adam counts its steps in float32


@compiled
@pytest.mark.nightly
def test_compiled_steps_between_others_are_no_edits() -> None:
    """Of the weights, by someone else: `mechanic.torch.edits` sees none of the compiled ones."""
    one, two = (make_problem(dtype=torch.float64, hidden=16) for _ in range(2))
    eager, opt = (mechanize(BY_ID["AdamW"].factory(p.params)) for p in (one, two))
    step = torch.compile(opt.step, backend="eager")
    train(eager, one, 25)
    for i in range(25):
        two.backward(i)
        (step if i > 5 and i % 2 else opt.step)()
        assert not are_followed(opt._mechanic)
    assert_same_run(eager, opt, rtol=1e-4)


@compiled
@pytest.mark.nightly
def test_a_compiled_fused_step_with_a_schedule_and_tensor_lr() -> None:
    one, two = (make_problem(dtype=torch.float64, hidden=16) for _ in range(2))
    opts = []
    for problem in (one, two):
        lr = torch.tensor(1.0, dtype=torch.float64)
        opts.append(mechanize(torch.optim.AdamW(problem.params, lr=lr, fused=True)))
    step = torch.compile(lambda: opts[1].step(), backend="eager")
    schedulers = [lr_scheduler.ExponentialLR(opt, 0.97) for opt in opts]
    for i in range(25):
        for problem in (one, two):
            problem.backward(i)
            if i == 12:
                problem.params[0].grad.fill_(math.nan)
        opts[0].step()
        step()
        for scheduler in schedulers:
            scheduler.step()
    assert [int(tuner(opt).metrics()["skipped"]) for opt in opts] == [1, 1]
    assert_same_run(*opts, rtol=1e-4)
