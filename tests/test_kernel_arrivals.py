"""The kernels' sums over gradients as they arrive in backward."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lockstep import (
    BASES,
    DEVICE,
    KNOWN,
    STEPS,
    Make,
    kernels,
    on_kernels,
    same_bits,
)
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from mechanic.torch import mechanize, tuner
from mechanic.torch.kernels import launch, layout

pytestmark = on_kernels

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
        patch.setattr(layout, "_LARGE", 5)
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
