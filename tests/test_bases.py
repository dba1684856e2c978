"""Every base in the matrix trains under `mechanize`, and stays the optimizer that it is."""

import functools
import math
import pickle
from statistics import median

import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    MISSING,
    Base,
    assert_equal,
    assert_moved,
    dense,
    make_problem,
    take_step,
    train,
    values,
)
from cases import case
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import mechanize, rates, tuner
from mechanic.torch.call import unhooked

every_base = pytest.mark.parametrize("base", BASES, ids=str)


def test_every_optimizer_of_torch_is_in_the_matrix() -> None:
    classes = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    optimizers = {c for c in classes if issubclass(c, Optimizer)} - {Optimizer}
    assert len(optimizers) >= 14
    assert optimizers - {base.cls for base in BASES} == set()


@every_base
def test_lowers_the_loss_from_an_lr_of_1(base: Base) -> None:
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=1.0))
    losses = train(opt, problem, 45)
    assert all(math.isfinite(loss) for loss in losses)
    # Some are still on their way, and at an lr that stays single losses go up and down.
    assert min(problem.total(), median(losses[-20:])) < 0.45 * start
    assert max(losses) < 2 * start
    assert_moved(opt, 100)
    assert int(tuner(opt).metrics()["steps"]) == 45 * problem.patience
    assert int(tuner(opt).metrics()["skipped"]) == 0


@pytest.mark.parametrize("seed", [case(n, name=str(n), by_day=n == 4) for n in (4, 6, 7)])
def test_what_has_been_learned_is_not_lost(seed: int) -> None:
    """When the loss is next to nothing, all steps go along Δ: the scale must not follow them.

    These are the starts of eight on which it did, and the loss went from 1e-5 to 100."""
    problem = make_problem(BY_ID["AdamW"], seed=seed)
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
    losses = train(opt, problem, 250)
    assert median(losses[-50:]) < 0.01
    assert max(losses[25:]) < 1


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_of_several_evaluations_lowers_the_loss(line_search: str | None) -> None:
    problem = make_problem(BY_ID["LBFGS"])
    start = problem.total()
    opt = torch.optim.LBFGS(problem.params, lr=1.0, max_iter=4, line_search_fn=line_search)
    losses = train(mechanize(opt), problem, 60)
    assert problem.total() < 0.45 * start
    assert max(losses) < 2 * start
    assert_moved(opt)


@pytest.mark.parametrize("base", [base for base in BASES if base.modes], ids=str)
def test_the_average_of_schedule_free_is_as_good_as_its_last_point(base: Base) -> None:
    """In `eval()` the weights are the average, which is what the method is for."""
    problem = make_problem(base)
    start = problem.total()
    opt = mechanize(base.factory(problem.params, lr=1.0))
    train(opt, problem, 40)
    assert_moved(opt)
    training = problem.total()
    point = [p.detach().clone() for p in problem.params]
    opt.eval()
    assert problem.total() < 0.45 * start
    opt.train()
    assert problem.total() == pytest.approx(training, rel=1e-3)
    torch.testing.assert_close(list(problem.params), point, rtol=1e-3, atol=1e-4)


@every_base
def test_the_same_instance_comes_out(base: Base) -> None:
    problem = make_problem(base)
    plain = base.factory(problem.params, lr=1.0)
    groups, state = plain.param_groups, plain.state
    lr = groups[0]["lr"]
    opt = mechanize(plain)
    assert opt is plain
    assert isinstance(opt, base.cls)
    assert type(opt).__name__ == base.cls.__name__
    assert opt.param_groups is groups
    assert opt.state is state
    take_step(opt, problem)
    assert opt.param_groups[0]["lr"] is lr
    assert_equal(opt.param_groups[0]["params"], problem.params)


@every_base
def test_a_class_gives_a_class(base: Base) -> None:
    cls = mechanize(base.cls)
    assert isinstance(cls, type)
    assert issubclass(cls, base.cls)
    assert cls is not base.cls
    assert pickle.loads(pickle.dumps(cls)) is cls
    problem = make_problem(base)
    assert isinstance(tuner(cls(problem.params, lr=1.0, **base.kwargs)).scale, Tensor)
    plain = base.cls(problem.params, lr=1.0, **base.kwargs)
    assert type(plain) is base.cls
    with pytest.raises(ValueError, match="not mechanized"):
        tuner(plain)


@every_base
def test_a_class_trains_as_an_instance_does(base: Base) -> None:
    one, two = make_problem(base), make_problem(base)
    instance = mechanize(base.factory(one.params, lr=1.0), betas=(0.9, 0.99))
    of_class = mechanize(base.cls, betas=(0.9, 0.99))(two.params, lr=1.0, **base.kwargs)
    base.prepare(of_class)
    steps = 4 if base.needs_closure else 24
    assert train(instance, one, steps) == train(of_class, two, steps)
    assert_equal(one.params, two.params)
    assert torch.equal(tuner(instance).scale, tuner(of_class).scale)
    assert type(instance) is type(of_class)
    if not base.needs_closure:
        assert_moved(instance)


# -- The learning rate that a base is run at ---------------------------------------------------

ADAMW_IS_ADAM = issubclass(torch.optim.AdamW, torch.optim.Adam)  # since torch 2.7
VARIANTS: dict[str, list[dict[str, object]]] = {
    "Adadelta": [{"weight_decay": 0.1}],
    "Adafactor": [{"weight_decay": 0.1}],
    "Adagrad": [{"weight_decay": 0.1, "lr_decay": 0.1}],
    "Adam": [
        {"weight_decay": 0.1, "amsgrad": True},
        *([{"decoupled_weight_decay": True}] if ADAMW_IS_ADAM else []),
    ],
    "AdamW": [{"amsgrad": True}, {"maximize": True}, {"fused": True}, {"foreach": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "Muon": [{"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False, "weight_decay": 0.0}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"weight_decay": 0.1}, {"centered": True, "momentum": 0.9}],
    "SGD": [{"weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}, {"fused": True}],
    "Lion": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
}
BASES_AND_VARIANTS = [
    pytest.param(base, kwargs, id="-".join([base.id, *map(str, kwargs)]))
    for base in BASES
    for kwargs in [{}, *VARIANTS.get(base.id, [])]
]


def is_proportional(base: Base) -> bool:
    return rates.is_proportional(unhooked(base.cls.step))


def step_at(opt: Optimizer, lr: float) -> None:
    for group in opt.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = torch.full_like(group["lr"], lr)
        else:
            group["lr"] = lr
    opt.step()


def state_of(opt: Optimizer) -> list[Tensor]:
    """All numbers in an optimizer's state and groups, lr aside."""
    saved = opt.state_dict()
    found = [v for state in saved["state"].values() for v in state.values()]
    for group in saved["param_groups"]:
        found += [v for name, v in group.items() if name not in ("lr", "params", "scheduled_lr")]
    numbers = [v for v in found if isinstance(v, (Tensor, float, int))]
    return [dense(torch.as_tensor(v)).to(torch.float64) for v in numbers]


def updates_at(base: Base, kwargs: dict[str, object], *lrs: float) -> list[list[Tensor]]:
    """From one warmed-up state in float64: the update at each lr, and the state after it."""
    found = []
    for lr in lrs:
        problem = make_problem(base, dtype=torch.float64)
        opt = base.factory(problem.params, lr=0.01, **kwargs)
        for step in range(8):
            problem.backward(step)
            opt.step()
        problem.backward(8)
        before = values(problem.params)
        step_at(opt, lr)
        moved = [p.detach() - x for p, x in zip(problem.params, before, strict=True)]
        found.append([*moved, *state_of(opt)])
    return found


@pytest.mark.parametrize(("base", "kwargs"), BASES_AND_VARIANTS)
def test_a_base_that_counts_as_proportional_to_its_lr_is(
    base: Base, kwargs: dict[str, object]
) -> None:
    """Its update at 4·lr is 4 times that at lr, and its state does not depend on lr."""
    if not is_proportional(base):
        pytest.skip("it is run at the lr that is typed")
    count = len(make_problem(base).params)
    rounding = 1e-6 if base.id == "AdamW8bit" else 1e-12  # it computes in float32
    for lr in (0.01, 1.0):
        once, often = updates_at(base, kwargs, lr, 4 * lr)
        assert all(update.abs().max() > 0 for update in once[:count])
        for u, v in zip(once[:count], often[:count], strict=True):
            torch.testing.assert_close(
                v, 4 * u, rtol=1e-6, atol=rounding * (1 + float(v.abs().max()))
            )
        assert len(once) > count or base.id == "SGD"
        assert_equal(once[count:], often[count:])


def test_every_step_that_counts_as_proportional_is_checked() -> None:
    steps = {unhooked(base.cls.step) for base in BASES if is_proportional(base)}
    checked = {rates.step_name(step) for step in steps}
    if ADAMW_IS_ADAM:
        checked.add("torch.optim.adamw.AdamW.step")
    if "Muon" in MISSING:
        checked.add("torch.optim._muon.Muon.step")
    assert checked == rates._PROPORTIONAL


@every_base
def test_the_lr_that_a_base_is_run_at(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one large power of two where what it proposes can be scaled, else at the typed lr."""
    seen: list[float] = []
    own = unhooked(base.cls.step)

    @functools.wraps(own)
    def spy(self: Optimizer, *args: object, **kwargs: object) -> object:
        seen.append(float(self.param_groups[0]["lr"]))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(base.cls, "step", spy)
    for typed in (0.375, 2.0**-20):
        seen.clear()
        problem = make_problem(base)
        # with an option that no other test has the mechanized class is made anew, over the spy
        opt = mechanize(base.factory(problem.params, lr=typed), max_scale=1e9 + BASES.index(base))
        for step in range(3):
            take_step(opt, problem, step)
            assert float(opt.param_groups[0]["lr"]) == typed
        assert seen == [2.0**16 if is_proportional(base) else typed] * 3


@pytest.mark.parametrize("base", [b for b in BASES if not b.needs_closure], ids=str)
def test_a_base_that_does_not_count_as_proportional_is_not(base: Base) -> None:
    """So that a base is not run at a small lr needlessly, where rounding eats its update."""
    if is_proportional(base):
        pytest.skip("it is proportional")
    once, often = updates_at(base, {}, 1.0, 4.0)
    count = len(make_problem(base).params)
    proportional = all(
        torch.allclose(v, 4 * u, rtol=1e-6, atol=0)
        for u, v in zip(once[:count], often[:count], strict=True)
    )
    stateless = all(torch.equal(u, v) for u, v in zip(once[count:], often[count:], strict=True))
    assert not (proportional and stateless)


def test_a_subclass_with_its_own_step_is_run_at_the_lr_that_is_typed() -> None:
    class Inherits(torch.optim.AdamW):
        pass

    class Overrides(torch.optim.AdamW):
        def step(self, closure: object = None) -> object:
            self.seen = self.param_groups[0]["lr"]
            return super().step(closure)

    assert rates.is_proportional(unhooked(Inherits.step))
    assert not rates.is_proportional(unhooked(Overrides.step))
    problem = make_problem()
    opt = mechanize(Overrides(problem.params, lr=0.5))
    train(opt, problem, 40)
    assert opt.seen == 0.5
    assert problem.total() < 1
    assert_moved(opt)


def test_a_base_without_an_lr() -> None:
    class Signs(Optimizer):
        def __init__(self, params: object) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad.sign())

    problem = make_problem()
    start = problem.total()
    opt = mechanize(Signs(problem.params))
    train(opt, problem, 40)
    assert problem.total() < 0.5 * start
    assert_moved(opt)
    assert float(tuner(opt).effective_lr[0]) == pytest.approx(float(tuner(opt).scale))
    assert "lr" not in opt.param_groups[0]
