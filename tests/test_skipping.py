"""NaN and inf gradients: the step is skipped as a whole, counted, and training goes on."""

import functools
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    KINDS,
    Base,
    Problem,
    assert_moved,
    by_kind,
    make_problem,
    supporting,
    take_step,
)
from cases import case
from comparing import PATIENCE, assert_same, bad_step, bits, poison, skipped
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner


def snapshot(opt: Optimizer) -> dict[str, Any]:
    """Weights, base state, every entry of the groups, the tuner included, but for its counts of
    skipped steps."""
    saved = bits(opt.state_dict())
    for group in saved["param_groups"]:
        del group["mechanic"]["skipped"], group["mechanic"]["skipped_in_a_row"]
    weights = [param for group in opt.param_groups for param in group["params"]]
    return {"weights": bits(weights), **saved}


def good_steps(opt: Optimizer, problem: Problem, start: int, stop: int) -> None:
    for step in range(start, stop):
        take_step(opt, problem, step)


FUSED = [(base, {"fused": True}) for base in supporting("fused")]
ALL = [(base, {}) for base in BASES] + FUSED


FEW = [row for row in ALL if row[0].id in ("AdamW", "SGD-momentum", "SparseAdam", "LBFGS")]


def name(row: tuple[Base, dict[str, Any]]) -> str:
    return row[0].id + ("-fused" if row[1] else "")


@pytest.fixture(
    params=[case(own, name=name(own), by_day=own[0].id in (*KINDS, "AdamW8bit")) for own in ALL]
)
def row(request: pytest.FixtureRequest) -> tuple[Base, dict[str, Any]]:
    """A base and the flags to make it with."""
    return request.param


@functools.cache
def clean_end(row: str) -> dict[str, Any]:
    """Where 25 steps without a bad one end."""
    opt, problem = make(next(own for own in ALL if name(own) == row))
    good_steps(opt, problem, 0, 25)
    assert skipped(opt) == 0
    assert_moved(opt)
    return snapshot(opt)


def make(row: tuple[Base, dict[str, Any]], **options: Any) -> tuple[Optimizer, Problem]:
    base, flags = row
    if base.id == "LBFGS":  # a few evaluations a step
        flags = {"line_search_fn": "strong_wolfe", "max_iter": 4, "history_size": 5, **flags}
    problem = make_problem(base, hidden=64 if base.id == "AdamW8bit" else 16)
    return mechanize(base.factory(problem.params, lr=1.0, **flags), **options), problem


def test_training_goes_on_as_if_the_batch_had_never_been(row):
    opt, problem = make(row)
    good_steps(opt, problem, 0, 12)
    before, seen = snapshot(opt), 0
    for value, stop in ((math.nan, 13), (math.inf, 14), (-math.inf, 25)):
        for which in range(len(problem.params)):
            bad_step(opt, problem, value, which)
            seen += 1
            assert_same(snapshot(opt), before)
            assert skipped(opt) == seen
        good_steps(opt, problem, stop - 1 if stop < 25 else 14, stop)
        before = snapshot(opt)

    assert_same(snapshot(opt), clean_end(name(row)))


def test_at_the_first_step(row):
    opt, problem = make(row)
    before = snapshot(opt)
    for count, value in enumerate((math.nan, -math.inf, math.inf), start=1):
        bad_step(opt, problem, value, count % len(problem.params))
        assert skipped(opt) == count
    after = snapshot(opt)
    if row[1]:  # a fused base has made its state before it skips
        made = [value for own in opt.state.values() for value in own.values()]
        assert all(not value.any() for value in made)
        before["state"] = after["state"]
        for old, new in zip(before["param_groups"], after["param_groups"], strict=True):
            # of the parameters that have state, and of the last step that the host knows of
            for known in ("reference_square", "size", "lrs"):
                old["mechanic"][known] = new["mechanic"][known]
    assert_same(after, before)

    good_steps(opt, problem, 0, 25)
    assert_same(snapshot(opt), clean_end(name(row)))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    ],
    ids=["dampening", "nesterov", "maximize"],
)
def test_momentum_starts_anew_after_a_skipped_first_step_of_fused_sgd(kwargs):
    row = (BY_ID["SGD"], {"fused": True, **kwargs})
    opt, problem = make(row)
    bad_step(opt, problem, math.nan)
    good_steps(opt, problem, 0, 25)
    clean, untouched = make(row)
    good_steps(clean, untouched, 0, 25)
    assert_same(bits(problem.params), bits(untouched.params))


@pytest.mark.parametrize("row", FEW, ids=name)
def test_what_the_tuner_shows_stays(row):
    opt, problem = make(row)
    good_steps(opt, problem, 0, 20)
    before = bits(tuner(opt).metrics())
    bad_step(opt, problem, math.nan)
    after = bits(tuner(opt).metrics())
    assert after.pop("skipped") != before.pop("skipped")
    assert_same(after, before)
    assert_moved(opt)


def test_the_sign_of_a_zero_weight_survives():
    """Not under a fused base, which skips on the device: -0.0 + 0·Δ is 0.0 there."""
    weight = nn.Parameter(torch.tensor([-0.0, 1.0, 2.0]))
    opt = mechanize(torch.optim.AdamW([weight]))
    before = bits(weight)
    weight.grad = torch.tensor([0.0, math.nan, 1.0])
    opt.step()
    assert_same(bits(weight), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_weights_of_every_dtype_are_left_alone(dtype, fused):
    """Many weights: one rounded anew to another value in a hundred thousand would show."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1 << 17).to(dtype))
    opt = mechanize(torch.optim.AdamW([weight], lr=1.0, eps=1e-4, fused=fused))
    for _ in range(20):
        weight.grad = weight.detach() - 10
        opt.step()
    assert_moved(opt)
    before = snapshot(opt)
    weight.grad = weight.detach() - 1
    weight.grad[7] = math.inf
    opt.step()
    assert_same(snapshot(opt), before)
    assert skipped(opt) == 1


def _two_groups(base: Base, lr: float | Tensor) -> tuple[Optimizer, Problem]:
    problem = make_problem(base, hidden=64 if base.id == "AdamW8bit" else 16)
    first, *rest = problem.params
    groups = [{"params": [first]}, {"params": rest, "lr": lr}] if rest else [{"params": [first]}]
    if not rest:  # a base with one parameter gets a second one that takes no part in the loss
        idle = nn.Parameter(torch.ones(64, 10))
        groups.append({"params": [idle], "lr": lr})
    return mechanize(base.factory(groups, lr=1.0)), problem


@pytest.mark.parametrize("base", by_kind(b for b in BASES if not b.one_group))
def test_in_a_group_whose_lr_is_zero(base):
    opt, problem = _two_groups(base, 0.0)
    idle = opt.param_groups[1]["params"][-1]

    def fill(step: int, value: float | None = None) -> None:
        problem.backward(step)
        if base.sparse:
            idle.grad = problem.params[0].grad.clone()
        if value is not None:
            poison(idle, value)

    for step in range(25):
        if step == 15:
            before = snapshot(opt)
            for count, value in enumerate((math.nan, math.inf), start=1):
                fill(step, value)
                opt.step()
                assert_same(snapshot(opt), before)
                assert skipped(opt) == count
        fill(step)
        opt.step()
    assert_moved(opt)

    clean, problem = _two_groups(base, 0.0)
    idle = clean.param_groups[1]["params"][-1]
    for step in range(25):
        fill(step)
        clean.step()
    assert_same(snapshot(opt), snapshot(clean))


@pytest.mark.parametrize("fused", [False, True])
def test_in_a_group_whose_lr_is_a_tensor_at_zero(fused):
    problem = make_problem()
    first, *rest = problem.params
    groups = [{"params": [first]}, {"params": rest, "lr": torch.tensor(0.0)}]
    opt = mechanize(torch.optim.AdamW(groups, lr=torch.tensor(1.0), fused=fused))
    good_steps(opt, problem, 0, 20)
    assert_moved(opt)
    before = snapshot(opt)
    bad_step(opt, problem, math.nan)
    assert_same(snapshot(opt), before)
    assert skipped(opt) == 1


# torch's own Adagrad makes a sparse tensor without saying whether to check it
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("base", ["SparseAdam", "SGD", "SGD-momentum", "Adagrad"])
@pytest.mark.parametrize("coalesced", [True, False])
def test_in_a_sparse_gradient(base, coalesced):
    """The bad element is one of two that are to be summed, or stands in a row of its own."""

    def run(bad_at: int) -> tuple[Optimizer, nn.Parameter]:
        weight = nn.Parameter(torch.linspace(-1, 1, 24).view(8, 3).clone())
        opt = mechanize(BY_ID[base].factory([weight], lr=1.0))
        for step in range(25):
            for attempt in range(2 if step == bad_at else 1):
                index = torch.tensor([[step % 8, 3, 3, 5]])
                grads = weight.detach()[index[0]] - 2
                if step == bad_at and attempt == 0:
                    grads[2, 1] = math.nan
                    before = snapshot(opt)
                grad = torch.sparse_coo_tensor(index, grads, (8, 3), check_invariants=True)
                weight.grad = grad.coalesce() if coalesced else grad
                opt.step()
                if step == bad_at and attempt == 0:
                    assert_same(snapshot(opt), before)
                    assert skipped(opt) == 1
        return opt, weight

    opt, _ = run(bad_at=15)
    clean, _ = run(bad_at=-1)
    assert_same(snapshot(opt), snapshot(clean))
    assert_moved(opt)


@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_in_a_later_evaluation_of_a_closure(search, at):
    """LBFGS evaluates the closure several times a step; a NaN may come up in any of them."""
    problem, whole = (make_problem(BY_ID["LBFGS"], hidden=16) for _ in range(2))
    kwargs = {"max_iter": 4, "history_size": 5, "line_search_fn": search}
    opt, uninterrupted = (
        mechanize(torch.optim.LBFGS(one.params, lr=0.1, **kwargs)) for one in (problem, whole)
    )
    good_steps(uninterrupted, whole, 0, 30)
    good_steps(opt, problem, 0, 20)
    assert_moved(opt)
    before, evaluations = snapshot(opt), itertools.count(1)

    def closure() -> Tensor:
        loss = problem.backward()
        if next(evaluations) == at:
            poison(problem.params[0], math.nan)
        return loss

    opt.step(closure)
    assert next(evaluations) > at, "the bad evaluation never came"
    assert_same(snapshot(opt), before)
    assert skipped(opt) == 1
    good_steps(opt, problem, 20, 30)
    for param, expected in zip(problem.params, whole.params, strict=True):
        assert torch.equal(param, expected)


def test_a_skipped_step_gives_the_loss_of_its_closure():
    problem = make_problem()
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))

    def closure() -> Tensor:
        problem.backward()
        poison(problem.params[0], math.nan)
        return torch.tensor(7.0)

    assert opt.step(closure) == 7.0
    assert skipped(opt) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_large_finite_gradients_are_not_skipped(fused):
    weight = nn.Parameter(torch.linspace(-1, 1, 9))
    opt = mechanize(torch.optim.AdamW([weight], lr=1.0, fused=fused))
    for _ in range(20):
        weight.grad = (weight.detach() - 2) * 1e15
        opt.step()
    assert skipped(opt) == 0
    assert_moved(opt)


def _warnings_of(opt: Optimizer, problem: Problem, lengths: list[int], gap: int) -> list[int]:
    """How many warnings come with each run of so many skips and the good steps after it."""
    counts = []
    for length in lengths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(length):
                bad_step(opt, problem, math.nan)
            good_steps(opt, problem, 0, gap)
        assert all(warning.category is RuntimeWarning for warning in caught)
        assert all("steps were skipped" in str(warning.message) for warning in caught)
        counts.append(len(caught))
    return counts


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lead", range(0, PATIENCE + 1, 2))
def test_one_warning_for_each_run_of_skips(fused, lead):
    """Whatever the number of the step at which the run begins."""
    problem = make_problem(hidden=4)
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0, fused=fused))
    good_steps(opt, problem, 0, lead)
    lengths = [PATIENCE, PATIENCE - 1, 2 * PATIENCE + 5, PATIENCE + 3]
    assert _warnings_of(opt, problem, lengths, gap=1) == [1, 0, 1, 1]
    assert skipped(opt) == sum(lengths)


@pytest.mark.parametrize("fused", [False, True])
def test_skips_that_are_not_in_a_row_do_not_warn(fused):
    problem = make_problem(hidden=4)
    opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0, fused=fused))
    assert _warnings_of(opt, problem, [1, PATIENCE - 1] * 6, gap=1) == [0] * 12


def test_each_base_warns(row):
    opt, problem = make(row)
    good_steps(opt, problem, 0, 2)
    assert _warnings_of(opt, problem, [PATIENCE], gap=1) == [1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("base", ["AdamW", "SGD-momentum"])
def test_the_check_can_be_switched_off(base, fused):
    """The base then gets the gradient as it is, and nothing is counted as skipped."""
    opt, problem = make((BY_ID[base], {"fused": fused}), skip_nonfinite=False)
    good_steps(opt, problem, 0, 20)
    assert_moved(opt)
    bad_step(opt, problem, math.nan, which=0)
    bad, *rest = problem.params
    state = [value for value in opt.state[bad].values() if value.shape == bad.shape]
    assert bad.view(-1)[-1].isnan()
    assert any(value.view(-1)[-1].isnan() for value in state)
    assert all(param.isfinite().all() for param in rest)
    assert skipped(opt) == 0


@pytest.mark.parametrize("row", FEW, ids=name)
def test_without_the_check_good_steps_are_the_same(row):
    opt, problem = make(row, skip_nonfinite=False)
    good_steps(opt, problem, 0, 25)
    assert_same(snapshot(opt), clean_end(name(row)))
