"""The kernels against the plain path, in lock step. Without a GPU, Triton's interpreter runs
them."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lion_pytorch
import pytest
import torch
from lockstep import (
    DEVICE,
    DISPLACEMENT,
    ON_GPU,
    STEPS,
    Lock,
    Make,
    Side,
    approx,
    assert_near,
    bits,
    copied,
    kernels,
    same_bits,
)
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from triton import jit, next_power_of_2
from triton import language as tl

from mechanic import tuner as rules
from mechanic.options import Options
from mechanic.torch import mechanize, tuner
from mechanic.torch.kernels import launch, passes, plan
from mechanic.torch.kernels.rule import INPUTS, write_rule
from mechanic.torch.scalars import advance

pytestmark = [
    pytest.mark.usefixtures("small_chunks", "quick_interpreter", "one_thread"),
    # The interpreter computes with NumPy, which warns of what a GPU does in silence.
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|overflow) encount:RuntimeWarning"
    ),
]

ONE = [(3, 5)]
FEW = [(7,), (3, 5)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each small tensor, where each program takes its time."""
    if not ON_GPU:
        monkeypatch.setattr(passes, "CHUNK", 1024)


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """For most of its time, Triton's interpreter prepares its language anew for each function that
    a kernel calls, looks up types, and looks for overflows of integers. Here it does so once, or
    not at all."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    prepare, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    prepared: dict[int, Any] = {}
    types: dict[str, Any] = {}

    def prepare_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in prepared:
            prepared[id(names)] = prepare(function)
        return SimpleNamespace(restore=lambda: None)

    def find_type_once(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = find_type(of)
        return types[of.name]

    with pytest.MonkeyPatch.context() as patch:
        unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(interpreter, "_get_np_dtype", find_type_once)
        yield
    for scope in reversed(prepared.values()):
        scope.restore()


class Own(AdamW):
    """A base that nobody knows: its step is its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


KNOWN: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=1.0, weight_decay=0.1),
    "AdamW-fused": lambda p: AdamW(p, lr=1.0, weight_decay=0.1, betas=(0.8, 0.95), fused=True),
    "Adam-maximize": lambda p: Adam(p, lr=0.5, weight_decay=0.01, maximize=True, fused=True),
    "SGD": lambda p: SGD(p, lr=1.0, weight_decay=0.01),
    "SGD-momentum": lambda p: SGD(p, lr=1.0, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD-nesterov": lambda p: SGD(p, lr=2.0, momentum=0.9, nesterov=True),
    "Lion": lambda p: lion_pytorch.Lion(p, lr=1.0, betas=(0.3, 0.95), weight_decay=0.1),
}
if ON_GPU:
    KNOWN["AdamW-capturable"] = lambda p: AdamW(p, lr=1.0, capturable=True)

ANY: dict[str, Make] = {
    "RMSprop": lambda p: RMSprop(p, lr=1.0),
    "Adagrad-fused": lambda p: Adagrad(p, lr=1.0, fused=not ON_GPU),
    "Own": lambda p: Own(p, lr=1.0, weight_decay=0.1, fused=True),
}

BASES = KNOWN | ANY


# -- The same as the plain path ----------------------------------------------------------------


@pytest.mark.parametrize("base", KNOWN)
def test_a_known_base(base):
    lock = Lock(KNOWN[base], ONE, ascent="maximize" in base)
    lock.run()
    lock.assert_same()
    lock.assert_known()


@pytest.mark.parametrize("base", ANY)
def test_any_base(base):
    lock = Lock(ANY[base], ONE)
    lock.run()
    lock.assert_same()
    lock.assert_known(False)


@pytest.mark.parametrize(
    ("base", "shapes"),
    [
        ("AdamW-fused", [(), (0,), (7,), (1023,), (1024,), (2049,)]),
        ("RMSprop", [(), (0,), (2049,)]),
    ],
)
def test_sizes(base, shapes, monkeypatch):
    if ON_GPU:
        shapes = [*shapes, (32767,), (32769,), (3, 50_001)]
    else:
        monkeypatch.setattr(passes, "CHUNK", 2048)
    lock = Lock(BASES[base], shapes)
    lock.run()
    lock.assert_same()
    assert lock.fast.ran_kernels(known=base in KNOWN)


@pytest.mark.skipif(not ON_GPU, reason="too many for the interpreter")
def test_many_chunks_and_tensors(monkeypatch):
    """More than one program adds up, or counts, in a round."""
    monkeypatch.setattr(passes, "CHUNK", 1024)
    lock = Lock(KNOWN["AdamW-fused"], [(3,)] * 4200 + [(4200 * 1024 + 1,)])
    lock.run(30)
    lock.assert_same()


def in_groups(params: list[Any]) -> AdamW:
    one, two, rest = params
    groups = [
        {"params": [one]},
        {"params": [two], "lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.7), "eps": 1e-2},
        {"params": [rest], "lr": 0.0},
    ]
    return AdamW(groups, lr=1.0, fused=True)


def in_several_ways(params: list[Any]) -> SGD:
    one, two, rest = params
    groups = [
        {"params": [one], "lr": 0.5},
        {"params": [two], "momentum": 0.9, "dampening": 0.5},
        {"params": [rest], "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ]
    return SGD(groups, lr=1.0)


@pytest.mark.parametrize("make", [in_groups, in_several_ways])
def test_groups_on_a_schedule(make):
    lock = Lock(make, [(7,), (3, 5), (4,)])
    still = lock.fast.params[2].detach().clone()
    schedules = [ExponentialLR(side.optimizer, 0.97) for side in lock.sides]
    for step in range(STEPS):
        gradients: list[Any] = lock.gradients()
        if step == 12:
            for side in lock.sides:
                side.optimizer.param_groups[1]["lr"] = 0.0  # it has moved, and now stays
        if step == 14:
            gradients[0] = gradients[2] = None  # nothing to learn from, at an lr of 0
        lock.step(gradients)
        for schedule in schedules:
            schedule.step()
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)
    assert torch.equal(still, lock.fast.params[2]) == (make is in_groups)


@pytest.mark.parametrize("base", [AdamW, SGD])
def test_lr_as_a_tensor(base):
    lock = Lock(lambda p: base(p, lr=torch.tensor(1.0, device=DEVICE), fused=True), ONE)
    for step in range(STEPS):
        for side in lock.sides:
            side.optimizer.param_groups[0]["lr"].fill_(0.0 if step == 5 else 0.97**step)
        lock.step()
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


def test_lr_that_is_raised_after_a_long_time_at_0():
    lock = Lock(lambda p: SGD(p, lr=0.0), ONE)
    lock.run(24)
    for side in lock.sides:
        side.optimizer.param_groups[0]["lr"] = 1.0
    lock.run()
    lock.assert_same()


def test_a_group_at_lr_0_stays_bit_for_bit():
    """With zeros of either sign, numbers that are hardly any, and momentum that overflows."""
    tiny = torch.tensor([-0.0, 2.0**-130, 1e-38, 3e-37], device=DEVICE)
    params = [torch.ones(3, device=DEVICE), tiny.bfloat16(), tiny]

    def make(p: list[Any]) -> SGD:
        return SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.0}], lr=1.0, momentum=0.9)

    lock = Lock(make, params=params)
    for _ in range(4):
        moving, _, _ = lock.gradients()
        lock.step([moving, torch.ones_like(params[1]), torch.full_like(tiny, 3e38)])
    assert lock.fast.ran_kernels(known=True)
    assert int(lock.fast.mechanism.skipped) == 0
    for side in lock.sides:
        assert torch.equal(side.params[1].view(torch.int16), params[1].view(torch.int16))
        assert torch.equal(side.params[2].view(torch.int32), params[2].view(torch.int32))


def test_an_lr_whose_square_is_not_in_float32():
    lock = Lock(lambda p: SGD(p, lr=1e20), ONE)
    for step in range(STEPS):
        lock.step([2.0 ** min(step, 8) * gradient for gradient in lock.gradients()])
    lock.assert_same(factor=5)
    assert lock.fast.ran_kernels(known=True)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "paper"},
        {"preset": "optax", "s_init": 1e-4},
        {"s_init": 1e-4, "betas": (0.9, 0.99, 0.5), "s_decay": 0.1},
    ],
    ids=str,
)
def test_presets_and_options(options):
    lock = Lock(KNOWN["AdamW-fused"], ONE, **options)
    lock.run()
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


def test_steps_that_the_base_counts_on_the_host(monkeypatch):
    """Without a GPU the host is where the parameters are; it is made to look otherwise."""
    if not ON_GPU:
        is_elsewhere = property(lambda _: False, lambda *_: None)
        monkeypatch.setattr(plan.Plan, "has_steps_here", is_elsewhere, raising=False)
    lock = Lock(KNOWN["AdamW"], FEW)
    for step in range(STEPS):
        gradients: list[Any] = lock.gradients()
        if step % 4 == 1:
            gradients[0] = None
        if step == 6:
            gradients[1][0, 0] = float("nan")
        if step == 9:  # as by who loads another count
            for side in lock.sides:
                side.optimizer.state[side.params[0]]["step"] += 5
        lock.step(gradients)
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


def test_what_the_kernels_do_not_do_is_left_to_the_plain_path():
    locks = [
        Lock(KNOWN["AdamW-fused"], FEW, preset="mechanic-pytorch"),
        Lock(KNOWN["AdamW-fused"], FEW, dtype=torch.float64),
    ]
    for lock in locks:
        lock.run(30)
        lock.assert_same(1e-12)
        assert not lock.fast.ran_kernels(known=True)


def test_a_cap_and_a_frozen_scale():
    lock = Lock(KNOWN["AdamW-fused"], ONE, max_scale=0.015)
    lock.run(6)
    for side in lock.sides:
        tuner(side.optimizer).freeze()
    scale = float(tuner(lock.fast.optimizer).scale)
    lock.run(3)
    assert float(tuner(lock.fast.optimizer).scale) == scale < 0.015
    for side in lock.sides:
        tuner(side.optimizer).unfreeze()
    lock.run()
    assert float(tuner(lock.fast.optimizer).scale) == pytest.approx(0.015)
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    lock = Lock(KNOWN["SGD"], ONE)
    evaluations = 0

    def closure() -> float:
        nonlocal evaluations
        evaluations += 1
        lock.give(lock.gradients())
        return 0.5

    with kernels():
        losses = [lock.fast.optimizer.step(closure) for _ in range(3)]
    assert losses == [0.5, 0.5, 0.5]
    assert evaluations == 3
    assert lock.fast.ran_kernels(known=True)


# -- Both paths on one state ---------------------------------------------------------------------


@pytest.mark.parametrize("base", ["AdamW", "RMSprop"])
def test_paths_may_take_turns(base):
    lock = Lock(BASES[base], ONE)
    for step in range(STEPS):
        lock.fast.uses_kernels = step % 6 < 3
        lock.step()
        if lock.fast.uses_kernels and step:
            assert lock.fast.ran_kernels(known=base in KNOWN)
    lock.assert_same()


@pytest.mark.parametrize(
    ("base", "saved_by_kernels"), [("AdamW", True), ("AdamW-fused", False), ("RMSprop", True)]
)
def test_a_checkpoint_of_one_path_loads_on_the_other(base, saved_by_kernels):
    lock = Lock(BASES[base], ONE)
    lock.fast.uses_kernels = saved_by_kernels
    lock.run(STEPS // 2)
    saved = copy.deepcopy(lock.fast.optimizer.state_dict())
    params = [Parameter(param.detach().clone()) for param in lock.fast.params]
    lock.fast = Side(BASES[base], params, not saved_by_kernels, {})
    lock.fast.optimizer.load_state_dict(saved)
    lock.run(STEPS // 2)
    lock.assert_same()


def test_copies_go_on_bit_for_bit():
    lock = Lock(KNOWN["AdamW-fused"], ONE)
    lock.run(STEPS - 4)
    original = lock.fast.optimizer
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    for _ in range(4):
        lock.step()
        for other in copies:
            (param,) = other.param_groups[0]["params"]
            param.grad = lock.fast.params[0].grad.clone()
            with kernels():
                other.step()
    lock.assert_same()
    assert all(same_bits(original, other) for other in copies)


def test_two_runs_give_the_same_bits():
    runs = [Lock(KNOWN["AdamW-fused"], [(1030,)]) for _ in range(2)]
    for lock in runs:
        lock.run(STEPS if ON_GPU else 6)
    assert same_bits(*(lock.fast.optimizer for lock in runs))


# -- Tensors ---------------------------------------------------------------------------------


def odd_tensors() -> list[Tensor]:
    """One that is not aligned, one in channels_last, one transposed."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 2, 2, device=DEVICE)
    return [
        torch.randn(38, device=DEVICE)[1:],
        images.to(memory_format=torch.channels_last),
        torch.randn(5, 3, device=DEVICE).t(),
    ]


@pytest.mark.parametrize("base", ["AdamW-fused", "RMSprop"])
def test_tensors_that_lie_oddly_in_memory(base):
    lock = Lock(BASES[base], params=odd_tensors())
    unaligned, images, transposed = lock.fast.params
    assert unaligned.data_ptr() % 16
    assert not images.is_contiguous()
    assert not transposed.is_contiguous()
    lock.run()
    lock.assert_same()
    assert lock.fast.ran_kernels(known=base in KNOWN)


# On a GPU torch's fused AdamW refuses such gradients.
@pytest.mark.parametrize("base", ["AdamW" if ON_GPU else "AdamW-fused", "RMSprop"])
def test_gradients_that_lie_otherwise_than_their_parameters(base):
    lock = Lock(BASES[base], [(3, 5)])
    ran = []
    for step in range(STEPS):
        lock.give(lock.gradients())
        for side in lock.sides:
            grad = side.params[0].grad
            odd = [grad, copied(grad, shift=1), grad.t().contiguous().t()][step % 3]
            assert torch.equal(odd, grad)
            side.params[0].grad = odd
            side.step()
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
        ran.append(lock.fast.ran_kernels(known=base in KNOWN))
    lock.assert_same()
    assert ran == [step > 0 and step % 3 != 2 for step in range(STEPS)]


@pytest.mark.parametrize("base", ["AdamW", "RMSprop"])
def test_parameters_that_come_and_go(base):
    lock = Lock(BASES[base], [(7,), (3, 5), (4,), (2, 2)])
    late = {side: side.params[3] for side in lock.sides}
    for side in lock.sides:
        side.optimizer.param_groups[0]["params"].pop()
    for step in range(STEPS):
        if step == 12:
            for side, param in late.items():
                side.optimizer.add_param_group({"params": [param], "lr": 0.5})
        gradients: list[Any] = lock.gradients()
        if step % 4 == 1:
            gradients[0] = None  # without a gradient in some steps
        if step < 6:
            gradients[2] = None  # first used later
        lock.step(gradients)
        assert lock.fast.ran_kernels(known=base in KNOWN) == (step not in (0, 6, 12))
    lock.assert_same(factor=5)  # its ramp begins anew twice


@pytest.mark.parametrize("base", ["AdamW-fused", "RMSprop"])
def test_tensors_that_are_replaced_or_changed_between_steps(base):
    lock = Lock(BASES[base], ONE)
    old: list[Any] = []
    for step in range(STEPS):
        for side in lock.sides:
            (param,) = side.params
            state = side.optimizer.state[param]
            old.append([param.data, dict(state)])  # what still writes there does no harm
            if step % 6 == 1:
                state[DISPLACEMENT] = state[DISPLACEMENT].clone()
            elif step % 6 == 2:
                state.update({k: v.clone() for k, v in state.items() if k != DISPLACEMENT})
            elif step % 6 == 3:
                side.optimizer.state[param] = {k: v.clone() for k, v in state.items()}
            elif step % 6 == 4:  # the model is moved
                param.data = param.data.clone()
            elif step % 6 == 5:
                param.data.mul_(0.999)
                state["step"] += 1
        lock.step()
        assert lock.fast.ran_kernels(known=base in KNOWN) == (step != 0)
    lock.assert_same()


class Rebinding(Optimizer):
    """A base that does not write to its parameters, but puts other tensors in their place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.before: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.before.append(param.data)  # kept: what still writes there does no harm
                    param.data = param.data - group["lr"] * param.grad


def test_a_base_that_puts_other_tensors_in_place_of_its_parameters():
    lock = Lock(lambda p: Rebinding(p, lr=1.0), ONE)
    lock.run()
    lock.assert_same()


def test_a_step_without_any_gradient_changes_nothing():
    lock = Lock(KNOWN["AdamW-fused"], ONE)
    lock.run(3)
    before = bits(lock.fast.optimizer)
    lock.step([None])
    assert all(torch.equal(a, b) for a, b in zip(before, bits(lock.fast.optimizer), strict=True))


# -- Low precision -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "dtype", "tolerance"),
    [
        # A base that runs by itself rounds its update to the parameter's dtype; kernels do not.
        ("AdamW-fused", torch.bfloat16, 0.02),
        ("SGD-momentum", torch.float16, 0.002),
        ("RMSprop", torch.bfloat16, 1e-4),
    ],
)
def test_narrow_parameters(base, dtype, tolerance):
    lock = Lock(BASES[base], [(1000,)], dtype=dtype)
    lock.run(min(STEPS, 40))
    assert lock.fast.ran_kernels(known=base in KNOWN)
    assert_same_roughly(lock, tolerance)
    assert lock.fast.displacements[0].dtype == torch.float32
    if base in ANY:  # what the base proposes is the same, and so is what it is rounded to
        assert (lock.fast.params[0] == lock.plain.params[0]).float().mean() > 0.99


def test_parameters_of_several_dtypes():
    torch.manual_seed(0)
    single, bfloat, half = (torch.randn(n, device=DEVICE) for n in (7, 300, 200))
    lock = Lock(KNOWN["AdamW-fused"], params=[single, bfloat.bfloat16(), half.half()])
    lock.run(min(STEPS, 40))
    assert lock.fast.ran_kernels(known=True)
    assert_same_roughly(lock, 0.02)


def test_displacements_in_bfloat16():
    lock = Lock(KNOWN["AdamW-fused"], [(1000,)], displacement="bfloat16")
    lock.run(min(STEPS, 40))
    assert lock.fast.ran_kernels(known=True)
    assert_same_roughly(lock, 1e-3)
    (one,), (two,) = (side.displacements for side in lock.sides)
    assert two.dtype == torch.bfloat16
    assert (one == two).float().mean() > 0.95  # rounded at the same thresholds


def assert_same_roughly(lock: Lock, tolerance: float) -> None:
    """The scales are near one another, and the tensors to the last digits of bfloat16."""
    scales = [float(side.mechanism.scale) for side in lock.sides]
    assert scales[0] > 20 * lock.first_scale
    assert scales[1] == approx(scales[0], tolerance)
    for p, q in zip(lock.plain.params, lock.fast.params, strict=True):
        assert_near(p.detach(), q.detach(), 0.02, "a parameter")
        states = lock.plain.optimizer.state[p], lock.fast.optimizer.state[q]
        for key, value in states[0].items():
            # To bfloat16 the interpreter truncates, where a GPU and torch round to nearest.
            truncated = value.dtype == torch.bfloat16 and key != DISPLACEMENT and not ON_GPU
            assert_near(value, states[1][key], 0.05 if truncated else 0.02, key)


# -- NaN, inf, scalers and clipping --------------------------------------------------------------


@pytest.mark.parametrize("base", ["AdamW", "AdamW-fused", "RMSprop", "Adagrad-fused"])
def test_a_step_that_is_not_finite_is_skipped_as_a_whole(base):
    lock = Lock(BASES[base], ONE)
    bad = {1: float("nan"), 9: float("inf"), 10: -float("inf")}
    for step in range(STEPS):
        gradients = lock.gradients()
        if step in bad:
            gradients[0][2, 3] = bad[step]
        before = bits(lock.fast.optimizer)
        lock.step(gradients)
        after = bits(lock.fast.optimizer)
        is_same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert is_same == (step in bad)
        assert lock.fast.ran_kernels(known=base in KNOWN) == (step != 0)
    assert int(lock.fast.mechanism.skipped) == 3
    lock.assert_same()


def test_many_skipped_steps_warn():
    lock = Lock(KNOWN["AdamW-fused"], ONE)
    lock.run(2)
    lock.fast.params[0].grad.fill_(float("nan"))

    def skip(times: int) -> None:
        for _ in range(times):
            lock.fast.step()
            if ON_GPU:
                torch.cuda.synchronize()

    skip(8)
    with pytest.warns(RuntimeWarning, match="the last 1[0-9] steps were skipped"):
        skip(4)


@pytest.mark.parametrize("base", ["AdamW", "RMSprop"])
def test_what_is_not_finite_is_let_through_on_request(base):
    lock = Lock(BASES[base], FEW, skip_nonfinite=False)
    lock.run(2)
    gradients = lock.gradients()
    gradients[1][2, 3] = float("nan")
    lock.step(gradients)
    assert lock.fast.ran_kernels(known=base in KNOWN)
    for side in lock.sides:
        assert int(side.mechanism.steps) == 3
        assert int(side.mechanism.skipped) == 0
        assert side.params[1].isnan().any()


def test_a_scaler_that_a_fused_base_unscales_for():
    # Without a check of its own, the scaler's word is enough.
    lock = Lock(KNOWN["AdamW-fused"], ONE, skip_nonfinite=False, s_decay=0.1)
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=4) for _ in range(2)]
    for step in range(STEPS):
        gradients = lock.gradients()
        if step in (1, 8):
            gradients[0][1, 1] = float("inf")
        for side, scaler in zip(lock.sides, scalers, strict=True):
            scaler.scale(torch.ones((), device=DEVICE))  # as of a loss
            side.params[0].grad = gradients[0] * scaler.get_scale()
            with kernels(side.uses_kernels):
                scaler.step(side.optimizer)
            scaler.update()
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
    assert scalers[0].get_scale() == scalers[1].get_scale() != 1024.0
    assert int(lock.fast.mechanism.skipped) == 2
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


@pytest.mark.parametrize("base", ["AdamW-fused", "RMSprop"])
def test_clipping_in_the_step_is_as_clipping_before_it(base):
    lock = Lock(BASES[base], FEW, max_grad_norm=2.0)
    by_hand = Side(
        BASES[base], [Parameter(p.detach().clone()) for p in lock.plain.params], False, {}
    )
    clipped = []
    for step in range(STEPS):
        gradients = [gradient / (1 + step) for gradient in lock.gradients()]
        for param, gradient in zip(by_hand.params, gradients, strict=True):
            param.grad = gradient.clone()
        clipped.append(bool(clip_grad_norm_(by_hand.params, 2.0) > 2.0))
        by_hand.step()
        lock.step(gradients)
    assert True in clipped
    assert False in clipped
    lock.assert_same()
    lock.plain = by_hand
    lock.assert_same()


# -- Sums as gradients arrive --------------------------------------------------------------------

Event = Callable[[Any, list[Parameter], int, list[Any]], Any]
"""What happens to an optimizer and its parameters between backward and step; gives what to call for
the step, if it is not the optimizer's. What it replaces it puts into a list: whoever still writes
there does no harm."""


def run_backward(
    make: Make, arriving: bool, steps: int, event: Event | None = None, **options: Any
) -> tuple[Any, list[int]]:
    """A run with gradients from backward, in every other step accumulated. Gives the optimizer, and
    how many launches each step still took to sum up."""
    draw = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(n, generator=draw).to(DEVICE)) for n in (7, 3, 6)]
    params = params if event is use_another else params[:2]
    optimizer: Any = mechanize(make(params), sums_in_backward=arriving, **options)
    launches: list[int] = []
    old: list[Any] = []
    sum_one = launch.sum_one

    def count(plan: Any, mechanism: Any, section: Any, address: Any, *rest: Any) -> None:
        launches[-1] += address is None
        sum_one(plan, mechanism, section, address, *rest)

    with kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "sum_one", count)
        patch.setattr(plan, "_LARGE", 5)
        for step in range(steps):
            launches.append(0)
            optimizer.zero_grad(set_to_none=step % 4 < 2)
            used = params if step > 2 else params[:2]
            for _ in range(1 + step % 2):
                targets = [3 + torch.randn(p.shape, generator=draw).to(p) for p in used]
                sum((p - t).square().sum() for p, t in zip(used, targets, strict=True)).backward()
            take_step = event and event(optimizer, params, step, old)
            (take_step or optimizer.step)()
    return optimizer, launches


@pytest.mark.parametrize("base", ["AdamW-fused", "Own"])
def test_sums_in_backward_are_the_same_bit_for_bit(base):
    (one, _), (two, launches) = (
        run_backward(BASES[base], arriving, STEPS) for arriving in (False, True)
    )
    assert same_bits(one, two)
    assert float(tuner(two).scale) > 20 * 1e-4
    # as soon as there is a plan, all that is left to the step are the small ones, in one launch
    assert launches[2:] == [1] * (STEPS - 2)


def use_another(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    """Parameters that are first used later; `run_backward` does that."""


def clip(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    clip_grad_norm_(params, 0.5)


def scale_one(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    params[1].grad.mul_(0.5)


def unscale(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> Any:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.ones((), device=DEVICE))  # as of a loss
    scaler.unscale_(optimizer)
    return lambda: scaler.step(optimizer)


def scale(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> Any:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(torch.ones((), device=DEVICE))
    return lambda: scaler.step(optimizer)


def take_one_away(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    if step == 2:
        params[0].grad = None


def replace_gradient(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    """By a tensor of other values that lies at the same place, as after a way over the host."""
    gradient = params[0].grad
    edits = gradient._version
    gradient.div_(2)
    other = torch.from_dlpack(gradient)
    for _ in range(edits):
        other.mul_(1)
    assert (other.data_ptr(), other._version) == (gradient.data_ptr(), edits)
    params[0].grad = other


def change_lr(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    optimizer.param_groups[0]["lr"] = 0.0 if step == 3 else 0.9**step


def turn_round(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    optimizer.param_groups[0]["maximize"] = step == 3


def replace_state(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    for state in optimizer.state.values():
        old += state.values()
        state.update({key: value.clone() for key, value in state.items()})


def replace_states(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    for param, state in list(optimizer.state.items()):
        old.append(state)
        optimizer.state[param] = {key: value.clone() for key, value in state.items()}


def count_anew(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    for state in optimizer.state.values():
        old.append(state["step"])
        state["step"] = state["step"].clone()


def move_weights(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    for param in params:
        old.append(param.data)
        param.data = param.data.clone()


def change_weights(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.9)


def reload(optimizer: Any, params: list[Parameter], step: int, old: list[Any]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    "event",
    [
        *(
            use_another,
            clip,
            scale_one,
            unscale,
            scale,
            take_one_away,
            replace_gradient,
            change_lr,
            turn_round,
        ),
        *(replace_state, replace_states, count_anew, move_weights, change_weights, reload),
    ],
    ids=lambda event: event.__name__,
)
def test_sums_in_backward_see_what_is_changed_after_it(event):
    options = {"s_decay": 0.01 if event is change_weights else 0.0}
    (one, _), (two, _) = (
        run_backward(KNOWN["AdamW-fused"], arriving, 4, event, **options)
        for arriving in (False, True)
    )
    assert same_bits(one, two)


def test_detach_takes_the_hooks_off():
    weights = Parameter(torch.ones(9, device=DEVICE))
    optimizer = mechanize(AdamW([weights], lr=1.0), sums_in_backward=True)
    assert weights._post_accumulate_grad_hooks
    tuner(optimizer).detach()
    assert not weights._post_accumulate_grad_hooks


def test_an_optimizer_that_is_dropped_leaves_nothing_behind():
    weights = Parameter(torch.ones(9, device=DEVICE))
    optimizer: Any = mechanize(KNOWN["AdamW-fused"]([weights]), sums_in_backward=True)
    with kernels():
        for _ in range(3):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
    state = weakref.ref(optimizer.state[weights]["exp_avg"])
    del optimizer
    gc.collect()
    assert state() is None


# -- The rule ------------------------------------------------------------------------------------


@jit
def apply_rule(given, made, RULE: tl.constexpr, LANES: tl.constexpr):
    """The rule on one row of numbers: five vectors, and 16 numbers in lanes of their own."""
    lane = tl.arange(0, LANES)
    given += tl.program_id(0) * 21 * LANES
    made += tl.program_id(0) * 12 * LANES
    first, more = given + 5 * LANES, LANES
    beta, m, v, r, s, M, U, D, R, L, C, share = RULE(
        tl.load(given + lane), tl.load(given + LANES + lane), tl.load(given + 2 * LANES + lane),
        tl.load(given + 3 * LANES + lane), tl.load(given + 4 * LANES + lane),
        tl.load(first), tl.load(first + more), tl.load(first + 2 * more), tl.load(first + 3 * more),
        tl.load(first + 4 * more), tl.load(first + 5 * more), tl.load(first + 6 * more),
        tl.load(first + 7 * more), tl.load(first + 8 * more), tl.load(first + 9 * more),
        tl.load(first + 10 * more), tl.load(first + 11 * more), tl.load(first + 12 * more),
        tl.load(first + 13 * more), tl.load(first + 14 * more),
        tl.load(first + 15 * more) != 0.0, lane,
    )  # fmt: skip
    tl.store(made + lane, beta)
    tl.store(made + LANES + lane, m)
    tl.store(made + 2 * LANES + lane, v)
    tl.store(made + 3 * LANES + lane, r)
    tl.store(made + 4 * LANES + lane, s)
    tl.store(made + 5 * LANES + lane, M + 0.0 * lane)
    tl.store(made + 6 * LANES + lane, U + 0.0 * lane)
    tl.store(made + 7 * LANES + lane, D + 0.0 * lane)
    tl.store(made + 8 * LANES + lane, R + 0.0 * lane)
    tl.store(made + 9 * LANES + lane, L + 0.0 * lane)
    tl.store(made + 10 * LANES + lane, C + 0.0 * lane)
    tl.store(made + 11 * LANES + lane, share + 0.0 * lane)


RULE_OPTIONS = [
    {"preset": preset, **options}
    for preset in ("default", "paper", "mechanic-pytorch", "optax")
    for options in (
        {},
        {"s_init": "relative", "s_decay": 0.0, "betas": (0.9,)},
        {"s_init": 1e-3, "s_decay": 0.1, "betas": (1.0, 0.9, 0.0), "max_scale": 0.5},
        {"s_init": "relative", "betas": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), "max_scale": 3.0},
    )
]


STATE = len(rules.State._fields)  # in a row, the share, the sums and whether it takes part follow
ROWS = STATE + 1 + len(rules.Sums._fields) + 1


def rows_for_the_rule(n: int, count: int) -> Tensor:
    """Numbers of any size, among them zeros, and an infinite ‖u‖²; none in lanes beyond the β."""
    draw = torch.Generator().manual_seed(n)
    lanes = next_power_of_2(n)
    size = 10 ** torch.empty(count, ROWS, lanes, dtype=torch.float64).uniform_(
        -3, 3, generator=draw
    )
    values = size * (torch.rand(size.shape, generator=draw) > 0.2)
    signed = [STATE + 1, STATE + 2]  # dg and dx
    values[:, signed] *= torch.sign(torch.randn(count, 2, lanes, generator=draw))
    values[:, STATE] += 0.1  # a share is above 0
    values[::4] *= (torch.arange(ROWS) > 3)[:, None]  # before the first update there is no state
    values[1, ROWS - 2] = torch.inf
    values[:, ROWS - 1] = torch.arange(count)[:, None] % 3 > 0
    values[:, :5, n:] = 0
    return values


@pytest.mark.parametrize("options", RULE_OPTIONS, ids=str)
def test_the_rule_is_the_tuners(options):
    options = Options(**options)
    n, count = len(options.betas), 200 if ON_GPU else 6
    lanes = next_power_of_2(n)
    given = rows_for_the_rule(n, count)
    given[:, 0, :n] = torch.tensor(options.betas, dtype=torch.float64)
    for frozen in (False, True):
        made = torch.zeros(count, STATE + 1, lanes, dtype=torch.float64, device=DEVICE)
        rule = write_rule(options, frozen=frozen)
        apply_rule[(count,)](given.to(DEVICE), made, rule, lanes)
        for row, result in zip(given, made.cpu(), strict=True):
            state = rules.State(*row[:5, :n], *row[5:STATE, 0])
            share, *numbers = row[STATE : ROWS - 1, 0]
            part = row[ROWS - 1, 0] != 0
            after, kept = advance(options, state, share, rules.Sums(*numbers), part, frozen=frozen)
            for name, a, b in zip(after._fields, after, result[:STATE], strict=True):
                assert_near(a, b[:n] if a.dim() else b[0], 1e-9, name)
            assert_near(kept, result[STATE, 0], 1e-9, "share")
    assert len(INPUTS) == 21


# -- Compilation ---------------------------------------------------------------------------------


def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """And full blocks of what is aligned are read and written 16 bytes at a time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, script],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["kernel"] for row in found} == {
        *("sum_up", "weigh", "square_proposals", "tune", "update", "keep", "move")
    }
    assert all(row["cubin"] for row in found)
    # Two of them for each of the 128 threads, in each tensor of float32.
    wide = {(row["kernel"], row["case"]): (row["wide loads"], row["wide stores"]) for row in found}
    assert wide["sum_up", 0] == (4, 0)
    assert wide["update", 0] == (10, 8)
    assert wide["keep", 1] == (2, 2)
    assert wide["move", 1] == (6, 6)  # those of a group at lr 0 as well
