"""The handle on the tuner: what it shows, freezing, handing the plain optimizer back, refusals."""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    KINDS,
    SCHEDULERS,
    Base,
    Problem,
    advance,
    assert_equal,
    assert_moved,
    by_kind,
    counted,
    every_base,
    make_problem,
    take_step,
    train,
    values,
)
from cases import case
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from mechanic.torch import Tuner, mechanize, tuner
from mechanic.tuner import DefaultState

OWN_KEYS = {"mechanic", "effective_lr"}


def trained(base: Base, lr: float = 1.0, steps: int = 24, **kwargs: Any) -> Any:
    """A mechanized base after some steps, and its problem."""
    problem = make_problem(base, **kwargs)
    opt = mechanize(base.factory(problem.params, lr=lr))
    if base.needs_closure:
        train(opt, problem, 2)  # where it has not gone far
    else:
        train(opt, problem, steps)
        assert_moved(opt)
    return opt, problem


def base_state(opt: Optimizer) -> dict[str, Any]:
    """A copy of an optimizer's state dict without what belongs to the tuner."""
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        for key in [key for key in state if key.startswith("mechanic")]:
            del state[key]
    saved["state"] = {key: state for key, state in saved["state"].items() if state}
    for group in saved["param_groups"]:
        for key in OWN_KEYS:
            group.pop(key, None)
    return saved


def tensors(saved: dict[str, Any]) -> list[Tensor]:
    return [v for state in saved["state"].values() for v in state.values() if torch.is_tensor(v)]


# -- What it shows -----------------------------------------------------------------------------


@every_base
def test_the_scale_and_the_effective_lrs(base: Base) -> None:
    problem = make_problem(base)
    opt = mechanize(base.factory(problem.params, lr=0.5))
    assert "effective_lr" in opt.param_groups[0]
    seen = []
    for step in range(2 if base.needs_closure else 22):
        take_step(opt, problem, step)
        scale = tuner(opt).scale
        assert scale.shape == ()
        seen.append(float(scale))
        (rate,) = tuner(opt).effective_lr
        assert float(rate) == pytest.approx(0.5 * float(scale), rel=1e-6)
        assert torch.equal(opt.param_groups[0]["effective_lr"], rate)
        assert float(opt.param_groups[0]["lr"]) == 0.5
    assert seen[-1] != seen[0] > 0
    if not base.needs_closure:
        assert_moved(opt)


def test_one_effective_lr_a_group() -> None:
    problem = make_problem()
    lrs = (1.0, 0.125, torch.tensor(4.0), 0.0)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(problem.params, lrs, strict=True)]
    opt = mechanize(torch.optim.AdamW(groups))
    train(opt, problem, 25)
    assert_moved(opt)
    scale = float(tuner(opt).scale)
    for group, rate, lr in zip(opt.param_groups, tuner(opt).effective_lr, lrs, strict=True):
        assert rate.shape == ()
        assert float(rate) == pytest.approx(scale * float(lr), rel=1e-6)
        assert torch.equal(group["effective_lr"], rate)
    opt.param_groups[0]["lr"] = 3.0  # for the next step
    assert float(tuner(opt).effective_lr[0]) == pytest.approx(scale, rel=1e-6)


def test_effective_lrs_follow_a_schedule() -> None:
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    scheduler = lr_scheduler.ExponentialLR(opt, 0.9)
    for step in range(22):
        take_step(opt, problem, step)
        expected = float(tuner(opt).scale) * 0.9**step
        assert float(opt.param_groups[0]["effective_lr"]) == pytest.approx(expected, rel=1e-6)
        scheduler.step()
        assert float(tuner(opt).effective_lr[0]) == pytest.approx(expected, rel=1e-6)
        assert float(tuner(opt).metrics()["effective_lr/0"]) == pytest.approx(expected, rel=1e-6)
    assert_moved(opt)


def test_metrics_are_tensors_and_wait_for_nothing() -> None:
    problem = make_problem()
    half = [{"params": problem.params[:2]}, {"params": problem.params[2:], "lr": 0.5}]
    opt = mechanize(torch.optim.AdamW(half, lr=1.0))
    logged = []
    for step in range(24):
        take_step(opt, problem, step)
        with counted() as reads:
            handle = tuner(opt)
            metrics = handle.metrics()
            unread = handle.scale, *handle.effective_lr, opt.param_groups[0]["effective_lr"]
        assert reads == Counter()
        logged.append((metrics, float(metrics["scale"]), [float(t) for t in unread]))
        assert all(isinstance(value, Tensor) for value in metrics.values())
        assert not any(value.requires_grad for value in metrics.values())
        assert int(metrics["steps"]) == step + 1
        assert int(metrics["skipped"]) == 0
        assert torch.equal(metrics["scale"], handle.scale)
        assert torch.equal(metrics["effective_lr/0"], handle.effective_lr[0])
        assert torch.equal(metrics["effective_lr/1"], handle.effective_lr[1])
        torch.testing.assert_close(metrics["scales"].sum(), metrics["scale"])
    assert_moved(opt)
    # What was logged and not read yet is still what it was.
    for step, (metrics, scale, _) in enumerate(logged):
        assert float(metrics["scale"]) == scale
        assert int(metrics["steps"]) == step + 1
    assert len({scale for _, scale, _ in logged}) > 20


def test_the_signal_says_where_the_scale_should_go() -> None:
    problem = make_problem(dtype=torch.float64)
    opt = mechanize(torch.optim.SGD(problem.params, lr=1.0, momentum=0.9))
    start = values(problem.params)
    for step in range(24):
        problem.backward(step)
        before = tuner(opt).scale.clone()
        moved = sum(
            float(((p.detach() - x) * p.grad).sum())
            for p, x in zip(problem.params, start, strict=True)
        )
        opt.step()
        signal = float(tuner(opt).metrics()["signal"])
        if step in (1, 2, 3):  # before the default rule forgets anything, x − x_1 is S·Δ
            assert signal < 0
            assert signal * float(before) == pytest.approx(moved, rel=1e-6)
    assert_moved(opt)


def test_a_mechanized_optimizer_can_be_printed() -> None:
    opt, _ = trained(BY_ID["AdamW"])
    assert repr(opt).startswith("AdamW (")
    assert "effective_lr" in repr(opt)


def test_a_handle_sees_through_a_trainers_wrapper() -> None:
    opt, _ = trained(BY_ID["AdamW"])

    class Wrapper(Optimizer):  # as accelerate's is
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    assert torch.equal(tuner(Wrapper(opt)).scale, tuner(opt).scale)


# -- Freezing ----------------------------------------------------------------------------------

SAME = [BY_ID[name] for name in ("AdamW", "SGD-momentum", "Lion", "RMSprop", "NAdam", "SparseAdam")]
FROZEN = [b for b in BASES if not (b.needs_closure or b.modes or b.id == "AdamW8bit")]


@pytest.mark.parametrize("base", by_kind(FROZEN))
def test_frozen_the_update_is_the_scale_times_that_of_the_base(base: Base) -> None:
    opt, problem = trained(base, dtype=torch.float64)
    handle = tuner(opt)
    assert not handle.frozen
    handle.freeze()
    assert handle.frozen
    scale = handle.scale.clone()
    known = DefaultState(*(t.clone() for t in opt._mechanic.scalars.read().state))
    twin = make_problem(base, dtype=torch.float64)
    for step in range(24, 46):
        before = values(problem.params)
        plain = base.factory(twin.params, lr=1.0)
        plain.load_state_dict(base_state(opt))
        twin.model.load_state_dict(problem.model.state_dict())
        take_step(plain, twin, step)
        take_step(opt, problem, step)
        for x, p, q in zip(before, problem.params, twin.params, strict=True):
            expected = x + scale * (q.detach() - x)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-11)
        assert torch.equal(handle.scale, scale)
        state = opt._mechanic.scalars.read().state
        assert_equal(state._replace(D=known.D), known)  # but for D, which follows Δ
    assert int(handle.metrics()["steps"]) == 46


@pytest.mark.parametrize("base", by_kind(b for b in BASES if b not in FROZEN or b in SAME))
def test_unfrozen_the_tuner_goes_on(base: Base) -> None:
    opt, problem = trained(base)
    handle = tuner(opt)
    scale, loss = handle.scale.clone(), problem.total()
    handle.freeze()
    take_step(opt, problem, 24)
    assert torch.equal(handle.scale, scale)
    handle.unfreeze()
    assert not handle.frozen
    if base.needs_closure:
        take_step(opt, problem, 25)
    else:
        losses = train(opt, problem, 20, start=25)
        assert min(losses) < loss
        assert_moved(opt)
    assert not torch.equal(handle.scale, scale)


def test_freezing_for_no_step_changes_nothing() -> None:
    one, two = trained(BY_ID["AdamW"]), trained(BY_ID["AdamW"])
    tuner(one[0]).freeze()
    tuner(one[0]).unfreeze()
    assert train(*one, 10, start=24) == train(*two, 10, start=24)


# -- Handing the plain optimizer back ----------------------------------------------------------


@every_base
def test_detach_gives_the_plain_optimizer_back(base: Base) -> None:
    opt, problem = trained(base)
    handle, scale = tuner(opt), float(tuner(opt).scale)
    fresh = make_problem(base)
    plain = base.factory(fresh.params, lr=1.0)
    take_step(plain, fresh)
    weights = values(problem.params)
    saved = opt.state_dict()
    owned = {k: dict(s) for k, s in saved["state"].items()}
    before = {k: {n: v for n, v in s.items() if "mechanic" not in n} for k, s in owned.items()}
    detached = handle.detach()
    assert detached is opt
    assert type(opt) is base.cls
    assert opt.param_groups[0].keys() == plain.param_groups[0].keys()
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(scale, rel=1e-6)
    assert type(opt.param_groups[0]["lr"]) is type(plain.param_groups[0]["lr"])
    assert vars(opt).keys() == vars(plain).keys()
    for p, q in zip(problem.params, fresh.params, strict=True):
        assert opt.state.get(p, {}).keys() == plain.state.get(q, {}).keys()
    assert_equal(problem.params, weights)
    if not base.lr_in_state:  # intact to the last bit
        for key, state in opt.state_dict()["state"].items():
            assert all(value is before[key][name] for name, value in state.items())
    for ask in (lambda: handle.scale, handle.metrics, handle.freeze, handle.detach):
        with pytest.raises(ValueError, match="detached"):
            ask()
    with pytest.raises(ValueError, match="not mechanized"):
        tuner(opt)


@pytest.mark.parametrize("base", by_kind(b for b in BASES if b.id != "AdamW8bit"))
def test_detached_it_steps_as_a_plain_optimizer_with_that_lr_and_state(base: Base) -> None:
    opt, problem = trained(base)
    before, scale = base_state(opt), float(tuner(opt).scale)
    tuner(opt).detach()
    twin = make_problem(base)
    twin.model.load_state_dict(problem.model.state_dict())
    plain = base.factory(twin.params, lr=1.0)
    state = copy.deepcopy(opt.state_dict())
    assert state["param_groups"][0]["lr"] == scale
    if not base.lr_in_state:
        assert_equal(tensors(state), tensors(before))
    plain.load_state_dict(state)
    steps = 3 if base.needs_closure else 20
    assert train(opt, problem, steps, start=24) == train(plain, twin, steps, start=24)
    assert_equal(problem.params, twin.params)


@pytest.mark.parametrize("base", by_kind([*SAME, BY_ID["Rprop"], *(b for b in BASES if b.modes)]))
def test_detached_it_goes_on_as_if_frozen(base: Base) -> None:
    frozen, one = trained(base, lr=0.75, dtype=torch.float64)
    detached, two = trained(base, lr=0.75, dtype=torch.float64)
    tuner(frozen).freeze()
    tuner(detached).detach()
    train(frozen, one, 20, start=24)
    train(detached, two, 20, start=24)
    torch.testing.assert_close(one.params, two.params, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("base", "lr"),
    [
        case(base, lr, name=f"{base.id}-{lr}", by_day=base.id in KINDS)
        for base in BASES
        for lr in ((1.0, 30.0) if base.lr_in_state else (1.0,))
        if not base.needs_closure
    ],
)
def test_detached_it_trains_on(base: Base, lr: float) -> None:
    """Whatever the base keeps in units of its lr: its next steps are as long as the last ones."""
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=lr))
    before = []
    for step in range(40 * problem.patience):
        take_step(opt, problem, step)
        if step >= 35:
            before.append(values(problem.params))
    assert_moved(opt)

    def length(a: list[Tensor], b: list[Tensor]) -> float:
        return float(sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True))) ** 0.5

    last = max(length(a, b) for a, b in zip(before[-4:], before[-5:-1], strict=True))
    tuner(opt).detach()
    loss = take_step(opt, problem, 40)
    assert loss < 0.75 * start
    assert length(values(problem.params), before[-1]) < 10 * last
    losses = train(opt, problem, 3, start=41)
    assert max(losses) < start


def test_detached_it_can_be_mechanized_anew() -> None:
    opt, problem = trained(BY_ID["AdamW"])
    lr = float(tuner(opt).effective_lr[0])
    tuner(opt).detach()
    assert mechanize(opt) is opt
    assert float(tuner(opt).scale) == 0
    loss = problem.total()
    train(opt, problem, 25, start=24)
    assert_moved(opt)
    assert problem.total() < loss
    assert opt.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-6)


def test_an_instance_of_a_mechanized_class_can_be_detached() -> None:
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW)(problem.params, lr=1.0)
    train(opt, problem, 25)
    assert_moved(opt)
    scale = float(tuner(opt).scale)
    assert type(tuner(opt).detach()) is torch.optim.AdamW
    assert opt.param_groups[0]["lr"] == pytest.approx(scale)


def test_detached_before_its_first_step_it_is_as_it_was() -> None:
    """There is no learned lr to write, and 0 would stop it for ever."""
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=0.01))
    tuner(opt).detach()
    assert type(opt) is torch.optim.AdamW
    assert opt.param_groups[0]["lr"] == 0.01


def test_hooks_outlive_a_detach() -> None:
    opt, problem = trained(BY_ID["AdamW"])
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    tuner(opt).detach()
    train(opt, problem, 2)
    assert calls == ["pre", "post"] * 2


@pytest.mark.parametrize(
    ("make", "early", "at"),
    [
        case(make, early, at, name=f"{name}-{'early' if early else 'late'}", by_day=i % 2 == early)
        for i, (name, make) in enumerate(SCHEDULERS.items())
        for early, at in ((True, 21), (False, 5))
    ],
)
def test_detached_a_schedule_goes_on_in_its_shape(
    make: Callable[[Optimizer], Any], early: bool, at: int
) -> None:
    """Its lrs from there on are the scale times those of a run that is not detached."""
    problem = make_problem(hidden=16)

    def groups(problem: Problem) -> list[dict[str, Any]]:
        return [{"params": problem.params[:2]}, {"params": problem.params[2:], "lr": 0.5}]

    plain = torch.optim.AdamW(groups(make_problem(hidden=16)), lr=1.0)
    expected = make(plain)
    opt = torch.optim.AdamW(groups(problem), lr=1.0)
    scheduler = make(opt) if early else None
    mechanize(opt)
    scheduler = scheduler or make(opt)
    unrelated = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=1.0)
    bystander = lr_scheduler.StepLR(unrelated, 100)
    scale = 1.0
    for step in range(40):
        if step == at:
            scale = float(tuner(opt).scale)
            assert 0 < scale < 0.5
            tuner(opt).detach()
        for group, own in zip(plain.param_groups, opt.param_groups, strict=True):
            assert own["lr"] == pytest.approx(scale * group["lr"], rel=1e-9)
        assert scheduler.get_last_lr() == pytest.approx(
            [scale * lr for lr in expected.get_last_lr()], rel=1e-9
        )
        take_step(opt, problem, step)
        plain.step()  # without gradients: it is there for its lrs
        advance(scheduler, step)
        advance(expected, step)
    assert type(opt) is torch.optim.AdamW
    assert bystander.get_last_lr() == [1.0]


def test_detached_a_floor_of_the_lr_is_scaled_too() -> None:
    problem = make_problem(hidden=16)
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, min_lr=0.1)
    train(opt, problem, 21)
    scale = float(tuner(opt).scale)
    tuner(opt).detach()
    for _ in range(12):
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * scale)


def test_detached_a_tensor_lr_stays_a_tensor_on_its_schedule() -> None:
    problem = make_problem(hidden=16)
    opt = mechanize(torch.optim.AdamW(problem.params, lr=torch.tensor(1.0)))
    scheduler = lr_scheduler.CosineAnnealingLR(opt, T_max=40)
    train(opt, problem, 21, scheduler=scheduler)
    scale, lr = float(tuner(opt).scale), float(opt.param_groups[0]["lr"])
    tuner(opt).detach()
    assert isinstance(opt.param_groups[0]["lr"], Tensor)
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(scale * lr, rel=1e-5)
    twin = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1.0)
    expected = lr_scheduler.CosineAnnealingLR(twin, T_max=40)
    for step in range(40):
        if step >= 21:
            take_step(opt, problem, step)
            scheduler.step()
        twin.step()
        expected.step()
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(
        scale * twin.param_groups[0]["lr"], rel=1e-4, abs=1e-9
    )


# -- The lr to type ----------------------------------------------------------------------------


def mean_by_lr(opt: Optimizer, problem: Any, steps: int, scheduler: Any = None) -> float:
    """Train, and return the mean of the scale in which each step counts by its lr."""
    applied, typed = 0.0, 0.0
    for step in range(steps):
        lr = sum(float(group["lr"]) for group in opt.param_groups)
        train(opt, problem, 1, start=step)
        applied, typed = applied + float(tuner(opt).scale) * lr, typed + lr
        if scheduler is not None:
            scheduler.step()
    assert_moved(opt)
    return applied / typed


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_the_suggested_lr(preset) -> None:
    problem = make_problem()
    groups = [{"params": problem.params[:2]}, {"params": problem.params[2:], "lr": 0.5}]
    opt = mechanize(torch.optim.AdamW(groups, lr=2.0), preset=preset)
    mean = mean_by_lr(opt, problem, 40)
    suggested = tuner(opt).suggest_lr()
    assert suggested == pytest.approx([2 * mean, 0.5 * mean])
    assert all(type(lr) is float for lr in suggested)
    if preset == "default":
        again = make_problem()
        start = again.total()
        train(torch.optim.AdamW(again.params, lr=suggested[0]), again, 40)
        assert again.total() < 0.5 * start


def test_the_suggested_lr_on_a_schedule_is_the_one_to_start_it_with() -> None:
    """The scale rises as the schedule falls, which says nothing about where to start."""
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=2.0))
    mean = mean_by_lr(opt, problem, 40, lr_scheduler.CosineAnnealingLR(opt, T_max=45))
    assert opt.param_groups[0]["lr"] < 0.2
    assert tuner(opt).suggest_lr() == pytest.approx([2 * mean])
    assert mean < 0.9 * float(tuner(opt).scale)


def test_the_suggested_lr_of_one_cycle_is_its_peak() -> None:
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    cycle = lr_scheduler.OneCycleLR(opt, max_lr=3.0, total_steps=41)
    mean = mean_by_lr(opt, problem, 40, cycle)
    assert tuner(opt).suggest_lr() == pytest.approx([3 * mean])


def test_the_suggested_lr_where_nobody_keeps_the_typed_one() -> None:
    """ReduceLROnPlateau lowers the lr and does not say where it began, and so do many loops."""
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=2.0))
    plateau = lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=0, threshold=1e9)
    mean = mean_by_lr(opt, problem, 20)
    for _ in range(3):
        plateau.step(1.0)
    assert opt.param_groups[0]["lr"] < 0.1
    assert tuner(opt).suggest_lr() == pytest.approx([2 * mean])
    other = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    other.load_state_dict(opt.state_dict())
    assert tuner(other).suggest_lr() == pytest.approx([2 * mean])

    def by_hand(step: int) -> float:
        return 3.0 * min(step / 15, 1.0) * (1 - step / 40)

    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=by_hand(1)))
    rates = map(by_hand, range(2, 41))
    loop = SimpleNamespace(step=lambda: opt.param_groups[0].update(lr=next(rates)))
    mean = mean_by_lr(opt, problem, 39, loop)
    peak = max(map(by_hand, range(41)))
    assert tuner(opt).suggest_lr() == pytest.approx([peak * mean], rel=0.1)


def test_steps_that_are_skipped_or_frozen_in_the_suggested_lr() -> None:
    """The first do not count; the others do, and so do those of a checkpoint."""
    problem = make_problem()
    opt = mechanize(torch.optim.SGD(problem.params, lr=1.0))
    mean = mean_by_lr(opt, problem, 20)
    problem.params[0].grad = torch.full_like(problem.params[0], torch.nan)
    opt.step()
    assert tuner(opt).suggest_lr() == pytest.approx([mean])
    tuner(opt).freeze()
    opt.param_groups[0]["lr"] = 0.25
    train(opt, problem, 20, start=20)
    mean = (20 * mean + 5 * float(tuner(opt).scale)) / 25
    assert tuner(opt).suggest_lr() == pytest.approx([mean])  # at the lr that was typed
    other = mechanize(torch.optim.SGD(problem.params, lr=1.0))
    other.load_state_dict(opt.state_dict())
    assert tuner(other).suggest_lr() == tuner(opt).suggest_lr()


# -- Refusals ----------------------------------------------------------------------------------


def test_a_plain_optimizer_has_no_tuner() -> None:
    opt = torch.optim.AdamW(make_problem().params)
    with pytest.raises(ValueError, match=r"AdamW is not mechanized.*mechanize\(optimizer\)"):
        tuner(opt)


def test_mechanizing_twice_is_refused() -> None:
    opt, problem = trained(BY_ID["AdamW"])
    scale = tuner(opt).scale
    with pytest.raises(ValueError, match=r"mechanized already.*Call mechanize once"):
        mechanize(opt)
    with pytest.raises(ValueError, match="mechanized already"):
        mechanize(opt, preset="paper")
    assert torch.equal(tuner(opt).scale, scale)
    cls = mechanize(torch.optim.SGD)
    with pytest.raises(ValueError, match="mechanized already"):
        mechanize(cls)
    with pytest.raises(ValueError, match="mechanized already"):
        mechanize(cls(problem.params))


class Accelerated(Optimizer):
    """As accelerate wraps one: an Optimizer that has one, and whose step may do nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapper_is_refused() -> None:
    wrapper = Accelerated(torch.optim.AdamW(make_problem().params))
    with pytest.raises(ValueError, match=r"wraps another optimizer.*[Mm]echanize the inner"):
        mechanize(wrapper)
    assert type(wrapper) is Accelerated


class SharpnessAware(Optimizer):
    """As SAM wraps one: it makes the inner optimizer itself, and shares its groups."""

    def __init__(self, params: Any, base: Any, **kwargs: Any) -> None:
        super().__init__(params, kwargs)
        self.base_optimizer = base(self.param_groups, **kwargs)

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


def test_one_that_makes_the_optimizer_it_wraps_is_refused() -> None:
    wrapper = SharpnessAware(make_problem().params, torch.optim.AdamW, lr=1.0)
    with pytest.raises(ValueError, match=r"wraps another optimizer.*[Mm]echanize the inner"):
        mechanize(wrapper)
    assert type(wrapper) is SharpnessAware


def test_the_tuner_of_what_a_wrapper_has_made() -> None:
    wrapper = SharpnessAware(make_problem().params, mechanize(torch.optim.AdamW), lr=1.0)
    for _ in range(20):
        for param in wrapper.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        wrapper.step()
    assert tuner(wrapper).scale > 0
    assert tuner(wrapper).scale == tuner(wrapper.base_optimizer).scale


def test_a_replaced_step_is_refused() -> None:
    problem = make_problem()
    opt = torch.optim.AdamW(problem.params, lr=0.01)
    calls: list[int] = []
    own = opt.step

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    opt.step = replaced
    with pytest.raises(ValueError, match=r"step of this AdamW was replaced.*Call mechanize before"):
        mechanize(opt)
    # The optimizer is as it was, and works.
    assert type(opt) is torch.optim.AdamW
    assert not OWN_KEYS & opt.param_groups[0].keys()
    assert opt.step is replaced
    loss = problem.total()
    train(opt, problem, 20)
    assert problem.total() < loss
    assert len(calls) == 20
    with pytest.raises(ValueError, match="not mechanized"):
        tuner(opt)
    del opt.step
    mechanize(opt)


@pytest.mark.parametrize(
    "other",
    [
        None,
        "AdamW",
        1.0,
        [],
        nn.Linear(2, 2),
        int,
        nn.Linear,
        functools.partial(torch.optim.AdamW, lr=1.0),
        lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1),
    ],
    ids=lambda other: type(other).__name__,
)
def test_what_is_no_optimizer_is_refused(other: Any) -> None:
    with pytest.raises(ValueError, match=r"takes a torch.optim.Optimizer.*Write mechanize\("):
        mechanize(other)


def test_a_bad_option_leaves_the_optimizer_as_it_was() -> None:
    opt = torch.optim.AdamW(make_problem().params)
    with pytest.raises(ValueError, match="s_decay"):
        mechanize(opt, s_decay=-1.0)
    assert type(opt) is torch.optim.AdamW
    assert not OWN_KEYS & opt.param_groups[0].keys()


def test_the_handle_is_public() -> None:
    assert isinstance(tuner(trained(BY_ID["AdamW"])[0]), Tuner)


def test_what_an_optimizer_shows_of_itself():
    opt, _ = trained(BY_ID["AdamW"])
    shown = repr(opt)
    assert shown.startswith("AdamW (")
    assert "mechanic" not in shown
    assert f"effective_lr: {opt.param_groups[0]['effective_lr']}" in shown
    assert f"lr: {opt.param_groups[0]['lr']}" in shown
