"""Step hooks: they run once a step, and what they change is honoured."""

import itertools
from typing import Any

import pytest
import torch
from bases import (
    Base,
    assert_equal,
    assert_moved,
    few_bases,
    make_problem,
    take_step,
    train,
    values,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mechanic.torch import mechanize


@few_bases
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_step_hooks_run_once_a_step_and_see_the_final_weights(base: Base, early: bool) -> None:
    problem = make_problem()
    opt = base.factory(problem.params)
    calls: list[str] = []
    seen: list[list[Tensor]] = []
    if not early:
        mechanize(opt)
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    opt.register_step_post_hook(lambda o, *_: seen.append(values(o.param_groups[0]["params"])))
    if early:
        mechanize(opt)
    for step in range(22):
        take_step(opt, problem, step)
        assert calls == ["pre", "post"] * (step + 1)
        assert_equal(seen[-1], problem.params)
    assert_moved(opt)


@few_bases
def test_a_hook_that_changes_the_gradients_is_honoured(base: Base) -> None:
    one, two = make_problem(), make_problem()

    def clip(opt: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 0.1)

    hooked, by_hand = (mechanize(base.factory(p.params)) for p in (one, two))
    hooked.register_step_pre_hook(clip)
    for step in range(24):
        one.backward(step)
        hooked.step()
        two.backward(step)
        clip(by_hand)
        by_hand.step()
    assert_equal(one.params, two.params)
    assert_moved(hooked)


def test_a_hook_that_changes_the_arguments_is_honoured() -> None:
    one, two = make_problem(), make_problem()
    steps = itertools.count()

    def supply(opt: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        step = next(steps)
        return (opt, one.closure(step)), kwargs

    hooked, plain = (mechanize(torch.optim.AdamW(p.params, lr=1.0)) for p in (one, two))
    hooked.register_step_pre_hook(supply)
    losses = [float(hooked.step()) for _ in range(24)]
    assert losses == train(plain, two, 24)
    assert_equal(one.params, two.params)
    assert_moved(hooked)


@few_bases
def test_global_hooks_run_once_a_step(base: Base) -> None:
    problem = make_problem()
    opt = mechanize(base.factory(problem.params))
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        train(opt, problem, 3)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["pre", "post"] * 3
