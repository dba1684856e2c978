"""The first step of a parameter with the kernels: they make the state that its base would make."""

from typing import Any

import pytest
import torch
from lockstep import DEVICE, FEW, KNOWN, ONE, STEPS, Lock, Side, kernels, on_kernels
from torch.nn import Parameter

from mechanic.torch import mechanize
from mechanic.torch.kernels import plan

pytestmark = on_kernels

DAMPED = "SGD-momentum"  # its buffer begins with a gradient that is not damped


@pytest.mark.nightly
@pytest.mark.parametrize("base", KNOWN)
def test_the_first_step_is_the_same_as_the_plain_path(base):
    ascent = base == "Adam-maximize"
    lock = Lock(KNOWN[base], FEW, ascent=ascent)
    lock.step()
    assert lock.fast.ran_kernels(known=True) == (base != DAMPED)
    numbers = [side.mechanism.scalars.read() for side in lock.sides]
    assert float(numbers[1].reference_square) == pytest.approx(float(numbers[0].reference_square))
    assert float(numbers[1].size) == float(numbers[0].size) == 22
    lock.run(STEPS)
    assert lock.fast.ran_kernels(known=True)
    lock.assert_same()


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["AdamW", "AdamW-fused"])
def test_a_first_step_that_is_not_finite_leaves_what_is_new_new_or_counted(base):
    """Where the host decides, the plain path keeps nothing of it, and measures the next step."""
    lock = Lock(KNOWN[base], ONE)
    bad = lock.gradients()
    bad[0][1, 2] = float("nan")
    before = lock.fast.params[0].detach().clone()
    lock.step(bad)
    assert torch.equal(lock.fast.params[0], before)
    lock.run(STEPS + 4)
    lock.assert_same()
    sizes = [float(side.mechanism.scalars.read().size) for side in lock.sides]
    assert sizes == [15, 15]


@pytest.mark.parametrize("had", [{}, {"mine": 1}])
def test_a_step_that_cannot_be_made_leaves_the_state_as_it_was(monkeypatch, had):
    param = Parameter(torch.ones(3, device=DEVICE))
    optimizer: Any = mechanize(torch.optim.SGD([param], lr=1.0))
    if had:
        optimizer.state[param].update(had)
    param.grad = torch.ones_like(param)

    def run_out(*_: Any, **__: Any) -> None:
        assert optimizer.state[param]  # it is made by now
        raise torch.OutOfMemoryError("no memory for a plan")

    with monkeypatch.context() as patch, kernels():
        patch.setattr(plan, "make", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert dict(optimizer.state) == ({param: had} if had else {})


def test_what_the_kernels_cannot_take_is_left_to_the_base():
    """The state that was made for it is taken back."""
    param = Parameter(torch.ones(3, 5, device=DEVICE))
    side = Side(KNOWN["AdamW"], [param], True, {})
    param.grad = torch.ones(5, 3, device=DEVICE).t()  # it does not lie as the parameter does
    side.step()
    assert not side.ran_kernels(known=True)
    assert float(side.optimizer.state[param]["step"]) == 1
    assert float(side.mechanism.scalars.read().size) == 15


def test_a_base_that_has_run_before_keeps_its_state():
    """Only the displacement is made for a parameter that the base knows already."""
    params = [Parameter(torch.ones(5, device=DEVICE))]
    base = torch.optim.AdamW(params, lr=0.1)
    for _ in range(3):
        params[0].grad = params[0].detach() - 3
        base.step()
    first = base.state[params[0]]["exp_avg"].clone()
    optimizer: Any = mechanize(base)
    params[0].grad = torch.zeros_like(params[0])
    with kernels():
        optimizer.step()
    state = optimizer.state[params[0]]
    assert float(state["step"]) == 4
    torch.testing.assert_close(state["exp_avg"], 0.9 * first)
