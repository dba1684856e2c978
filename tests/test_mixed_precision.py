"""Autocast, and a gradient scaler that changes nothing or skips a step."""

import math
from typing import Any

import pytest
import torch
from bases import (
    BY_ID,
    KINDS,
    PRESETS,
    Base,
    Problem,
    assert_equal,
    assert_moved,
    make_problem,
    supporting,
    train,
    values,
)
from cases import case
from comparing import displacements, tuner_of
from torch import nn
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner


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
    case(base, fused, name=f"{base.id}-{'fused' if fused else 'default'}", by_day=base.id in KINDS)
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


@pytest.mark.parametrize(
    ("base", "fused", "inf_at"),
    [
        case(
            *(base, fused, at),
            name=f"{at}-{base.id}-{'fused' if fused else 'default'}",
            by_day=base.id in KINDS and (base.id == "AdamW" or (i + fused + (at > 0)) % 2 == 0),
        )
        for i, base in enumerate(supporting("fused"))
        for fused in (False, True)
        for at in (0, 12)
    ],
)
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
