"""The compiled step of a CPU: in lock step with the plain path, against the float64 reference, and
with everything that may change under it between two steps."""

import copy
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_exactness as exact
import torch
from bases import train
from cases import case
from checkpoints import everything, from_bytes, make, to_bytes
from comparing import assert_same
from lockstep import KNOWN, bits, same_bits
from nativelock import FIRST, STEPS, Pair, native_steps, on_native
from test_interrupts import are_equal, interrupted
from test_interrupts import trained as trained_run
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from mechanic.torch import mechanize, tuner
from mechanic.torch.native import step as native

pytestmark = on_native

OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "optax": {"preset": "optax"},
    "decay": {"s_decay": 0.01},
    "paper without decay": {"preset": "paper", "s_decay": 0.0, "betas": (0.9, 0.99)},
    "betas": {"betas": (0.9, 0.99, 0.999)},
    "cap": {"max_scale": 0.05},
    "clipped": {"max_grad_norm": 30.0},
    "given start": {"s_init": 1e-5},
    "not skipping": {"skip_nonfinite": False},
}
BY_DAY = [("AdamW", "decay"), ("AdamW", "betas"), ("SGD", "clipped"), ("Lion", "paper")]
SMALL = [(40, 30), (7,), (3, 5)]


# The tests that are run at night with the compiled step, too. Most of those that are not here look
# into the plain path itself.
WITH_IT = (
    *("checkpoints", "closures", "exactness", "gradients", "groups", "handle", "hooks", "machine"),
    *("schedules", "scopes", "skipping", "state_dicts"),
)


def adamw(params: Any) -> AdamW:
    return AdamW(params, lr=1.0, weight_decay=0.1)


@pytest.mark.parametrize("base", [name for name in KNOWN if name != "AdamW-capturable"])
def test_lock_step(base):
    pair = Pair(KNOWN[base], ascent=base == "Adam-maximize")
    pair.run()
    pair.assert_same()
    assert pair.made == STEPS - FIRST


@pytest.mark.parametrize(
    ("base", "options"),
    [
        case(base, options, name=f"{base}-{options}", by_day=(base, options) in BY_DAY)
        for base in ("AdamW", "SGD", "Lion")
        for options in OPTIONS
    ],
)
def test_lock_step_of_options(base, options):
    pair = Pair(KNOWN[base], SMALL, **OPTIONS[options])
    pair.run()
    pair.assert_same(factor=1.5 if options in ("cap", "given start") else 8.0)
    assert pair.made == STEPS - FIRST


@pytest.mark.parametrize("preset", ["paper", "default"])
@pytest.mark.parametrize("base", ["sgd", "momentum", "adamw", "lion"])
@pytest.mark.parametrize("problem", ["quadratic", case("wine", name="wine", by_day=False)])
def test_float64_reference(problem, base, preset):
    """What is computed in float32 stays near the rules and bases in float64."""
    problem, base = exact.PROBLEMS[problem], exact.BASES[base]
    expected = exact.expect(problem, base, preset)
    with native_steps() as made:
        trajectory = exact.train(problem, base, torch.float32, preset=preset)
    growth = 300
    if preset == "default" and problem is exact.PROBLEMS["wine"]:  # see `exact.test_float32`
        trajectory, expected = (tuple(a[:50] for a in run) for run in (trajectory, expected))
        growth = 50
    exact.assert_same(trajectory, expected, 1e-3, growth)
    assert len(made) == exact.STEPS - FIRST
    assert np.ptp(trajectory[1]) > 0


def test_groups_with_missing_gradients_and_learning_rates_of_0():
    def two_groups(params: Any) -> AdamW:
        first, second = {"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}
        return AdamW([first, second | {"lr": 0.3, "betas": (0.5, 0.9)}], lr=1.0)

    pair = Pair(two_groups)
    for step in range(STEPS):
        lr = 0.0 if step % 5 == 4 else 0.3 / (1 + step)
        for own in pair.groups():
            for group in own:
                group["lr"] = lr if group["betas"] == (0.5, 0.9) else 1 - step / 100
        gradients: list[Tensor | None] = [*pair.gradients()]
        if step % 7 > 4:
            gradients[step % 2] = None
        pair.step(gradients)
    pair.assert_same()
    assert pair.made == STEPS - FIRST


@pytest.mark.parametrize(
    "base", ["AdamW", *(case(b, name=b, by_day=False) for b in ("SGD-nesterov", "Lion"))]
)
def test_learning_rates_that_rise(base):
    """The norm of the update is then measured before it is made."""
    pair = Pair(KNOWN[base], SMALL)
    measured = []
    for step in range(STEPS):
        for own in pair.groups():
            for group in own:
                group["lr"] = min(step + 1, 8) * (0.3 if step < 40 else 1.0)
        pair.step()
        measured.append(native._plans[pair.fast.mechanism].tables.plan.with_u if step else 0)
    pair.assert_same()
    assert pair.made == STEPS - FIRST
    assert measured[1:10] == [1] * 9
    assert [step for step in range(10, STEPS) if measured[step]] == [40]


def test_frozen_and_thawed():
    pair = Pair(adamw, SMALL)
    pair.run(30)
    scale = float(pair.fast.mechanism.scale)
    for side in pair.sides:
        tuner(side.optimizer).freeze()
    pair.run(15)
    assert float(pair.fast.mechanism.scale) == scale
    for side in pair.sides:
        tuner(side.optimizer).unfreeze()
    pair.run(25)
    pair.assert_same()
    assert pair.made == 70 - FIRST


@pytest.mark.parametrize(
    "bad", [math.nan, *(case(bad, name=str(bad), by_day=False) for bad in (math.inf, -math.inf))]
)
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    pair = Pair(KNOWN["SGD-momentum"], SMALL)
    pair.run(25)
    for which in range(len(SMALL)):
        gradients = pair.gradients()
        gradients[which].view(-1)[-1] = bad
        before, made = bits(pair.fast.optimizer), pair.made
        pair.step(gradients)
        assert all(map(torch.equal, bits(pair.fast.optimizer), before))
        assert pair.made == made
        pair.run(3)
        assert pair.made == made + 3
    pair.run(20)
    pair.assert_same()
    assert int(pair.fast.mechanism.counts.read().skipped) == len(SMALL)


@pytest.mark.parametrize(
    ("base", "size", "made", "then"),
    [
        ("AdamW", 1e-25, 0, 0),  # and so are all steps after them
        ("AdamW", 1e-10, 3, 30),
        ("AdamW", 1e17, 0, 0),
        ("SGD", 1e-25, 0, 0),
        ("SGD", 1e-8, 0, 30),
    ],
)
def test_gradients_of_an_extreme_size_are_left_to_the_plain_path(base, size, made, then):
    pair = Pair(KNOWN[base], SMALL)
    pair.run(20)
    before = pair.made
    for _ in range(3):
        pair.step([gradient * size for gradient in pair.gradients()])
    assert pair.made == before + made
    pair.run(30)
    pair.assert_same()
    assert pair.made == before + made + then


def test_zero_gradients():
    pair = Pair(adamw, SMALL)
    pair.run(20)
    for _ in range(3):
        pair.step([torch.zeros(shape) for shape in SMALL])
    pair.run(30)
    pair.assert_same()
    assert pair.made == 50 - FIRST


def test_it_takes_turns_with_the_plain_path():
    pair, draw = Pair(adamw, SMALL), random.Random(0)
    for _ in range(STEPS):
        pair.step(used=draw.random() < 0.5)
    pair.assert_same()
    assert 20 < pair.made < 50


@pytest.mark.parametrize(
    "row",
    ["SGD-momentum", "AdamW"]
    + [case(row, name=row, by_day=False) for row in ("SGD", "AdamW-fused", "Lion")],
)
def test_a_checkpoint_is_resumed_bit_for_bit(row):
    with native_steps() as made:
        opt, problem = make(row)
        train(opt, problem, 20)
        saved, weights = to_bytes(opt.state_dict()), [p.detach().clone() for p in problem.params]
        before = len(made)
        train(opt, problem, 20)
        assert len(made) == before + 20
        other, again = make(row)
        with torch.no_grad():
            for param, weight in zip(again.params, weights, strict=True):
                param.copy_(weight)
        other.load_state_dict(from_bytes(saved))
        train(other, again, 20)
        assert len(made) == before + 40
    assert_same(everything(opt), everything(other))


def big_run(threads: int, steps: int = 16) -> Any:
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=draw)) for size in (100_003, 70_000, 5)]
    optimizer = mechanize(AdamW(params, lr=1.0))
    had = torch.get_num_threads()
    for _ in range(steps):
        for param in params:
            param.grad = param.detach() + torch.randn(param.shape, generator=draw)
        used = threads if tuner(optimizer).metrics()["steps"] >= FIRST else 1
        torch.set_num_threads(used)  # torch's own sums depend on it
        with native_steps() as made:
            optimizer.step()
        torch.set_num_threads(had)
    assert made
    return optimizer


def test_the_number_of_threads_changes_nothing(monkeypatch):
    monkeypatch.setattr(native, "_GRAIN", 1000)
    one = big_run(1)
    for threads in (2, 5):
        assert same_bits(one, big_run(threads)), threads


@pytest.mark.filterwarnings("ignore:.*fork")  # beside the threads of JAX, too
def test_it_goes_on_in_a_process_that_was_forked(monkeypatch):
    monkeypatch.setattr(native, "_GRAIN", 1000)
    optimizer = big_run(3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if same_bits(optimizer, big_run(3)) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "moments", [40, pytest.param(400, marks=pytest.mark.nightly)], ids="{} moments".format
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_ctrl_c_at_any_moment_leaves_everything_before_or_after(name, moments):
    with native_steps() as made:
        run = trained_run(name)
        run.give_gradients()
        before, after = run.everything(), run.after().everything()
        seen = set()
        for fresh, moment in interrupted(run, lambda own: own.step(), moments, seed=0):
            now = fresh.everything()
            ends = are_equal(now, before), are_equal(now, after)
            assert any(ends), moment
            seen.add(ends)
            fresh.optimizer.step()  # and it goes on
    assert len(seen) == 2
    assert len(made) > moments


def test_copies_and_two_optimizers_do_not_meddle():
    pair = Pair(adamw, SMALL)
    pair.run(20)
    other = copy.deepcopy((pair.fast.params, pair.fast.optimizer))
    with native_steps() as made:
        for param in other[0]:
            param.grad = torch.ones_like(param)
        other[1].step()
    assert made
    pair.run(40)
    pair.assert_same()


def test_autograd_notices_that_the_weights_have_changed():
    weight = nn.Parameter(torch.ones(5))
    optimizer = mechanize(SGD([weight], lr=1.0))
    for turn in range(FIRST + 5):
        weight.grad = weight.detach() + turn
        loss = (weight**2).sum()
        with native_steps() as made:
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert made


def moved_data(pair: Pair) -> None:
    for side in pair.sides:
        side.params[0].data = side.params[0].data.clone() + 1
        side.params[1].data = side.params[1].data.clone()


def new_group(pair: Pair) -> None:
    for side in pair.sides:
        new = nn.Parameter(torch.ones(6))
        side.optimizer.add_param_group({"params": [new], "lr": 0.5})
        side.params.append(new)
    pair.targets.append(torch.full((6,), 5.0))


def loaded(pair: Pair) -> None:
    for side in pair.sides:
        side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def moved_state(pair: Pair) -> None:
    for side in pair.sides:
        own = side.optimizer.state[side.params[0]]
        own["exp_avg"] = own["exp_avg"].clone()
        own["exp_avg_sq"].data = own["exp_avg_sq"].data.clone()


@pytest.mark.parametrize("change", [moved_data, new_group, loaded, moved_state])
def test_what_changes_between_two_steps_is_seen(change):
    pair = Pair(adamw, SMALL)
    pair.run(20)
    change(pair)
    pair.run(40)
    pair.assert_same(factor=8.0)
    assert pair.made > 30


def test_tensors_that_lie_in_another_order():
    params = [torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5, 9).t()]
    pair = Pair(adamw, params=params)
    pair.run(40)
    pair.assert_same(factor=8.0)
    assert pair.made == 40 - FIRST
    gradients = [gradient.contiguous() for gradient in pair.gradients()]
    for side in pair.sides:
        for param, gradient in zip(side.params, gradients, strict=True):
            param.grad = gradient.clone()
    for side, used in zip(pair.sides, (False, True), strict=True):
        with native_steps(used) as made:
            side.optimizer.step()
    assert not made
    pair.run(5)
    pair.assert_same(factor=8.0)


def of_dtype(dtype: torch.dtype) -> Any:
    return lambda: [nn.Parameter(torch.ones(4, 5, dtype=dtype)), nn.Parameter(torch.ones(3))]


def shared_memory() -> list[nn.Parameter]:
    memory = torch.ones(20)
    return [nn.Parameter(memory[:12]), nn.Parameter(memory[8:])]


def scattered() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(6, 4)[:, ::2])]


LEFT: dict[str, tuple[Any, Any]] = {
    "float64": (of_dtype(torch.float64), adamw),
    "bfloat16": (of_dtype(torch.bfloat16), adamw),
    "complex": (of_dtype(torch.complex64), adamw),
    "shared memory": (shared_memory, adamw),
    "gaps": (scattered, adamw),
    "lr as a tensor": (of_dtype(torch.float32), lambda p: AdamW(p, lr=torch.tensor(1.0))),
    "amsgrad": (of_dtype(torch.float32), lambda p: Adam(p, lr=1.0, amsgrad=True)),
    "another base": (of_dtype(torch.float32), lambda p: torch.optim.Adagrad(p, lr=1.0)),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_it_does_not_know_is_left_to_the_plain_path(what):
    make_params, make_base = LEFT[what]
    params, expected = make_params(), make_params()
    optimizers = [mechanize(make_base(own)) for own in (params, expected)]
    for used, own, optimizer in zip((True, False), (params, expected), optimizers, strict=True):
        for turn in range(FIRST + 10):
            for param in own:
                param.grad = param.detach() * 0.5 + turn % 3
            with native_steps(used) as made:
                optimizer.step()
            assert not made
    assert same_bits(*optimizers)


def test_gradients_that_are_weights_are_left_to_the_plain_path():
    """Were a weight written before the gradient that shares its memory is read, it would be one
    of the next step."""
    runs = []
    for used in (False, True):
        params = [nn.Parameter(torch.linspace(1, 2, 9)), nn.Parameter(torch.linspace(3, 4, 9))]
        optimizer = mechanize(SGD(params, lr=0.1))
        for _ in range(FIRST + 10):
            params[0].grad, params[1].grad = params[1].detach(), params[0].detach().clone()
            with native_steps(used) as made:
                optimizer.step()
            assert not made
        runs.append(optimizer)
    assert same_bits(*runs)


@pytest.mark.nightly
def test_what_is_tested_of_the_plain_path_holds_for_it():
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in WITH_IT]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"MECHANIC_NATIVE": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
