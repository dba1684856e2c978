"""The lr that is typed: as a number or a tensor, 0 for a while or for one group, by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    FEW,
    KINDS,
    SCHEDULERS,
    Base,
    assert_equal,
    assert_moved,
    by_kind,
    make_problem,
    scheduled_bases,
    supporting,
    take_step,
    train,
    values,
)
from cases import case
from comparing import assert_same_run, displacements, tuner_of, two_groups
from torch import Tensor
from torch.optim import lr_scheduler

from mechanic.torch import mechanize, tuner


@pytest.mark.parametrize("base", by_kind(b for b in BASES if b.tensor_lr))
def test_a_tensor_lr_is_as_a_number(base: Base) -> None:
    one, two = make_problem(base, dtype=torch.float64), make_problem(base, dtype=torch.float64)
    as_number = mechanize(base.factory(one.params, lr=0.75))
    lr = torch.tensor(0.75, dtype=torch.float64)
    as_tensor = mechanize(base.factory(two.params, lr=lr))
    steps = 3 if base.needs_closure else 24
    train(as_number, one, steps)
    train(as_tensor, two, steps)
    assert as_tensor.param_groups[0]["lr"] is lr
    assert float(lr) == 0.75
    if base.needs_closure:
        torch.testing.assert_close(one.params, two.params)
    else:
        assert_same_run(as_number, as_tensor)


@pytest.mark.parametrize("base", by_kind(supporting("fused")))
def test_a_tensor_lr_of_a_fused_base(base: Base) -> None:
    one, two = make_problem(dtype=torch.float64), make_problem(dtype=torch.float64)
    as_number = mechanize(base.factory(one.params, lr=0.75, fused=True))
    lr = torch.tensor(0.75, dtype=torch.float64)
    as_tensor = mechanize(base.factory(two.params, lr=lr, fused=True))
    train(as_number, one, 24)
    train(as_tensor, two, 24)
    assert_same_run(as_number, as_tensor)


def test_a_tensor_lr_on_a_schedule() -> None:
    problems = [make_problem(dtype=torch.float64) for _ in range(2)]
    lrs = (0.75, torch.tensor(0.75, dtype=torch.float64))
    opts = []
    for problem, lr in zip(problems, lrs, strict=True):
        opts.append(mechanize(torch.optim.AdamW(problem.params, lr=lr)))
        train(opts[-1], problem, 24, scheduler=SCHEDULERS["CosineAnnealingLR"](opts[-1]))
    assert opts[1].param_groups[0]["lr"] is lrs[1]
    assert float(lrs[1]) < 0.5
    assert_same_run(*opts)


def typed(base: Base, lr: float, as_tensor: bool, warm: int) -> float | Tensor:
    if as_tensor and not base.tensor_lr:
        pytest.skip("it takes no tensor lr")
    if as_tensor and base.modes and not warm:
        pytest.skip("at a tensor lr of 0 the plain base divides 0 by 0 and is NaN from then on")
    return torch.tensor(lr) if as_tensor else lr


def set_lr(group: dict[str, Any], lr: float) -> None:
    """As torch's schedulers do it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


SEVERAL = [*FEW, *(BY_ID[n] for n in ("Adafactor", "Rprop", "ScheduleFree-AdamW", "AdamW8bit"))]
# By day all four with AdamW, and two of the four with each of the others, in turns
AT_0 = [
    case(
        *(base, tensor, warm),
        name=f"{base.id}-{kind}-{'mid-run' if warm else 'start'}",
        by_day=base.id == "AdamW" or (i + tensor + (warm > 0)) % 2 == 1,
    )
    for i, base in enumerate(SEVERAL)
    for tensor, kind in ((False, "float"), (True, "tensor"))
    for warm in (0, 12)
]


@pytest.mark.parametrize(
    ("base", "as_tensor", "warm"),
    [
        *AT_0,
        *(
            case(base, False, 12, name=f"{base.id}-float-mid-run", by_day=base.id in KINDS)
            for base in BASES
            if base not in SEVERAL
        ),
    ],
)
def test_at_lr_0_the_weights_and_the_tuner_stay(base: Base, as_tensor: bool, warm: int) -> None:
    if base.needs_closure:
        warm = min(warm, 2)
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=typed(base, 1.0, as_tensor, warm)))
    train(opt, problem, warm)
    weights, known, moved = values(problem.params), tuner_of(opt), displacements(opt)
    for group in opt.param_groups:
        set_lr(group, 0.0)
    for step in range(warm, warm + 3):
        take_step(opt, problem, step)
        assert_equal(problem.params, weights)
        assert_equal(tuner_of(opt), known)
        if warm:
            assert_equal(displacements(opt), moved)
    assert all(float(lr) == 0 for lr in tuner(opt).effective_lr)
    for group in opt.param_groups:
        set_lr(group, 1.0)
    if not base.needs_closure:
        losses = train(opt, problem, 26, start=warm + 3)
        assert min(losses) < 0.97 * start
        assert_moved(opt)


@pytest.mark.parametrize(("base", "as_tensor", "warm"), AT_0)
def test_one_group_at_lr_0_stays(base: Base, warm: int, as_tensor: bool) -> None:
    """And the tuner learns from the other alone."""
    problem = make_problem(base)
    lrs = [typed(base, 1.0, as_tensor, warm) for _ in range(2)]
    opt = mechanize(base.factory(two_groups(problem, *lrs)))
    train(opt, problem, warm)
    count = len(problem.params) // 2
    resting, moving = problem.params[:count], problem.params[count:]
    set_lr(opt.param_groups[0], 0.0)
    at_rest = values(resting)
    stored = [opt.state[p]["mechanic_displacement"].clone() for p in resting] if warm else []
    for step in range(warm, warm + 24):
        before = values(moving)
        take_step(opt, problem, step)
        assert_equal(resting, at_rest)
        for param, before_rest in zip(resting, stored, strict=False):
            assert torch.equal(opt.state[param]["mechanic_displacement"], before_rest)
        if step > warm + 1:
            assert all((p != x).any() for p, x in zip(moving, before, strict=True))
    assert_moved(opt)
    assert float(tuner(opt).effective_lr[0]) == 0
    assert float(tuner(opt).effective_lr[1]) > 0
    set_lr(opt.param_groups[0], 1.0)
    train(opt, problem, 4, start=warm + 24)
    assert all((p != x).any() for p, x in zip(resting, at_rest, strict=True))
    assert all(torch.isfinite(p).all() for p in problem.params)


@pytest.mark.parametrize("name", ["SGD", "SGD-momentum", "AdamW"])
def test_a_group_at_lr_0_is_as_one_that_is_not_there(name: str) -> None:
    one, two = make_problem(dtype=torch.float64), make_problem(dtype=torch.float64)
    alone = mechanize(BY_ID[name].factory(two.params[2:]), s_init=1e-4)
    beside = mechanize(BY_ID[name].factory(two_groups(one, 0.0, 1.0)), s_init=1e-4)
    train(beside, one, 30)
    train(alone, two, 30)
    assert_moved(alone)
    torch.testing.assert_close(tuner(alone).scale, tuner(beside).scale, rtol=1e-9, atol=0)
    torch.testing.assert_close(one.params, two.params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["SGD", "SGD-momentum", "AdamW", "Lion"])
def test_a_group_at_lr_0_is_as_one_without_gradients(name: str) -> None:
    """Also after it has moved: its displacement takes no part in what the tuner reads."""
    one, two = make_problem(), make_problem()
    at_0, without = (mechanize(BY_ID[name].factory(two_groups(p))) for p in (one, two))
    train(at_0, one, 12)
    train(without, two, 12)
    at_0.param_groups[0]["lr"] = 0.0
    for param in two.params[:2]:
        param.requires_grad_(False)
        param.grad = None
    train(at_0, one, 20, start=12)
    train(without, two, 20, start=12)
    assert_equal(tuner_of(at_0), tuner_of(without))
    assert_equal(one.params, two.params)
    assert_moved(at_0)


@scheduled_bases
def test_lrs_that_are_changed_by_hand_are_as_on_a_schedule(base: Base) -> None:
    one, two = make_problem(), make_problem()
    by_hand, scheduled = (mechanize(base.factory(p.params)) for p in (one, two))
    train(scheduled, two, 30, scheduler=lr_scheduler.StepLR(scheduled, 10, gamma=0.5))
    for step in range(30):
        by_hand.param_groups[0]["lr"] = 0.5 ** (step // 10)
        take_step(by_hand, one, step)
    assert_moved(by_hand)
    assert_equal(one.params, two.params)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, int])
def test_a_learning_rate_of_any_kind_of_number(kind):
    """In float16 alone, a quotient by the lr that the base is run at would be out of range."""
    ends = []
    for lr in (1.0, kind(1)):
        problem = make_problem()
        opt = mechanize(torch.optim.AdamW(problem.params, lr=lr))
        train(opt, problem, 20)
        assert_moved(opt)
        ends.append(values(problem.params))
    assert_equal(*ends)


@pytest.mark.parametrize("first", [0.0, 1.0], ids="the other at lr {}".format)
@pytest.mark.parametrize("by", ["number", "checkpoint"])
def test_an_lr_that_is_raised_while_its_group_is_idle(first: float, by: str) -> None:
    """The update is measured when there is one: the scale falls with the first step at that lr, and
    not after it."""
    torch.manual_seed(0)
    resting, moving = (torch.nn.Parameter(torch.randn(20)) for _ in range(2))
    groups = [{"params": [resting], "lr": first}, {"params": [moving], "lr": 1.0}]
    opt = mechanize(torch.optim.SGD(groups, lr=1.0))

    def step(*, idle: bool) -> None:
        resting.grad = resting.detach() - 3 + torch.randn(20)
        moving.grad = None if idle else moving.detach() - 3 + torch.randn(20)
        opt.step()

    for _ in range(25):
        step(idle=False)
    assert_moved(opt)
    before = float(tuner(opt).scale)
    opt.param_groups[1]["lr"] = 1000.0
    for _ in range(3):
        step(idle=True)
        if by == "checkpoint":
            opt.load_state_dict(opt.state_dict())
    step(idle=False)
    assert 1e-4 < float(tuner(opt).scale) / before < 1e-2
