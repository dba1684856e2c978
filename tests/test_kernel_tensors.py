"""The kernels on tensors that lie oddly, come and go, are replaced, or are of low precision."""

from typing import Any

import pytest
import torch
from lockstep import (
    ANY,
    BASES,
    DEVICE,
    DISPLACEMENT,
    KNOWN,
    ON_GPU,
    ONE,
    STEPS,
    Lock,
    approx,
    assert_near,
    bits,
    copied,
    on_kernels,
)
from torch import Tensor
from torch.optim import Optimizer

pytestmark = on_kernels


def odd_tensors() -> list[Tensor]:
    """One that is not aligned, one in channels_last, one transposed."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 2, 2, device=DEVICE)
    return [
        torch.randn(38, device=DEVICE)[1:],
        images.to(memory_format=torch.channels_last),
        torch.randn(5, 3, device=DEVICE).t(),
    ]


@pytest.mark.parametrize("base", ["AdamW-fused", "Any"])
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
@pytest.mark.parametrize("base", ["AdamW" if ON_GPU else "AdamW-fused", "Any"])
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
    first = base in KNOWN  # another base makes its state in the plain path
    assert ran == [(first or step > 0) and step % 3 != 2 for step in range(STEPS)]


@pytest.mark.parametrize("base", ["AdamW", "Any"])
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
        is_new = step in (0, 6, 12)
        assert lock.fast.ran_kernels(known=base in KNOWN) == (base in KNOWN or not is_new)
    lock.assert_same(factor=5)  # its ramp begins anew twice


@pytest.mark.parametrize("base", ["AdamW-fused", "Any"])
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
        assert lock.fast.ran_kernels(known=base in KNOWN) == (base in KNOWN or step != 0)
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
        ("Any", torch.bfloat16, 1e-4),
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
