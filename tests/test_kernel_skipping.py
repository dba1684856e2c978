"""The kernels on NaN and inf, with scalers, and with clipping."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from cases import case
from comparing import DISPLACEMENT
from lockstep import (
    BASES,
    DEVICE,
    FEW,
    KNOWN,
    ON_GPU,
    ONE,
    STEPS,
    Lock,
    Side,
    bits,
    kernels,
    on_kernels,
)
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

pytestmark = on_kernels


@pytest.mark.parametrize(
    "base", [case("AdamW", name="AdamW", by_day=False), "AdamW-fused", "Any", "Adagrad-fused"]
)
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
        assert lock.fast.ran_kernels(known=base in KNOWN) == (base in KNOWN or step != 0)
    assert int(lock.fast.mechanism.counts.read().skipped) == 3
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


@pytest.mark.parametrize("base", ["AdamW", "Any"])
def test_what_is_not_finite_is_let_through_on_request(base):
    lock = Lock(BASES[base], FEW, skip_nonfinite=False)
    lock.run(2)
    gradients = lock.gradients()
    gradients[1][2, 3] = float("nan")
    lock.step(gradients)
    assert lock.fast.ran_kernels(known=base in KNOWN)
    for side in lock.sides:
        assert int(side.mechanism.counts.read().steps) == 3
        assert int(side.mechanism.counts.read().skipped) == 0
        assert side.params[1].isnan().any()


class Broken(SGD):
    """A base of which nothing is known. A step that finds a value here makes an update of it."""

    values: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for value in self.values:
            self.param_groups[-1]["params"][-1].data[0, 0] = value


@pytest.fixture
def values() -> Iterator[list[float]]:
    yield Broken.values
    Broken.values.clear()


@pytest.mark.parametrize(
    ("value", "steps_before"),
    [
        case(math.nan, 2, name="nan-early"),
        case(math.inf, STEPS, name="inf-late"),
        case(math.inf, 2, name="inf-early", by_day=False),
        case(math.nan, STEPS, name="nan-late", by_day=False),
    ],
)
def test_an_unknown_base_that_breaks_by_itself(value, steps_before, values):
    lock = Lock(lambda params: Broken(params, lr=1.0, momentum=0.9), FEW)
    lock.run(steps_before)
    before = [param.detach().clone() for param in lock.fast.params]
    values.append(value)
    with pytest.warns(RuntimeWarning, match="the update of Broken held NaN or inf"):
        lock.run(3)  # the plain path tells each of them
    assert lock.fast.ran_kernels(known=False)
    assert all(map(torch.equal, before, lock.fast.params))
    values.clear()
    lock.run(STEPS)
    assert int(lock.fast.mechanism.counts.read().skipped) == 3
    lock.assert_same()
    assert lock.fast.ran_kernels(known=False)


@pytest.mark.parametrize(
    "base",
    [
        case(base, name=base, by_day=base in ("AdamW", "Own"))
        for base in ("AdamW", "Lion", "SGD-momentum", "Any", "Own")
    ],
)
def test_an_infinite_weight_stays_and_the_others_train(base):
    lock = Lock(BASES[base], FEW)
    for side in lock.sides:
        side.params[1].data[0, 0] = -math.inf
    for _ in range(STEPS):
        gradients = lock.gradients()
        gradients[1][0, 0] = 0.0
        lock.step(gradients)
    assert lock.fast.ran_kernels(known=base in KNOWN)
    for side in lock.sides:
        assert side.params[1][0, 0] == -math.inf
        assert side.displacements[1][0, 0] == 0
        side.params[1].data[0, 0] = 0.0
        for name, value in side.optimizer.state[side.params[1]].items():
            if name != DISPLACEMENT and value.ndim:  # a decay of the gradient is infinite there
                value[0, 0] = 0.0
    assert int(lock.fast.mechanism.counts.read().skipped) == 0
    lock.assert_same()


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
    assert int(lock.fast.mechanism.counts.read().skipped) == 2
    lock.assert_same()
    assert lock.fast.ran_kernels(known=True)


@pytest.mark.parametrize("base", ["AdamW-fused", "Any"])
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
