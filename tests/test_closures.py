"""Closures: called once, with gradients, and their loss is returned; LBFGS calls as it likes."""

import pytest
import torch
from bases import (
    BY_ID,
    Base,
    Problem,
    assert_equal,
    assert_moved,
    by_kind,
    make_problem,
    plain_bases,
    train,
)
from torch import Tensor

from mechanic.torch import mechanize


@pytest.mark.parametrize("base", by_kind(plain_bases))
def test_a_closure_is_called_once_and_changes_nothing(base: Base) -> None:
    one, two = make_problem(base), make_problem(base)
    without, with_closure = (mechanize(base.factory(p.params, lr=1.0)) for p in (one, two))
    losses = train(without, one, 24)
    calls: list[bool] = []
    for step in range(len(losses)):

        def closure(step: int = step) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return two.backward(step)

        with torch.no_grad():  # a closure needs gradients, whatever the mode around the step
            loss = with_closure.step(closure) if step % 2 else with_closure.step(closure=closure)
        assert float(loss) == losses[step]
    assert calls == [True] * len(losses)
    assert_equal(one.params, two.params)
    assert_moved(with_closure)


def test_the_loss_of_the_closure_is_returned() -> None:
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    for step in range(3):
        loss = problem.backward(step)
        assert opt.step(lambda loss=loss: loss) is loss
    assert opt.step() is None


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_its_closure_as_often_as_it_says(line_search: str | None) -> None:
    problem = make_problem(BY_ID["LBFGS"])
    opt = mechanize(torch.optim.LBFGS(problem.params, max_iter=4, line_search_fn=line_search))
    calls: list[tuple[bool, float]] = []

    def closure() -> Tensor:
        loss = problem.backward()
        calls.append((torch.is_grad_enabled(), float(loss)))
        return loss

    for step in range(5):
        before = len(calls)
        loss = opt.step(closure)
        assert float(loss) == calls[before][1]
        assert len(calls) > before + 1 or step > 0
    assert all(enabled for enabled, _ in calls)
    assert len(calls) == opt.state[problem.params[0]]["func_evals"]


def test_lbfgs_goes_as_plain_lbfgs_within_a_step() -> None:
    """The first step's evaluations are where the plain optimizer has them."""
    losses: list[list[float]] = []
    for wrap in (lambda opt: opt, mechanize):
        problem = make_problem(BY_ID["LBFGS"])
        opt = wrap(torch.optim.LBFGS(problem.params, max_iter=6))
        losses.append([])

        def closure(problem: Problem = problem) -> Tensor:
            loss = problem.backward()
            losses[-1].append(float(loss))
            return loss

        opt.step(closure)
    assert len(losses[0]) > 3
    assert losses[0] == losses[1]
