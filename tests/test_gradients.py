"""What a step finds as gradients: none, zeros, frozen parameters, sums of parts, clipped ones."""

import pytest
import torch
from bases import (
    BASES,
    BY_ID,
    FEW,
    KINDS,
    MISSING,
    Base,
    assert_equal,
    assert_moved,
    every_base,
    few_bases,
    make_problem,
    take_step,
    train,
    values,
)
from cases import case
from comparing import assert_same_run, displacements, tuner_of
from torch import Tensor, nn

from mechanic.torch import mechanize

WHENS = ("first", "sometimes", "always")


@pytest.mark.parametrize(
    ("base", "when"),
    [
        case(
            base, when, name=f"{base.id}-{when}", by_day=base.id in KINDS and (base in FEW or turn)
        )
        for i, base in enumerate(b for b in BASES if not b.sparse)
        for when, turn in ((when, WHENS[i % 3] == when) for when in WHENS)
    ],
)
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
        if step % 4 == 3:
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


# Accumulation and clipping


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


@pytest.mark.parametrize(
    "name",
    [n for n in ("AdamW", "SGD", "SGD-momentum", "Lion", "RMSprop", "Muon") if n not in MISSING],
)
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
