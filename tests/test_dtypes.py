"""Parameters of every dtype, mixed and changed on the way, and training in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bases import BASES, BY_ID, KINDS, assert_moved, make_problem, train
from cases import case
from comparing import DISPLACEMENT, assert_same, bits, skipped
from descents import FLOATS, NARROW, NEAR, SOME, STEPS, descend, each_kind, momentum_sgd, ramp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import mechanize, tuner


@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        *(
            case(b, torch.bfloat16, name=f"{b}-bfloat16", by_day=b.id in (*KINDS, "AdamW8bit"))
            for b in BASES
        ),
        *(
            case(
                *(BY_ID[name], dtype),
                name=f"{name}-{dtype}",
                by_day=name in ("AdamW", "LBFGS")
                or (dtype is torch.float16 and name != "AdamW8bit"),
            )
            for name in SOME
            for dtype in FLOATS
            if dtype != torch.bfloat16
        ),
    ],
)
def test_each_dtype_alone(base, dtype):
    problem = make_problem(base, dtype=dtype, hidden=64 if base.id == "AdamW8bit" else 8, batch=64)
    kwargs: dict[str, Any] = {}
    if base.id == "LBFGS":
        kwargs = {"line_search_fn": "strong_wolfe", "max_iter": 2}
        if dtype is torch.float16:
            pytest.skip("the plain LBFGS overflows in float16")
    elif dtype is torch.float16 and base.id in ("AdamW", "SparseAdam", "AdamW8bit"):
        kwargs = {"eps": 1e-4}  # the plain ones' 1e-8 is 0 in float16, and they divide 0 by it
    opt = mechanize(base.factory(problem.params, lr=1.0, **kwargs))
    before = problem.total()
    losses = train(opt, problem, STEPS)
    assert skipped(opt) == 0
    assert min(losses) < 0.97 * before
    assert_moved(opt)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for param in problem.params:
        assert param.dtype is dtype
        assert opt.state[param][DISPLACEMENT].dtype is wide


@pytest.mark.parametrize(
    ("base", "dtype"),
    [(base, dtype) for base in ("SGD", "SGD-momentum", "Lion") for dtype in FLOATS[1:]]
    # the plain AdamW's squares are below what float16 can hold
    + [(base, dtype) for base in ("AdamW", "NAdam") for dtype in FLOATS[1:3]],
    ids=str,
)
def test_each_dtype_finds_the_scale_that_float64_finds(base, dtype):
    def scale(dtype: torch.dtype) -> float:
        problem = make_problem(BY_ID[base], dtype=dtype, hidden=16)
        opt = mechanize(BY_ID[base].factory(problem.params, lr=1.0))
        train(opt, problem, STEPS)
        assert_moved(opt)
        return float(tuner(opt).scale)

    tolerance = 1e-3 if dtype is torch.float32 else 0.02
    assert scale(dtype) == pytest.approx(scale(torch.float64), rel=tolerance)


def _mixed() -> list[nn.Parameter]:
    return [nn.Parameter(ramp(3, 5).to(dtype)) for dtype in FLOATS]


@each_kind
def test_dtypes_mixed_in_one_group(make):
    params = _mixed()
    opt = mechanize(make(params, lr=1.0))
    descend(opt, params, NEAR)
    assert_moved(opt)
    wide = [nn.Parameter(ramp(3, 5)) for _ in FLOATS]
    reference = mechanize(make(wide, lr=1.0))
    descend(reference, wide, NEAR)
    assert float(tuner(opt).scale) == pytest.approx(float(tuner(reference).scale), rel=0.02)
    for param, other in zip(params, wide, strict=True):
        assert param.dtype in FLOATS
        torch.testing.assert_close(param.double(), other, rtol=0.02, atol=0.02)


@each_kind
def test_dtypes_mixed_in_one_optimizer(make):
    """One group for all dtypes and one for each find the same, but for rounding: a group with
    float16 in it is run at a smaller rate."""
    params, others = _mixed(), _mixed()
    one = mechanize(make(params, lr=1.0))
    many = mechanize(make([{"params": [param]} for param in others], lr=1.0))
    descend(one, params, NEAR)
    descend(many, others, NEAR)
    assert_moved(one)
    assert float(tuner(one).scale) == pytest.approx(float(tuner(many).scale), rel=0.01)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=0.02, atol=0.02)


# models that are moved after mechanize


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW], ids=str)
@each_kind
def test_a_model_that_changes_dtype_before_the_first_step(make, dtype):
    kwargs = {"eps": 1e-4} if make is AdamW else {}

    def run(early: bool) -> tuple[Optimizer, list[nn.Parameter]]:
        problem = make_problem(hidden=8)
        opt = make(problem.params, lr=1.0, **kwargs)
        if early:
            mechanize(opt)
        problem.model.to(dtype)
        if not early:
            mechanize(opt)
        problem.images = problem.images.to(dtype)
        train(opt, problem, STEPS)
        return opt, problem.params

    opt, params = run(early=True)
    reference, others = run(early=False)
    assert params[0].dtype is dtype
    assert_same(bits(params), bits(others))
    assert_same(bits(tuner(opt).metrics()), bits(tuner(reference).metrics()))
    assert_moved(opt)


@pytest.mark.parametrize("first", FLOATS, ids=str)
@pytest.mark.parametrize("second", FLOATS, ids=str)
def test_a_model_that_changes_dtype_in_the_middle(first, second):
    """With SGD, which has no state of its own that could not follow."""
    problem = make_problem(hidden=8, dtype=first)
    late = problem.params[-1].requires_grad_(False)  # a new parameter beside those with state
    opt = mechanize(SGD(problem.params, lr=1.0))
    train(opt, problem, 20)
    middle = problem.total()
    problem.model.to(second)
    problem.images = problem.images.to(second)
    late.requires_grad_(True)
    train(opt, problem, 10, start=20)
    assert skipped(opt) == 0
    assert all(param.dtype is second for param in problem.params)
    assert problem.total() < middle
    # What rounding comes to in 30 steps: 2e-6 in float32, 0.3 % in float16, 5 % in bfloat16.
    rounding = {torch.float64: 0.0, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.1}
    rel = max(1e-9, rounding[first], rounding[second])
    assert float(tuner(opt).scale) == pytest.approx(_scale_in_float64(), rel=rel)
    assert_moved(opt)


@functools.cache
def _scale_in_float64() -> float:
    """Of the same run, all of it in float64."""
    problem = make_problem(hidden=8, dtype=torch.float64)
    late = problem.params[-1].requires_grad_(False)
    opt = mechanize(SGD(problem.params, lr=1.0))
    train(opt, problem, 20)
    late.requires_grad_(True)
    train(opt, problem, 10, start=20)
    return float(tuner(opt).scale)


# bfloat16 trains as well as float32


@functools.cache
def _noisy_digits() -> tuple[Tensor, Tensor]:
    """With 3 of 10 labels drawn anew, so that the loss ends far from 0, where 2% mean something."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 10, labels.shape, generator=generator)
    keep = torch.rand(labels.shape, generator=generator) > 0.3
    return torch.tensor(images / 16).float(), torch.where(keep, torch.tensor(labels), drawn)


def _losses(
    make: Callable[..., Optimizer], dtype: torch.dtype, lr: float, **options: Any
) -> tuple[float, float]:
    """The loss over all digits before and after 100 steps of logistic regression, as the mean of
    two runs."""
    all_images, labels = _noisy_digits()
    images = all_images.to(dtype)
    before, after = 0.0, 0.0
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(64, 10)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 8)
        model.to(dtype)
        opt = mechanize(make(model.parameters(), lr=lr), **options)
        with torch.no_grad():
            before += float(nn.functional.cross_entropy(model(images).float(), labels)) / 2
        for _ in range(100):
            chosen = torch.randint(0, len(labels), (64,), generator=generator)
            opt.zero_grad()
            logits = model(images[chosen]).float()
            nn.functional.cross_entropy(logits, labels[chosen]).backward()
            opt.step()
        assert float(tuner(opt).scale) > 0
        with torch.no_grad():
            after += float(nn.functional.cross_entropy(model(images).float(), labels)) / 2
    return before, after


@pytest.mark.parametrize(
    ("make", "lr"),
    [
        case(make, lr, name=f"{name}-{lr}", by_day=i == j)
        for i, (name, make) in enumerate([("AdamW", AdamW), ("momentum", momentum_sgd)])
        for j, lr in enumerate([1.0, 1e-3])
    ],
)
def test_bfloat16_trains_as_well_as_float32(make, lr):
    _, wide = _losses(make, torch.float32, lr)
    _, narrow = _losses(make, torch.bfloat16, lr)
    assert wide < 1.5  # of 2.4 at the start
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize(
    ("make", "lr", "rate"),
    [(AdamW, 1.0, 1e-4), (momentum_sgd, 1e-3, 1e-3)],
    ids=["AdamW", "momentum"],
)
def test_bfloat16_trains_as_well_as_float32_in_steps_below_its_precision(make, lr, rate):
    """With the cap at a small learning rate, most steps are less than half a unit in the last
    place of a weight: rounded to the nearest, they would be lost."""
    start, wide = _losses(make, torch.float32, lr, max_scale=rate / lr)
    narrow_start, narrow = _losses(make, torch.bfloat16, lr, max_scale=rate / lr)
    assert start - wide > 0.02
    assert narrow == pytest.approx(wide, rel=0.02)
    assert narrow_start - narrow == pytest.approx(start - wide, rel=0.1)
