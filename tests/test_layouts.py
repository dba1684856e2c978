"""Parameters and gradients of every shape and layout."""

from collections.abc import Callable

import pytest
import torch
from bases import assert_moved
from cases import case
from comparing import DISPLACEMENT, assert_same, bits, skipped
from descents import STEPS, descend, each_kind, ramp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mechanic.torch import mechanize, tuner


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_dimensional_parameter_is_one_with_one_element(make, dtype):
    scalars = [nn.Parameter(torch.tensor(value, dtype=dtype)) for value in (0.5, -1.5)]
    vectors = [nn.Parameter(torch.tensor([value], dtype=dtype)) for value in (0.5, -1.5)]
    a, b = mechanize(make(scalars, lr=1.0)), mechanize(make(vectors, lr=1.0))
    descend(a, scalars)
    descend(b, vectors)
    assert_same(bits([s.reshape(1) for s in scalars]), bits(vectors))
    assert_same(bits(tuner(a).metrics()), bits(tuner(b).metrics()))
    assert_moved(a)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_parameter_changes_nothing(make, dtype):
    def run(*extra: nn.Parameter) -> tuple[Optimizer, nn.Parameter]:
        weight = nn.Parameter(ramp(4, 3).to(dtype))
        opt = mechanize(make([*extra, weight], lr=1.0))
        descend(opt, [*extra, weight])
        return opt, weight

    empties = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((0,), (3, 0), (0, 4))]
    opt, weight = run(*empties)
    alone, other = run()
    assert_same(bits(weight), bits(other))
    assert_same(bits(tuner(opt).metrics()), bits(tuner(alone).metrics()))
    assert_moved(opt)


def test_an_optimizer_of_empty_parameters_alone():
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2, 0))]
    opt = mechanize(AdamW(params, lr=1.0))
    descend(opt, params)
    assert float(tuner(opt).scale) == 0
    assert skipped(opt) == 0


PARAM_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "permuted": lambda x: x.view(2, -1, 2).permute(2, 0, 1).contiguous().permute(1, 2, 0),
}
GRAD_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "strided": lambda g: g.repeat_interleave(3, dim=-1)[..., ::3],
    "as it is": lambda g: g,
}


SIZES = [(torch.float64, (6, 4)), (torch.float64, (130, 140)), (torch.bfloat16, (6, 4))]


@pytest.mark.parametrize(
    ("layout", "grads", "dtype", "size"),
    [  # by day every two of the three together
        case(*(p, g, *own), name=f"{p}-{g}-{own[0]}-{own[1]}", by_day=(i + j + k) % 3 == 0)
        for i, p in enumerate(PARAM_LAYOUTS)
        for j, g in enumerate(GRAD_LAYOUTS)
        for k, own in enumerate(SIZES)
    ],
)
def test_layouts_of_parameters_and_gradients(layout, grads, dtype, size):
    """Of sizes on either side of where larger tensors are summed in another way."""
    laid_out = PARAM_LAYOUTS[layout](ramp(*size).to(dtype))
    param, other = nn.Parameter(laid_out), nn.Parameter(laid_out.clone().contiguous())
    strides = param.stride()
    if layout not in ("offset", "permuted") and grads == "as it is":
        assert not param.is_contiguous()
    give = GRAD_LAYOUTS[grads] if param.dim() == 2 else lambda g: g
    opt, reference = mechanize(AdamW([param], lr=1.0)), mechanize(AdamW([other], lr=1.0))
    descend(opt, [param], layout=give)
    descend(reference, [other])
    assert param.stride() == strides
    torch.testing.assert_close(param, other, rtol=1e-9 if dtype is torch.float64 else 1e-2, atol=0)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=1e-5)
    assert_moved(opt)


@each_kind
def test_expanded_gradients(make):
    def run(layout: Callable[[Tensor], Tensor]) -> tuple[Optimizer, nn.Parameter]:
        param = nn.Parameter(torch.ones(5, 7, dtype=torch.float64))
        opt = mechanize(make([param], lr=1.0))
        descend(opt, [param], layout=layout)
        return opt, param

    opt, param = run(lambda g: g[0, 0].expand(5, 7))
    reference, other = run(lambda g: g)
    torch.testing.assert_close(param, other, rtol=1e-12, atol=0)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=1e-12)
    assert_moved(opt)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_kind
def test_channels_last(make, dtype):
    images = torch.tensor(load_digits().images[:32] / 16, dtype=dtype).unsqueeze(1)
    images = torch.cat([images, images.flip(-1), images.flip(-2)], dim=1)
    labels = torch.tensor(load_digits().target[:32])

    def run(memory_format: torch.memory_format) -> tuple[Optimizer, nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            conv = nn.Conv2d(3, 8, 3)
            head = nn.Linear(8 * 36, 10)
        model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head).to(dtype)
        model.to(memory_format=memory_format)
        opt = mechanize(make(model.parameters(), lr=1.0))
        for _ in range(STEPS):
            opt.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            opt.step()
        return opt, model

    opt, model = run(torch.channels_last)
    reference, plain = run(torch.contiguous_format)
    weight = model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    stored = opt.state[weight][DISPLACEMENT]
    assert stored.is_contiguous(memory_format=torch.channels_last)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=1e-3)
    torch.testing.assert_close(weight, plain[0].weight, rtol=1e-2, atol=1e-3)
    assert_moved(opt)
