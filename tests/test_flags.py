"""What a base can be told: maximize, foreach, fused and capturable."""

from typing import Any

import pytest
import torch
from bases import BY_ID, KINDS, Base, assert_equal, assert_moved, make_problem, supporting, train
from cases import case
from comparing import assert_same_run

from mechanic.torch import mechanize, tuner


@pytest.mark.parametrize(
    ("base", "options"),
    [
        *(case(b, {}, name=b.id, by_day=b.id in KINDS) for b in supporting("maximize")),
        pytest.param(BY_ID["AdamW"], {"preset": "paper", "s_init": 1e-5}, id="AdamW-paper"),
        pytest.param(BY_ID["SGD-momentum"], {"s_decay": 0.01}, id="SGD-momentum-decay"),
    ],
)
def test_maximize_mirrors_minimize(base: Base, options: dict[str, Any]) -> None:
    one, two = make_problem(base), make_problem(base)
    down = mechanize(base.factory(one.params, lr=1.0), **options)
    up = mechanize(base.factory(two.params, lr=1.0, maximize=True), **options)
    for step in range(30):
        one.backward(step)
        down.step()
        two.model.zero_grad()
        (-two.loss(step)).backward()
        up.step()
    assert_moved(down)
    assert_moved(up)
    assert torch.equal(tuner(down).scale, tuner(up).scale)
    assert_equal(one.params, two.params)


def test_maximize_of_one_group() -> None:
    """As an adversary has it: one group goes up, the other down."""
    scales = []
    for up in (False, True):
        x, y = (torch.ones(4, dtype=torch.float64).requires_grad_() for _ in range(2))
        groups = [{"params": [x]}, {"params": [y], "maximize": up}]
        opt = mechanize(torch.optim.SGD(groups, lr=1.0))
        for _ in range(60):
            opt.zero_grad()
            ((x - 3) ** 2 + (-1 if up else 1) * (y + 2) ** 2).sum().backward()
            opt.step()
        assert_moved(opt, 100)
        torch.testing.assert_close(x.detach(), torch.full_like(x, 3), atol=0.2, rtol=0)
        torch.testing.assert_close(y.detach(), torch.full_like(y, -2), atol=0.2, rtol=0)
        scales.append(tuner(opt).scale)
    assert torch.equal(*scales)


FLAGGED = [
    case(base, flag, name=f"{base.id}-{flag}", by_day=base.id in KINDS)
    for flag in ("foreach", "fused")
    for base in supporting(flag)
]


@pytest.mark.parametrize(("base", "flag"), FLAGGED)
def test_another_implementation_gives_the_same(base: Base, flag: str) -> None:
    one, two = make_problem(base, dtype=torch.float64), make_problem(base, dtype=torch.float64)
    off = {"foreach": False} if "foreach" in base.flags else {}
    default = mechanize(base.factory(one.params, lr=1.0, **off))
    other = mechanize(base.factory(two.params, lr=1.0, **{flag: True}))
    train(default, one, 25)
    train(other, two, 25)
    assert_same_run(default, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturable needs an accelerator")
@pytest.mark.parametrize("base", supporting("capturable"), ids=str)
def test_capturable_gives_the_same(base: Base) -> None:
    runs = []
    for capturable in (False, True):
        problem = make_problem(base, dtype=torch.float64)
        problem.model.cuda()
        problem.images, problem.labels = problem.images.cuda(), problem.labels.cuda()
        runs.append(mechanize(base.factory(problem.params, lr=1.0, capturable=capturable)))
        train(runs[-1], problem, 25)
    assert_same_run(*runs)
