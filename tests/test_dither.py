"""Rounding to 16 bits against a threshold that runs through [0, 1)."""

import functools
import math

import pytest
import torch
from comparing import assert_same, bits
from descents import NARROW
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechanic.torch.vectors import dither


@functools.cache
def _representable(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit dtype, in order, as float32."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    numbers = patterns.view(dtype).to(torch.float32)
    return numbers[numbers.isfinite()].unique()


def _neighbours(point: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest number of the dtype that is not above a point, and the smallest not below."""
    numbers = _representable(dtype)
    below = torch.searchsorted(numbers, point, right=True) - 1
    above = torch.searchsorted(numbers, point)
    return numbers[below.clamp(min=0)], numbers[above.clamp(max=len(numbers) - 1)]


@st.composite
def points(draw: st.DrawFn, dtype: torch.dtype) -> list[float]:
    """Numbers within the range of a dtype: of any size, subnormal ones, powers of two and their
    surroundings."""
    top = torch.finfo(dtype).max
    smallest = round(math.log2(torch.finfo(dtype).smallest_normal))
    digits = -round(math.log2(torch.finfo(dtype).eps))
    exponents = st.integers(smallest - digits - 2, round(math.log2(top)) - 1)
    subnormal = st.integers(smallest - digits - 2, smallest)
    mantissas = st.one_of(
        st.floats(1, 2, width=32), st.sampled_from([1.0, 1 + 2.0**-23, 2 - 2.0**-23])
    )
    number = st.one_of(
        st.floats(-top, top, width=32),
        st.builds(lambda m, e, s: s * m * 2.0**e, mantissas, exponents, st.sampled_from([-1, 1])),
        st.builds(lambda m, e, s: s * m * 2.0**e, mantissas, subnormal, st.sampled_from([-1, 1])),
    )
    return draw(st.lists(number, min_size=1, max_size=40))


steps = st.integers(0, (1 << 31) - 1)
each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
quickly = settings(max_examples=60, deadline=None, derandomize=True)


@each_narrow
def test_dither_gives_one_of_the_two_neighbours(dtype):
    @quickly
    @given(points(dtype), steps)
    def check(numbers, step):
        point = torch.tensor(numbers, dtype=torch.float32)
        lower, upper = _neighbours(point, dtype)
        rounded = dither(point.clone(), dtype, torch.tensor(step))
        assert rounded.dtype is dtype
        assert rounded.shape == point.shape
        wrong = (rounded.float() != lower) & (rounded.float() != upper)
        assert not wrong.any(), f"{point[wrong]} became {rounded[wrong]}"

    check()


@each_narrow
def test_dither_leaves_what_is_representable(dtype):
    @quickly
    @given(points(dtype), steps)
    def check(numbers, step):
        exact = torch.tensor(numbers, dtype=torch.float32).to(dtype)
        exact = torch.where(exact.isfinite(), exact, 1.0)
        rounded = dither(exact.float(), dtype, torch.tensor(step))
        wrong = rounded != exact
        assert not wrong.any(), f"{exact[wrong].float()} became {rounded[wrong].float()}"

    check()


@each_narrow
def test_dither_leaves_every_number_of_the_dtype(dtype):
    numbers = _representable(dtype)
    for step in range(20):
        rounded = dither(numbers.clone(), dtype, torch.tensor(step)).float()
        wrong = rounded != numbers
        assert not wrong.any(), f"{numbers[wrong]} became {rounded[wrong]}"


@each_narrow
@pytest.mark.parametrize("power", [-10, 0, 10])
def test_dither_leaves_the_number_below_a_power_of_two_in_a_million_places(dtype, power):
    """It has the largest whole part beside which a threshold just below 1 must not be rounded."""
    number = (2 - torch.finfo(dtype).eps) * 2.0**power
    point = torch.full((1 << 20,), number)
    assert int((dither(point, dtype, torch.tensor(1)).float() != number).sum()) == 0


@each_narrow
def test_dither_is_unbiased_over_the_steps(dtype):
    """The mean error is far below half a unit, wherever the point lies between its neighbours."""
    count = 512

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(points(dtype), st.integers(0, 1 << 30))
    def check(numbers, first):
        point = torch.tensor(numbers, dtype=torch.float32)
        lower, upper = (side.double() for side in _neighbours(point, dtype))
        total = torch.zeros(len(numbers), dtype=torch.float64)
        for step in range(first, first + count):
            total += dither(point.clone(), dtype, torch.tensor(step)).double()
        error = (total / count - point.double()).abs() / (upper - lower).clamp(min=1e-300)
        error = torch.where(upper == lower, (total / count - point.double()).abs(), error)
        assert error.max() < 0.02, f"{point[error.argmax()]}: {error.max()} of a unit"

    check()


@each_narrow
def test_dither_is_unbiased_over_the_elements(dtype):
    generator = torch.Generator().manual_seed(0)
    for step in range(10):
        value = float(torch.rand((), generator=generator) + 0.5)
        point = torch.full((64, 64), value)
        lower, upper = _neighbours(point, dtype)
        mean = dither(point.clone(), dtype, torch.tensor(step)).double().mean()
        assert abs(float(mean) - float(point[0, 0])) < 0.02 * float(upper[0, 0] - lower[0, 0])


@each_narrow
def test_dither_is_deterministic_and_differs_from_step_to_step(dtype):
    point = torch.linspace(-2, 2, 1000)
    before = torch.random.get_rng_state()
    first, again, other = (dither(point.clone(), dtype, torch.tensor(s)) for s in (5, 5, 6))
    assert_same(bits(first), bits(again))
    assert (first != other).float().mean() > 0.1
    assert torch.equal(torch.random.get_rng_state(), before)


@each_narrow
def test_steps_far_below_the_precision_add_up(dtype):
    """The point of it: a drift of 1/50 of a unit a step arrives."""
    unit = torch.finfo(dtype).eps
    value = torch.ones(64, dtype=dtype)
    for step in range(1000):
        value = dither(value.float() + unit / 50, dtype, torch.tensor(step))
    assert value.float().mean() == pytest.approx(1 + 20 * unit, abs=2 * unit)
