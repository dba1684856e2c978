"""Sparse gradients are as dense ones."""

import pytest
import torch
from bases import assert_moved
from comparing import assert_same, bits
from descents import STEPS, ramp
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from mechanic.torch import mechanize, tuner


@pytest.mark.parametrize("make", [SGD, Adagrad], ids=["SGD", "Adagrad"])
@pytest.mark.parametrize("kind", ["coalesced", "uncoalesced"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
# torch's own Adagrad makes a sparse tensor without saying whether to check it
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients_are_dense_ones(make, kind, dtype):
    if make is Adagrad and dtype is torch.bfloat16:
        pytest.skip("torch sums duplicates of a sparse Adagrad update in another order")

    def run(sparse: bool) -> tuple[Optimizer, nn.Parameter]:
        weight = nn.Parameter(ramp(8, 3).to(dtype))
        opt = mechanize(make([weight], lr=1.0))
        for step in range(STEPS):
            rows = torch.tensor([step % 8, 3, 5, 3] if kind == "uncoalesced" else [step % 3, 5])
            found = weight.detach()[rows] - 2
            grad = torch.sparse_coo_tensor(rows[None], found, (8, 3), check_invariants=True)
            if kind == "coalesced":
                grad = grad.coalesce()
            weight.grad = grad if sparse else grad.to_dense()
            opt.step()
        return opt, weight

    opt, weight = run(sparse=True)
    reference, other = run(sparse=False)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(weight, other, rtol=tolerance, atol=tolerance)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=tolerance)
    assert_moved(opt)


def test_a_sparse_gradient_without_entries_moves_nothing_by_itself():
    weight, dense = nn.Parameter(ramp(4, 2)), nn.Parameter(ramp(3))
    opt = mechanize(SGD([weight, dense], lr=1.0))
    start = bits(weight)
    for _ in range(STEPS):
        index, none = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64)
        weight.grad = torch.sparse_coo_tensor(index, none, (4, 2), check_invariants=True)
        dense.grad = dense.detach() - 3
        opt.step()
    assert_same(bits(weight), start)
    assert_moved(opt)
