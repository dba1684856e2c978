"""`differentiable=True`: the same steps, and the gradient through them."""

import copy
from typing import Any

import pytest
import torch
from bases import (
    BY_ID,
    Base,
    assert_moved,
    by_kind,
    supporting,
)
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner


def walk(base: Base, x: Tensor, steps: int, **kwargs: Any) -> tuple[Optimizer, Tensor, list[Any]]:
    """A differentiable run from x over a fixed quadratic, the gradient part of the graph."""
    p = x.clone()
    opt = mechanize(base.factory([p], lr=1.0, differentiable=True, **kwargs))
    path = []
    for _ in range(steps):
        p.grad = slope(p)
        opt.step()
        numbers = opt._mechanic.scalars.read()
        path.append((float(numbers.scale), float(numbers.share)))
    return opt, p, path


def slope(p: Tensor) -> Tensor:
    """The gradient of a quadratic with its least value at 2, 1, 0, ..."""
    target = torch.linspace(2, -2, len(p), dtype=p.dtype)
    return torch.linspace(0.5, 2, len(p), dtype=p.dtype) * (p - target)


@pytest.mark.parametrize("base", by_kind(supporting("differentiable")))
def test_differentiable_takes_the_same_steps(base: Base) -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    recorded, p, _ = walk(base, x, 40)
    assert p.grad_fn is not None
    q = x.detach().clone().requires_grad_()
    plain = mechanize(base.factory([q], lr=1.0))
    for _ in range(40):
        q.grad = slope(q.detach())
        plain.step()
    assert_moved(plain)
    # torch counts the steps of a differentiable base in float32
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tuner(recorded).scale, tuner(plain).scale, rtol=1e-4, atol=0)
    assert not tuner(recorded).scale.requires_grad


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradient_through_a_whole_run(momentum: float) -> None:
    """Against a run by hand, the scales taken as the constants that they were."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    opt, p, path = walk(BY_ID["SGD"], x, 30, momentum=momentum)
    assert_moved(opt, 100)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (weights * p).sum().backward()
    y = x.detach().clone().requires_grad_()
    q, displacement, velocity, scale = y, torch.zeros(5), torch.zeros(5), 0.0
    shares = [1.0, *(share for _, share in path)]
    for (next_scale, share), last_share in zip(path, shares, strict=False):
        first = scale == 0  # torch detaches the first gradient in a momentum
        velocity = momentum * velocity + (slope(q).detach() if first and momentum else slope(q))
        keep = share / last_share
        q = q + (next_scale * keep - scale) * displacement - next_scale * velocity
        displacement = keep * displacement - velocity
        scale = next_scale
    (weights * q).sum().backward()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)
    assert (y.grad.abs() > 0).all()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("base", by_kind(supporting("differentiable")))
def test_the_gradient_through_a_step(base: Base) -> None:
    """Against finite differences, at a scale that is held."""
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    warm, p, _ = walk(base, x, 25)
    assert_moved(warm)
    tuner(warm).freeze()
    saved = warm.state_dict()
    for state in saved["state"].values():
        state.update({k: v.detach() for k, v in state.items() if isinstance(v, Tensor)})

    def one_step(point: Tensor, grad: Tensor) -> Tensor:
        moved = point.clone()
        opt = mechanize(base.factory([moved], lr=1.0, differentiable=True))
        opt.load_state_dict(copy.deepcopy(saved))
        assert tuner(opt).frozen
        moved.grad = grad
        opt.step()
        return moved

    point = p.detach().requires_grad_()
    grad = (slope(p.detach()) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(one_step, (point, grad))
