"""Several scales by the kernels, in lock step with the plain path."""

import pytest
import torch
from lockstep import DEVICE, FEW, KNOWN, STEPS, kernels, on_kernels
from torch.nn import Parameter

from mechanic.torch import mechanize, tuner

pytestmark = on_kernels


@pytest.mark.parametrize("base", ["AdamW", pytest.param("SGD-momentum", marks=pytest.mark.nightly)])
def test_each_scope_takes_the_kernels(base):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in FEW]
    targets = [3 * torch.randn(shape, generator=draw).to(DEVICE) for shape in FEW]
    sides = [[Parameter(one.clone().to(DEVICE)) for one in start] for _ in range(2)]
    optimizers = [mechanize(KNOWN[base](own), scope="tensor", max_grad_norm=2.0) for own in sides]
    for step in range(STEPS):
        for i, target in enumerate(targets):
            noise = torch.randn(target.shape, generator=draw).to(DEVICE)
            gradient = (sides[0][i].detach() - target + noise) * 100.0**i
            if step == 12 and i == 1:
                gradient[0, 0] = float("nan")
            for own in sides:
                own[i].grad = gradient.clone()
        for optimizer, used in zip(optimizers, (False, True), strict=True):
            with kernels(used):
                optimizer.step()
    plain, fast = map(tuner, optimizers)
    torch.testing.assert_close(fast.scale, plain.scale, rtol=1e-5, atol=0)
    for a, b in zip(*sides, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for own in fast.scopes.values():
        assert own._parts[0].mechanism.kernels.plan is not None
        assert int(own.metrics()["skipped"]) == 1
