"""What training loops do to an optimizer, done to a mechanized one: schedules, lr = 0, parameters
that come and go, closures, flags, hooks, scalers, compilation, and no host synchronisation."""

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    READS,
    SCHEDULERS,
    Base,
    Problem,
    advance,
    assert_equal,
    assert_moved,
    counted,
    make_problem,
    supporting,
    take_step,
    train,
    values,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mechanic.torch import mechanize, tuner

every_base = pytest.mark.parametrize("base", BASES, ids=str)
# Where one base stands for all of its kind: scale-free, momentum, signs, lr in the state.
FEW = [BY_ID[name] for name in ("AdamW", "SGD-momentum", "Lion", "ASGD")]
few_bases = pytest.mark.parametrize("base", FEW, ids=str)
plain_bases = [b for b in BASES if not (b.needs_closure or b.sparse)]


def tuner_of(opt: Optimizer) -> list[Tensor]:
    """Everything that a tuner knows."""
    return [t.clone() for t in (*opt._mechanic.state, opt._mechanic.scale)]


def displacements(opt: Optimizer) -> list[Tensor]:
    """Δ, which is stored in a unit of its own."""
    states = [opt.state.get(p, {}) for group in opt.param_groups for p in group["params"]]
    stored = [s["mechanic_displacement"] for s in states if "mechanic_displacement" in s]
    return [opt._mechanic.share.to(s.dtype) * s for s in stored]


def assert_same_run(one: Optimizer, two: Optimizer, rtol: float = 1e-6) -> None:
    """Two runs in float64 came to the same point and the same scale, to rounding."""
    assert_moved(one)
    torch.testing.assert_close(tuner(one).scale, tuner(two).scale, rtol=rtol, atol=0)
    for group, other in zip(one.param_groups, two.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


def two_groups(problem: Problem, first: Any = 1.0, second: Any = 1.0) -> list[dict[str, Any]]:
    """The first half of the parameters and the rest, each with its lr."""
    params = problem.params
    half = len(params) // 2
    return [{"params": params[:half], "lr": first}, {"params": params[half:], "lr": second}]


# -- Schedulers --------------------------------------------------------------------------------

every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
scheduled_bases = pytest.mark.parametrize("base", [BY_ID["AdamW"], BY_ID["SGD-momentum"]], ids=str)


def test_every_scheduler_of_torch_is_here() -> None:
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= {*SCHEDULERS}


@every_scheduler
@scheduled_bases
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


@pytest.mark.parametrize("base", [b for b in BASES if b.id in ("AdamW", "SGD-momentum")], ids=str)
def test_a_group_whose_lr_is_raised_late(base: Base) -> None:
    """Layers that are unfrozen one by one: what is known of the others is not lost."""
    problem = make_problem(base)
    first, *rest = problem.params
    groups = [{"params": rest, "lr": 1.0}, {"params": [first], "lr": 1e-4}]
    opt = mechanize(base.factory(groups, lr=1.0))
    train(opt, problem, 60)
    assert_moved(opt)
    before = float(tuner(opt).scale)
    opt.param_groups[1]["lr"] = 1.0
    train(opt, problem, 1, start=60)
    assert float(tuner(opt).scale) > before / 3


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


# -- Tensor lr, lr = 0, group lrs --------------------------------------------------------------


@pytest.mark.parametrize("base", [b for b in BASES if b.tensor_lr], ids=str)
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


@pytest.mark.parametrize("base", supporting("fused"), ids=str)
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


@pytest.mark.parametrize(
    ("base", "as_tensor", "warm"),
    [
        pytest.param(base, tensor, warm, id=f"{base.id}-{kind}-{'mid-run' if warm else 'start'}")
        for base in BASES
        for tensor, kind in ((False, "float"), (True, "tensor"))
        for warm in (0, 12)
        if base in SEVERAL or (warm and not tensor)
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


@pytest.mark.parametrize("base", SEVERAL, ids=str)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("warm", [0, 12], ids=["start", "mid-run"])
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


@few_bases
def test_group_lrs_are_ratios(base: Base) -> None:
    """Only the ratio of the lrs matters, and the effective ones keep it."""
    problems = [make_problem(dtype=torch.float64) for _ in range(3)]
    lrs = [(1.0, 0.25), (2.0**-12, 2.0**-14), (1.0, 1.0)]
    if base.id == "ASGD":
        pytest.skip("its lr acts on more than the size of its steps")
    opts = [
        mechanize(base.factory(two_groups(p, *own), weight_decay=0.0))
        for p, own in zip(problems, lrs, strict=True)
    ]
    for opt, problem in zip(opts, problems, strict=True):
        train(opt, problem, 30)
        assert_moved(opt)
    torch.testing.assert_close(problems[0].params, problems[1].params, rtol=1e-6, atol=1e-9)
    first, second = tuner(opts[0]).effective_lr
    torch.testing.assert_close(first, 4 * second)
    torch.testing.assert_close(tuner(opts[0]).effective_lr, tuner(opts[1]).effective_lr)
    assert not torch.allclose(problems[0].params[0], problems[2].params[0], rtol=1e-3)


def test_a_group_at_a_quarter_of_the_lr_is_a_reparametrisation() -> None:
    """SGD at lr/4 on b is SGD at lr on 2·b: the group's ratio acts on the update and on h alike."""
    target = torch.linspace(-1, 2, 6, dtype=torch.float64)
    a, b = (torch.zeros(6, dtype=torch.float64).requires_grad_() for _ in range(2))
    rule: Any = {"preset": "paper", "s_init": 1e-5, "s_decay": 0.0}  # which takes no norms
    groups = mechanize(
        torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.25}], lr=1.0), **rule
    )
    c, d = (torch.zeros(6, dtype=torch.float64).requires_grad_() for _ in range(2))
    one = mechanize(torch.optim.SGD([c, d], lr=1.0), **rule)
    for _ in range(60):
        for opt, x, y in ((groups, a, b), (one, c, d / 2)):
            opt.zero_grad()
            ((x - target) ** 2 + 3 * (y + x - 1) ** 2).sum().backward()
            opt.step()
    assert_moved(groups, 100)
    torch.testing.assert_close(tuner(groups).scale, tuner(one).scale, rtol=1e-9, atol=0)
    torch.testing.assert_close(a, c, rtol=1e-9, atol=0)
    torch.testing.assert_close(b, d / 2, rtol=1e-9, atol=0)


def test_groups_that_are_changed_by_hand() -> None:
    """What is written into a group between two steps counts from the next step on."""
    problem = make_problem(dtype=torch.float64)
    opt = mechanize(torch.optim.SGD(problem.params, lr=1.0))
    train(opt, problem, 25)
    assert_moved(opt)
    tuner(opt).freeze()
    scale, group = tuner(opt).scale, opt.param_groups[0]
    for lr, decay in ((1.0, 0.0), (0.3, 0.0), (0.3, 0.25), (torch.tensor(0.125), 0.25), (2.0, 0.0)):
        group["lr"], group["weight_decay"] = lr, decay
        before = values(problem.params)
        problem.backward(7)
        opt.step()
        for param, x in zip(problem.params, before, strict=True):
            expected = x - scale * lr * (param.grad + decay * x)
            torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-12)
        assert float(group["effective_lr"]) == pytest.approx(float(scale * lr), rel=1e-6)


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


# -- Parameters that come and go ---------------------------------------------------------------


@pytest.mark.parametrize("base", [b for b in plain_bases if not b.one_group], ids=str)
def test_add_param_group_mid_run(base: Base) -> None:
    problem = make_problem(base)
    patience, problem.patience = problem.patience, 1
    start = problem.total()
    count = len(problem.params) // 2
    first, second = problem.params[count:], problem.params[:count]
    opt = mechanize(base.factory(first, lr=1.0))
    at_rest = values(second)
    train(opt, problem, 20)
    assert_equal(second, at_rest)
    scale = tuner(opt).scale.clone()
    opt.add_param_group({"params": second, "lr": 0.5})
    base.prepare(opt)
    # Everything works before the next step, too.
    assert len(tuner(opt).effective_lr) == 2
    torch.testing.assert_close(*tuner(opt).effective_lr, rtol=1, atol=0)
    assert "effective_lr/1" in tuner(opt).metrics()
    assert len(tuner(opt).suggest_lr()) == 2
    assert len(opt.state_dict()["param_groups"]) == 2
    assert torch.equal(tuner(opt).scale, scale)
    loss = problem.total()
    problem.patience = patience
    losses = train(opt, problem, 80, start=20)
    assert all((p != x).any() for p, x in zip(second, at_rest, strict=True))
    assert all(torch.isfinite(p).all() for p in problem.params)
    # The ramp begins anew and takes nothing back. Later, at an lr that stays and with hardly any
    # noise, the scale finds the edge of stability: with SGD single losses go to 1 to 6 times the
    # first, from start to start, and come back (docs/research.md, "What is open").
    assert max(losses[:40]) < 1.2 * loss < 1.2 * start
    assert median(losses[-20:]) < 0.6 * loss
    torch.testing.assert_close(
        opt.param_groups[0]["effective_lr"], 2 * opt.param_groups[1]["effective_lr"]
    )
    assert_moved(opt)


@pytest.mark.parametrize("base", [b for b in BASES if not b.sparse], ids=str)
@pytest.mark.parametrize("when", ["first", "sometimes", "always"])
def test_a_parameter_without_a_gradient_stays(base: Base, when: str) -> None:
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=1.0))
    steps = 6 if base.needs_closure else 28 * problem.patience
    absent, losses = problem.params[0], []

    def backward(step: int) -> Tensor:
        loss = problem.backward(step)
        if {"always": True, "first": step < 4, "sometimes": step % 3 == 1}[when]:
            absent.grad = None
        return loss

    for step in range(steps):
        before = absent.detach().clone()
        if base.needs_closure:
            opt.step(lambda step=step: backward(step))
        else:
            backward(step)
            opt.step()
        losses.append(problem.total())
        if absent.grad is None:
            assert torch.equal(absent.detach(), before)
    assert ("mechanic_displacement" in opt.state.get(absent, {})) == (when != "always")
    assert all(torch.isfinite(p).all() for p in problem.params)
    if not base.needs_closure:
        assert min(losses) < 0.97 * start
        assert_moved(opt)


@every_base
def test_frozen_parameters_stay_and_move_when_unfrozen(base: Base) -> None:
    problem = make_problem(base)
    if base.sparse or base.needs_closure:
        pytest.skip("it has one parameter, or flattens all of them")
    opt = mechanize(base.factory(problem.params, lr=1.0))
    train(opt, problem, 10)
    layer, step = problem.params[0], 10
    for _ in range(2):  # frozen, trained and frozen again
        layer.requires_grad_(False)
        layer.grad = None
        at_rest = layer.detach().clone()
        for _ in range(8):
            take_step(opt, problem, step)
            step += 1
            assert torch.equal(layer, at_rest)
        layer.requires_grad_(True)
        train(opt, problem, 8, start=step)
        step += 8
        assert (layer != at_rest).any()
    assert all(torch.isfinite(p).all() for p in problem.params)
    assert_moved(opt)


@every_base
@pytest.mark.parametrize("warm", [0, 3])
def test_a_step_without_any_gradient_changes_nothing(base: Base, warm: int) -> None:
    problem = make_problem(base)
    opt = mechanize(base.factory(problem.params, lr=1.0))
    train(opt, problem, warm)
    problem.model.zero_grad()
    weights, known, moved = values(problem.params), tuner_of(opt), displacements(opt)
    loss = torch.tensor(3.0)
    if not base.needs_closure:
        assert opt.step() is None
    assert float(opt.step(lambda: loss)) == 3.0
    assert_equal(problem.params, weights)
    assert_equal(tuner_of(opt), known)
    assert_equal(displacements(opt), moved)
    assert not any("mechanic_displacement" in s for s in opt.state.values()) or warm
    if not (base.needs_closure or warm):
        start = problem.total()
        losses = train(opt, problem, 26)
        assert min(losses) < 0.97 * start
        assert_moved(opt)


@every_base
@pytest.mark.parametrize("decay", [None, 1e-6])
def test_a_first_step_with_all_zero_gradients(base: Base, decay: float | None) -> None:
    """Here at the lr that is typed: the first real gradients start the scale, not the decay."""
    if decay and (base.id not in ("AdamW", "SGD-momentum", "Lion", "NAdam", "Muon")):
        pytest.skip("one of each kind is enough")
    if base.needs_closure:
        pytest.skip("it stops at a gradient of zero")
    problem = make_problem(base)
    start = problem.total()
    kwargs = {} if decay is None else {"weight_decay": decay}
    opt = mechanize(base.factory(problem.params, lr=1.0, **kwargs))
    problem.backward()
    for param in problem.params:
        param.grad = param.grad * 0
    opt.step()
    losses = train(opt, problem, 40)
    assert max(losses) < 2 * start
    assert min(losses) < 0.6 * start  # without noise Nesterov's may be on its way back at the end
    assert_moved(opt)


FRESH = [
    pytest.param(base, flatten, id=f"{base.id}-{'flat' if flatten else 'nested'}")
    for base in plain_bases
    for flatten in (False, True)
    if base.id != "AdamW8bit" and (base in FEW or not flatten)
]


@pytest.mark.parametrize(("base", "flatten"), FRESH)
def test_distributed_checkpointing_of_a_fresh_optimizer_leaves_no_trace(
    base: Base, flatten: bool
) -> None:
    """It makes the state with a step of zero gradients at lr 0. The tuner takes no part in it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    one, two = make_problem(base), make_problem(base)
    untouched = base.factory(one.params, lr=1.0)
    get_optimizer_state_dict(one.model, untouched)  # the base's own step counts are 1 then
    mechanize(untouched)
    opt = mechanize(base.factory(two.params, lr=1.0))
    weights, known = values(two.params), tuner_of(opt)
    saved = get_optimizer_state_dict(two.model, opt, options=options)
    assert_equal(two.params, weights)
    assert_equal(tuner_of(opt), known)
    assert opt.param_groups[0]["lr"] == 1.0
    set_optimizer_state_dict(two.model, opt, saved, options=options)
    assert_equal(tuner_of(opt), known)
    assert train(untouched, one, 25) == train(opt, two, 25)
    assert_equal(one.params, two.params)
    assert_equal(tuner_of(untouched), tuner_of(opt))
    assert_moved(opt)


@pytest.mark.parametrize("name", ["SGD", "SGD-momentum", "Adam", "AdamW", "Lion", "RMSprop"])
@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpointing_resumes(name: str, flatten: bool) -> None:
    base, options = BY_ID[name], StateDictOptions(flatten_optimizer_state_dict=flatten)
    one, two = make_problem(base), make_problem(base)
    opt = mechanize(base.factory(one.params, lr=1.0))
    train(opt, one, 15)
    saved = copy.deepcopy(get_optimizer_state_dict(one.model, opt, options=options))
    two.model.load_state_dict(one.model.state_dict())
    resumed = mechanize(base.factory(two.params, lr=1.0))
    set_optimizer_state_dict(two.model, resumed, saved, options=options)
    assert train(opt, one, 15, start=15) == train(resumed, two, 15, start=15)
    assert_equal(one.params, two.params)
    assert_equal(tuner_of(opt), tuner_of(resumed))
    assert_moved(opt)


# -- Closures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", plain_bases, ids=str)
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


# -- Flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "options"),
    [
        *(pytest.param(base, {}, id=base.id) for base in supporting("maximize")),
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
    pytest.param(base, flag, id=f"{base.id}-{flag}")
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


def walk(base: Base, x: Tensor, steps: int, **kwargs: Any) -> tuple[Optimizer, Tensor, list[Any]]:
    """A differentiable run from x over a fixed quadratic, the gradient part of the graph."""
    p = x.clone()
    opt = mechanize(base.factory([p], lr=1.0, differentiable=True, **kwargs))
    path = []
    for _ in range(steps):
        p.grad = slope(p)
        opt.step()
        path.append((float(opt._mechanic.scale), float(opt._mechanic.share)))
    return opt, p, path


def slope(p: Tensor) -> Tensor:
    """The gradient of a quadratic with its least value at 2, 1, 0, ..."""
    target = torch.linspace(2, -2, len(p), dtype=p.dtype)
    return torch.linspace(0.5, 2, len(p), dtype=p.dtype) * (p - target)


@pytest.mark.parametrize("base", supporting("differentiable"), ids=str)
def test_differentiable_takes_the_same_steps(base: Base) -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    recorded, p, _ = walk(base, x, 40)
    assert p.grad_fn is not None
    q = x.detach().clone().requires_grad_()
    plain = mechanize(base.factory([q], lr=1.0))
    for _ in range(40):
        q.grad = slope(q.detach())
        plain.step()
    assert_moved(plain)
    # torch counts the steps of a differentiable base in float32
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tuner(recorded).scale, tuner(plain).scale, rtol=1e-4, atol=0)
    assert not tuner(recorded).scale.requires_grad


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradient_through_a_whole_run(momentum: float) -> None:
    """Against a run by hand, the scales taken as the constants that they were."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    opt, p, path = walk(BY_ID["SGD"], x, 30, momentum=momentum)
    assert_moved(opt, 100)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (weights * p).sum().backward()
    y = x.detach().clone().requires_grad_()
    q, displacement, velocity, scale = y, torch.zeros(5), torch.zeros(5), 0.0
    shares = [1.0, *(share for _, share in path)]
    for (next_scale, share), last_share in zip(path, shares, strict=False):
        first = scale == 0  # torch detaches the first gradient in a momentum
        velocity = momentum * velocity + (slope(q).detach() if first and momentum else slope(q))
        keep = share / last_share
        q = q + (next_scale * keep - scale) * displacement - next_scale * velocity
        displacement = keep * displacement - velocity
        scale = next_scale
    (weights * q).sum().backward()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)
    assert (y.grad.abs() > 0).all()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("base", supporting("differentiable"), ids=str)
def test_the_gradient_through_a_step(base: Base) -> None:
    """Against finite differences, at a scale that is held."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    warm, p, _ = walk(base, x, 25)
    assert_moved(warm)
    tuner(warm).freeze()
    saved = warm.state_dict()
    for state in saved["state"].values():
        state.update({k: v.detach() for k, v in state.items() if isinstance(v, Tensor)})

    def one_step(point: Tensor, grad: Tensor) -> Tensor:
        moved = point.clone()
        opt = mechanize(base.factory([moved], lr=1.0, differentiable=True))
        opt.load_state_dict(copy.deepcopy(saved))
        assert tuner(opt).frozen
        moved.grad = grad
        opt.step()
        return moved

    point = p.detach().requires_grad_()
    grad = (slope(p.detach()) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(one_step, (point, grad))


# -- Hooks -------------------------------------------------------------------------------------


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


# -- Accumulation, clipping, autocast, scalers --------------------------------------------------


@few_bases
def test_gradient_accumulation_is_as_the_large_batch(base: Base) -> None:
    one, two = make_problem(dtype=torch.float64), make_problem(dtype=torch.float64)
    two.batch, two.batches = one.batch // 4, one.batches * 4
    whole, parts = (mechanize(base.factory(p.params)) for p in (one, two))
    for step in range(25):
        one.backward(step)
        whole.step()
        parts.zero_grad()
        for part in range(4):
            (two.loss(4 * step + part) / 4).backward()
        parts.step()
    assert_same_run(whole, parts)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD-momentum", "Lion", "RMSprop", "Muon"])
@pytest.mark.parametrize("max_norm", [1.0, 1e-3])
def test_clip_grad_norm_composes(name: str, max_norm: float) -> None:
    base = BY_ID[name]
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=1.0, weight_decay=0.0))
    for step in range(40):
        problem.backward(step)
        nn.utils.clip_grad_norm_(problem.params, max_norm)
        opt.step()
    assert problem.total() < 0.6 * start
    assert_moved(opt)


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum"])
def test_autocast(name: str) -> None:
    finals = []
    for enabled in (False, True):
        problem = make_problem(hidden=24)
        opt = mechanize(BY_ID[name].factory(problem.params))
        for step in range(50):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = problem.loss(step)
            loss.backward()
            opt.step()
        assert_moved(opt)
        assert all(p.dtype == torch.float32 for p in problem.params)
        finals.append(problem.total())
    assert finals[0] < 0.5
    assert finals[1] == pytest.approx(finals[0], rel=0.3, abs=0.05)


SCALED = [
    pytest.param(base, fused, id=f"{base.id}-{'fused' if fused else 'default'}")
    for base in supporting("fused")
    for fused in (False, True)
]


def train_scaled(
    opt: Optimizer, scaler: Any, problem: Problem, steps: range, inf_at: int = -1
) -> None:
    for step in steps:
        problem.model.zero_grad()
        scaler.scale(problem.loss(step)).backward()
        if step == inf_at:
            problem.params[0].grad[0] = math.inf
        scaler.step(opt)
        scaler.update()


def make_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    scaler.scale(torch.ones(()))  # it is made when it is first used
    return scaler


PRESETS = [
    pytest.param(base, fused, preset, id=f"{base.id}-{'fused' if fused else 'default'}-{preset}")
    for base in supporting("fused")
    for fused in (False, True)
    for preset in ("default", "paper")
    if preset == "default" or base in FEW
]


@pytest.mark.parametrize(("base", "fused", "preset"), PRESETS)
def test_a_scaler_changes_nothing(base: Base, fused: bool, preset: Any) -> None:
    one, two = make_problem(), make_problem()
    plain, scaled = (
        mechanize(base.factory(p.params, fused=fused), preset=preset, s_init=1e-5)
        for p in (one, two)
    )
    train(plain, one, 30)
    scaler = make_scaler()
    scaler.set_growth_interval(6)  # h must not see the factor that changes on the way
    train_scaled(scaled, scaler, two, range(30))
    assert scaler.get_scale() == 2.0**15
    assert_moved(plain)
    torch.testing.assert_close(tuner(plain).scale, tuner(scaled).scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(one.params, two.params, rtol=1e-4, atol=1e-5)
    assert not hasattr(scaled, "found_inf")
    assert not hasattr(scaled, "grad_scale")


@pytest.mark.parametrize(("base", "fused"), SCALED)
@pytest.mark.parametrize("inf_at", [0, 12])
def test_a_scaler_skips_an_inf_step(base: Base, fused: bool, inf_at: int) -> None:
    """As if the step had not been, and training goes on."""
    one, two = make_problem(), make_problem()
    without, with_inf = (mechanize(base.factory(p.params, fused=fused)) for p in (one, two))
    scaler, other = make_scaler(), make_scaler()
    train_scaled(without, scaler, one, range(inf_at))
    train_scaled(with_inf, other, two, range(inf_at))
    weights, known = values(two.params), tuner_of(with_inf)
    train_scaled(with_inf, other, two, range(inf_at, inf_at + 1), inf_at=inf_at)
    assert other.get_scale() == scaler.get_scale() / 2
    assert_equal(two.params, weights)
    assert_equal(tuner_of(with_inf), known)
    scaler.update(other.get_scale())
    for opt, own, problem in ((without, scaler, one), (with_inf, other, two)):
        train_scaled(opt, own, problem, range(inf_at + 1, inf_at + 26))
    assert_equal(one.params, two.params)
    assert_moved(with_inf)


@pytest.mark.parametrize(("base", "fused"), SCALED)
def test_a_scaler_that_found_inf_skips_whatever_became_of_it(base: Base, fused: bool) -> None:
    """The gradients may have been mended since; the scaler's word counts."""
    problem, scaler = make_problem(), make_scaler()
    opt = mechanize(base.factory(problem.params, fused=fused))
    train_scaled(opt, scaler, problem, range(20))
    assert_moved(opt)
    weights, known, moved = values(problem.params), tuner_of(opt), displacements(opt)
    problem.model.zero_grad()
    scaler.scale(problem.loss(20)).backward()
    problem.params[0].grad[0] = math.inf
    scaler.unscale_(opt)
    problem.params[0].grad.nan_to_num_(0.0, 0.0, 0.0)
    scaler.step(opt)
    scaler.update()
    assert_equal(problem.params, weights)
    assert_equal(tuner_of(opt), known)
    assert_equal(displacements(opt), moved)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_with_unscaling_and_clipping(fused: bool) -> None:
    one, two = make_problem(), make_problem()
    plain, scaled = (
        mechanize(torch.optim.AdamW(p.params, lr=1.0, fused=fused)) for p in (one, two)
    )
    scaler = make_scaler()
    for step in range(25):
        one.backward(step)
        nn.utils.clip_grad_norm_(one.params, 0.5)
        plain.step()
        two.model.zero_grad()
        scaler.scale(two.loss(step)).backward()
        scaler.unscale_(scaled)
        nn.utils.clip_grad_norm_(two.params, 0.5)
        scaler.step(scaled)
        scaler.update()
    assert_moved(plain)
    torch.testing.assert_close(tuner(plain).scale, tuner(scaled).scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(one.params, two.params, rtol=1e-4, atol=1e-5)


# -- Compilation -------------------------------------------------------------------------------


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
    ("name", "whole"), [("AdamW", True), ("SGD-momentum", False)], ids=["opt.step", "function"]
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


# -- No host synchronisation -------------------------------------------------------------------


def test_reads_are_counted() -> None:
    one = torch.ones(())
    with counted() as reads:
        one.item(), bool(one), one.cpu(), one.tolist(), float(one), int(one), one + one
    assert {name: reads[name] for name in READS[:6]} == dict.fromkeys(READS[:6], 1)
    assert reads["host"] >= 4
    assert Tensor.item is torch._C.TensorBase.item
    with counted() as reads:
        torch.ones(3).add_(one, alpha=1).mul_(one)
    assert reads["host"] == 0
    with counted() as reads:
        torch.ones(3).add_(one, alpha=one)  # torch fetches it by itself
    assert reads["host"] == 1


def reads_of_steps(opt: Optimizer, problem: Problem, steps: int) -> list[Counter[str]]:
    found = []
    for step in range(steps):
        problem.backward(step)
        if problem.closure_only:
            with counted() as reads:
                opt.step(problem.closure(step))
        else:
            with counted() as reads:
                opt.step()
        found.append(+reads)
    return found


@pytest.mark.parametrize(("base", "fused", "preset"), [p for p in PRESETS if p.values[1]])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_a_fused_step_reads_nothing(base: Base, fused: bool, preset: Any, as_tensor: bool) -> None:
    """From the first one on, and with the check for non-finite gradients."""
    problem = make_problem()
    lr = torch.tensor(1.0) if as_tensor else 1.0
    opt = mechanize(base.factory(problem.params, lr=lr, fused=True), preset=preset, s_init=1e-5)
    own = reads_of_steps(base.factory(make_problem().params, lr=lr, fused=True), problem, 1)
    assert own == [Counter()]
    assert reads_of_steps(opt, problem, 25) == [Counter()] * 25
    assert_moved(opt)


@every_base
@pytest.mark.parametrize("check", [True, False])
def test_another_step_reads_one_bool_at_most(base: Base, check: bool) -> None:
    """Beside what the base reads by itself."""
    one, two = make_problem(base), make_problem(base)
    steps = 1 if base.needs_closure else 12  # then its evaluations depend on where it is
    plain = reads_of_steps(base.factory(one.params, lr=1e-3), one, steps)
    opt = mechanize(base.factory(two.params, lr=1e-3), skip_nonfinite=check)
    for own, reads in zip(plain, reads_of_steps(opt, two, steps), strict=True):
        # one for each evaluation of a closure
        count = opt.state[two.params[0]]["func_evals"] if base.needs_closure else 1
        assert reads - own == (Counter({"__bool__": count, "host": count}) if check else Counter())
    if not base.needs_closure:
        assert_moved(opt)


@few_bases
def test_no_read_on_a_schedule_with_groups_frozen_or_at_0(base: Base) -> None:
    problem = make_problem()
    opt = mechanize(base.factory(two_groups(problem, 1.0, 0.5)), skip_nonfinite=False)
    own = base.factory(two_groups(make_problem(), 1.0, 0.5))
    for step in range(24):
        problem.backward(step)
        opt.param_groups[1]["lr"] = own.param_groups[1]["lr"] = 0.0 if step % 5 == 0 else 0.5
        tuner(opt).freeze() if step % 7 == 6 else tuner(opt).unfreeze()
        with counted() as reads:
            opt.step()
        ours = +reads
        for group, other in zip(opt.param_groups, own.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                q.grad = p.grad
        with counted() as reads:
            own.step()
        assert ours - reads == Counter()
    assert_moved(opt)


def test_warnings_are_errors_here() -> None:
    with pytest.raises(UserWarning, match="so that"):
        warnings.warn("so that the tests above mean something", UserWarning, stacklevel=1)
