"""Schedules run as on the plain optimizer, and shape what the tuner has found."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bases import (
    BY_ID,
    SCHEDULERS,
    Base,
    advance,
    assert_equal,
    assert_moved,
    make_problem,
    scheduled_bases,
    take_step,
    train,
    values,
)
from cases import case
from comparing import two_groups
from torch.optim import Optimizer, lr_scheduler

from mechanic.torch import mechanize, tuner

# They change the momentum too, look at a metric, or hold others.
OWN_WAYS = ("CyclicLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR")


def test_every_scheduler_of_torch_is_here() -> None:
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= {*SCHEDULERS}


@pytest.mark.parametrize(
    ("base", "make"),
    [
        *(case(BY_ID["AdamW"], make, name=f"AdamW-{name}") for name, make in SCHEDULERS.items()),
        *(
            case(BY_ID["SGD-momentum"], make, name=f"SGD-momentum-{name}", by_day=name in OWN_WAYS)
            for name, make in SCHEDULERS.items()
        ),
    ],
)
def test_a_schedule_runs_as_on_the_plain_optimizer(
    base: Base, make: Callable[[Optimizer], Any]
) -> None:
    """Made before or after mechanize: the same lrs, the same training, and no warning."""
    one, two, three = (make_problem(hidden=16) for _ in range(3))
    start = one.total()
    early, late, plain = (base.factory(two_groups(p, 1.0, 0.5)) for p in (one, two, three))
    before = make(early)
    mechanize(early)
    mechanize(late)
    schedulers = [before, make(late), make(plain)]
    lrs: list[list[list[float]]] = [[], [], []]
    for step in range(36):
        take_step(early, one, step)
        take_step(late, two, step)
        plain.step()  # without gradients: it is there for its lrs
        for opt, scheduler, seen in zip((early, late, plain), schedulers, lrs, strict=True):
            seen.append([group["lr"] for group in opt.param_groups])
            advance(scheduler, step)
    assert lrs[0] == lrs[1] == lrs[2]
    assert len({lr for lr, _ in lrs[0]}) > 1
    assert_equal(one.params, two.params)
    assert one.total() < 0.95 * start
    assert_moved(early)
    assert_moved(late)


@scheduled_bases
@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_that_steps_before_the_optimizer_is_still_told_so(
    base: Base, early: bool
) -> None:
    problem = make_problem(hidden=16)
    opt = base.factory(problem.params)
    scheduler = SCHEDULERS["StepLR"](opt) if early else None
    mechanize(opt)
    scheduler = scheduler or SCHEDULERS["StepLR"](opt)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_schedule_shapes_the_update(name: str) -> None:
    """At the same scale, a step at half the lr is half as long, and at 0 the weights stop."""
    base = BY_ID[name]
    shares = [1.0, 0.5, 0.125, 0.0]
    moves = []
    for share in shares:
        problem = make_problem(dtype=torch.float64, hidden=16)
        opt = mechanize(base.factory(problem.params, weight_decay=0.0))
        scheduler = lr_scheduler.LambdaLR(opt, lambda step, s=share: 1.0 if step < 25 else s)
        train(opt, problem, 25, scheduler=scheduler)
        assert_moved(opt)
        tuner(opt).freeze()
        before = values(problem.params)
        take_step(opt, problem, 25)
        moves.append([p.detach() - x for p, x in zip(problem.params, before, strict=True)])
    for share, move in zip(shares, moves, strict=True):
        for own, whole in zip(move, moves[0], strict=True):
            torch.testing.assert_close(own, share * whole, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("start_factor", [1e-2, 1e-4, 1e-6])
@scheduled_bases
def test_a_warm_up_from_almost_0(base: Base, start_factor: float) -> None:
    """A first lr that is far below the second one must not start the scale far too high."""
    problem = make_problem()
    start = problem.total()
    opt = mechanize(base.factory(problem.params))
    scheduler = lr_scheduler.LinearLR(opt, start_factor=start_factor, total_iters=8)
    losses = train(opt, problem, 48, scheduler=scheduler)
    assert max(losses) < 1.5 * start
    assert problem.total() < 0.5 * start


@scheduled_bases
def test_a_warm_up_from_0(base: Base) -> None:
    problem = make_problem()
    start = problem.total()
    opt = mechanize(base.factory(problem.params))
    scheduler = lr_scheduler.LambdaLR(opt, lambda step: min(step / 8, 1))
    losses = train(opt, problem, 48, scheduler=scheduler)
    assert max(losses) < 1.5 * start
    assert problem.total() < 0.5 * start
    assert_moved(opt)


def test_warnings_are_errors_here() -> None:
    with pytest.raises(UserWarning, match="so that"):
        warnings.warn("so that the tests above mean something", UserWarning, stacklevel=1)
