"""Complex parameters are pairs of real ones."""

from collections.abc import Callable
from statistics import median

import pytest
import torch
from bases import BY_ID, assert_moved
from cases import case
from comparing import assert_same, bits
from descents import STEPS, descend
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import mechanize, tuner


def _complex_problem(
    make: Callable[..., Optimizer], dtype: torch.dtype, pairs: bool
) -> tuple[Optimizer, Tensor]:
    """Least squares in complex numbers, the unknowns as they are or as pairs of real ones."""
    generator = torch.Generator().manual_seed(0)
    shape, start = (12, 5), torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2)
    matrix = torch.randn(*shape, dtype=torch.complex128, generator=generator).to(dtype)
    target = torch.randn(12, dtype=torch.complex128, generator=generator).to(dtype)
    unknown = torch.view_as_complex(start).to(dtype)
    param = nn.Parameter(torch.view_as_real(unknown).clone() if pairs else unknown)
    opt = mechanize(make([param], lr=1.0))
    for _ in range(STEPS):
        opt.zero_grad()
        x = torch.view_as_complex(param) if pairs else param
        (matrix @ x - target).abs().square().sum().backward()
        opt.step()
    return opt, torch.view_as_complex(param) if pairs else param


COMPLEX = ["Adadelta", "Adagrad", "Adam", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]


@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        case(base, dtype, name=f"{base}-{dtype}", by_day=i % 2 == j or base == "AdamW")
        for i, base in enumerate([*COMPLEX, "Rprop", "SGD", "SGD-momentum"])
        for j, dtype in enumerate([torch.complex64, torch.complex128])
    ],
)
def test_complex_parameters_are_pairs_of_real_ones(base, dtype):
    make = BY_ID[base].factory
    opt, x = _complex_problem(make, dtype, pairs=False)
    reference, expected = _complex_problem(make, dtype, pairs=True)
    tolerance = 1e-9 if dtype is torch.complex128 else 1e-3
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=tolerance)
    assert_moved(opt)


def test_complex_beside_real():
    params = [nn.Parameter(torch.tensor([1 + 2j, -1j])), nn.Parameter(torch.ones(3))]
    opt = mechanize(AdamW(params, lr=1.0))
    descend(opt, params, 150)
    distances = []
    for _ in range(50):  # at a constant lr without noise, single steps go far
        descend(opt, params, 1)
        distances.append(max(float((param.detach() - 3).abs().max()) for param in params))
    assert_moved(opt)
    assert median(distances) < 0.3


def test_a_conjugate_view_as_gradient():
    """A lazy conjugate, as autograd may give one."""

    def run(give: Callable[[Tensor], Tensor]) -> tuple[Optimizer, nn.Parameter]:
        param = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j]))
        opt = mechanize(SGD([param], lr=1.0, momentum=0.9))
        descend(opt, [param], to=3 + 1j, layout=give)
        return opt, param

    opt, param = run(lambda g: g.conj().resolve_conj().conj())
    reference, other = run(lambda g: g)
    assert_same(bits(torch.view_as_real(param)), bits(torch.view_as_real(other)))
    assert_same(bits(tuner(opt).metrics()), bits(tuner(reference).metrics()))
    assert_moved(opt)


def test_a_conjugate_view_as_parameter():
    param = nn.Parameter(torch.tensor([1 - 2j, 0.5 + 1j]).conj())
    assert param.is_conj()
    other = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j]))
    opt, reference = mechanize(SGD([param], lr=1.0)), mechanize(SGD([other], lr=1.0))
    descend(opt, [param])
    descend(reference, [other])
    assert_moved(reference)
    torch.testing.assert_close(param.resolve_conj(), other)
