"""The kernels against the plain path, in lock step. Without a GPU, Triton's interpreter runs
them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from cases import case
from lion_pytorch import Lion
from lockstep import (
    ANY,
    BASES,
    DEVICE,
    FEW,
    KNOWN,
    ON_GPU,
    ONE,
    STEPS,
    Lock,
    Side,
    kernels,
    on_kernels,
    same_bits,
)
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from mechanic.torch import tuner
from mechanic.torch.kernels import host, passes
from mechanic.torch.kernels.copies import PackedCopies

pytestmark = on_kernels


# -- The same as the plain path ----------------------------------------------------------------


# By day without two that other tests have, too
@pytest.mark.parametrize(
    "base", [case(base, name=base, by_day=base not in ("AdamW", "SGD")) for base in KNOWN]
)
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


def scales_at(base: str, factor: float) -> list[float]:
    """The scales of steps on kernels whose gradients are multiplied with a factor."""
    lock, scales = Lock(BARE[base], FEW), []
    for _ in range(STEPS):
        gradients = lock.gradients()
        lock.give(gradients)
        lock.plain.step()
        for param in lock.fast.params:
            param.grad.mul_(factor)
        lock.fast.step()
        scales.append(float(lock.fast.mechanism.scale))
    assert lock.fast.ran_kernels(known=base in KNOWN)
    assert int(lock.fast.mechanism.counts.read().skipped) == 0
    return scales


class Signs(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * param.grad.sign())


BARE = {
    "SGD": lambda p: SGD(p, lr=1.0),
    "SGD-momentum": lambda p: SGD(p, lr=1.0, momentum=0.9),
    "Lion": lambda p: Lion(p, lr=1.0),
    "Any": lambda p: Signs(p, lr=1.0),
}


@pytest.mark.parametrize(
    ("base", "power"),
    [
        case(
            base,
            power,
            name=f"{base}-2**{power}",
            by_day=(base, power) in (("SGD", -100), ("Lion", 95), ("Any", -100)),
        )
        for base in BARE
        for power in (-100, -66, -33, 50, 95)
    ],
)
def test_a_loss_of_any_size(base, power):
    """From 1e-30 to 4e28; the gradients' squares are beyond float32."""
    factor = 2.0**power
    grows = factor if base.startswith("SGD") else 1.0  # the update grows with the gradient
    expected = scales_at(base, 1.0)
    assert max(expected) > 20 * expected[0] > 0
    assert [grows * scale for scale in scales_at(base, factor)] == pytest.approx(expected, rel=1e-3)


def assert_same_course(lock: Lock) -> None:
    """The two may store what they hold at units of their own."""
    assert lock.fast.ran_kernels(known=True)
    plain, fast = (float(side.mechanism.scale) for side in lock.sides)
    assert fast == pytest.approx(plain, rel=1e-4)
    for one, two in zip(lock.plain.params, lock.fast.params, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power", [-100, -80])
def test_a_first_gradient_that_is_tiny(power):
    """The displacement is then stored beside a tiny unit, and its squares vanish in float32."""
    lock = Lock(lambda p: SGD(p, lr=1.0), FEW)
    lock.step([2.0**power * gradient for gradient in lock.gradients()])
    lock.run(STEPS)
    assert_same_course(lock)


def test_a_large_displacement_that_rests():
    """Its squares overflow in float32, although no gradient is read."""
    lock = Lock(lambda p: SGD(p, lr=1.0), FEW)
    lock.step([2.0**80 * gradient for gradient in lock.gradients()])
    for _ in range(STEPS):
        lock.step([None, 2.0**80 * lock.gradients()[1]])
    assert_same_course(lock)


def test_gradients_that_would_overflow_are_skipped():
    lock = Lock(KNOWN["SGD"], FEW)
    for factor in (3e34, 1.0, 1.0, 3e34, 1.0):
        lock.give([factor * gradient for gradient in lock.gradients()])
        lock.fast.step()
        assert all(param.isfinite().all() for param in lock.fast.params)
        assert all(displacement.isfinite().all() for displacement in lock.fast.displacements)
    counts = lock.fast.mechanism.counts.read()
    assert (int(counts.steps), int(counts.skipped)) == (3, 2)


KEPT = {
    "the parameter": lambda p: p,
    "what shares its memory": lambda p: p.detach().view(-1)[1:],
    "a graph alone": lambda p: (p * p).grad_fn,
}


@pytest.mark.parametrize("what", KEPT)
def test_a_base_may_keep_what_it_is_given(what):
    kept = []

    class Keeping(AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for param in self.param_groups[0]["params"]:
                value = KEPT[what](param)
                kept.append((value, value_of(value).clone()))
            return result

    def value_of(value: Any) -> torch.Tensor:
        return (value if isinstance(value, torch.Tensor) else value._saved_self).detach()

    lock = Lock(lambda params: Keeping(params, lr=1.0), FEW)
    lock.run()
    lock.assert_same()
    lock.assert_known(False)
    assert all(torch.equal(value_of(value), then) for value, then in kept)


def test_copies_of_a_base_that_keeps_none_are_made_once(monkeypatch):
    made, make = [], PackedCopies._make
    monkeypatch.setattr(PackedCopies, "_make", lambda *args: made.append(1) or make(*args))
    lock = Lock(ANY["Own"], FEW)
    lock.run()
    lock.assert_same()
    assert len(made) <= 3  # the first steps make the base's state, and a plan anew


@pytest.mark.parametrize(
    ("base", "shapes"),
    [
        ("AdamW-fused", [(), (0,), (7,), (1023,), (1024,), (2049,)]),
        ("Any", [(), (0,), (2049,)]),
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
    assert int(lock.fast.mechanism.counts.read().skipped) == 0
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
        is_elsewhere = property(lambda self: bool(self.steps), lambda *_: None)
        monkeypatch.setattr(host.StepCounters, "is_on_host", is_elsewhere, raising=False)
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


@pytest.mark.parametrize("base", ["AdamW", "Own"])
def test_a_displacement_that_was_wrong_is_forgotten(base):
    """The gradients are turned, so that a difference in rounding grows as the weights do."""
    lock = Lock({**KNOWN, **ANY}[base], ONE)
    for _ in range(12):
        lock.step()
    forgotten = 0
    for _ in range(30):
        lock.step([-gradient for gradient in lock.gradients()])
        numbers = lock.plain.mechanism.scalars.read()
        forgotten += float(numbers.state.top) == float(numbers.scale)
        lock.assert_same(1e-4, factor=1.0)
    assert forgotten
    lock.run(10)
    lock.assert_same(1e-4, factor=1.0)


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


def test_a_held_out_batch_is_learned_from_and_the_kernels_go_on():
    lock = Lock(KNOWN["AdamW"], ONE)
    for step in range(1, 31):
        if step % 3 == 0:
            lock.give(lock.gradients())
            for side in lock.sides:
                tuner(side.optimizer).observe()
        lock.step()
    lock.assert_same()
    assert not lock.fast.ran_kernels(known=True)  # the last step had an observation
    lock.run(2)
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


@pytest.mark.parametrize("base", ["AdamW", "Any"])
def test_paths_may_take_turns(base):
    lock = Lock(BASES[base], ONE)
    for step in range(STEPS):
        lock.fast.uses_kernels = step % 6 < 3
        lock.step()
        if lock.fast.uses_kernels and step:
            assert lock.fast.ran_kernels(known=base in KNOWN)
    lock.assert_same()


@pytest.mark.parametrize(
    ("base", "saved_by_kernels"), [("AdamW", True), ("AdamW-fused", False), ("Any", True)]
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
