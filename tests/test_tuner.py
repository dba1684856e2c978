"""`mechanic.tuner` and `mechanic.options` on their own."""

import math
import subprocess
import sys

import jax
import numpy as np
import pytest
import reference
import torch
from cases import case
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from mechanic import provable, tuner
from mechanic.options import Options

torch.set_num_threads(1)

PRESETS = ("default", "paper", "mechanic-pytorch", "optax")
light = settings(max_examples=30, deadline=None)


# Sequences of what steps measure


def sums_of(h, *, gradient=1.0, update=1.0, cosine=0.5, d=10):
    """What one step measures, where only h is of interest: g and u by their norms, and Δ by the
    size of its cosine with g."""
    return tuner.Sums(
        dg=np.float64(h),
        dx=np.float64(0.3),
        gg=np.float64(gradient**2),
        xx=np.float64(4.0),
        x1=np.float64(4.0),
        d=np.float64(d),
        dd=np.float64((h / gradient / cosine) ** 2),
        uu=np.float64(update**2),
    )


def run(options, steps):
    """The states after each of the steps, and the parts of Δ that are retained."""
    state = tuner.init(options, np.array(options.betas))
    states, keeps = [], []
    for sums in steps:
        state, keep = tuner.update(options, state, sums)
        states.append(state)
        keeps.append(float(keep))
    return states, np.array(keeps)


def sizes(options, steps):
    """The scale S after each of the steps."""
    return np.array([state.s.sum() for state in run(options, steps)[0]])


def training(steps=60, seed=0):
    """The sums of a run like real ones: h falls and then is of either sign, with an outlier and a
    step where nothing is measured."""
    draw = np.random.default_rng(seed)
    h = np.concatenate([[0], -draw.exponential(size=steps // 2), draw.normal(size=steps // 2)])
    h[steps // 3], h[steps // 2] = 40, 0
    u = draw.exponential(size=len(h)) + 0.1
    cosines = draw.uniform(0.01, 0.9, size=len(h))
    return [
        sums_of(a, gradient=b, update=c, cosine=d)
        for a, b, c, d in zip(h, 1 + draw.exponential(size=len(h)), u, cosines, strict=True)
    ]


def powers(low, high):
    """Numbers of either sign, from 10^low to 10^high in size."""
    return st.builds(
        lambda sign, exponent: sign * 10.0**exponent,
        st.sampled_from([-1, 1]),
        st.floats(low, high),
    )


# Up to where h² neither overflows nor vanishes, with room for a factor of 1e±12.
sequences = st.lists(
    st.one_of(st.just(0.0), st.floats(0.01, 1).map(lambda h: -h), powers(-1, 1), powers(-90, 90)),
    min_size=20,
    max_size=60,
)
wild = st.lists(st.one_of(st.just(0.0), st.floats(-1e150, 1e150)), min_size=20, max_size=60)
VARIANTS = [
    {"preset": preset, **extra}
    for preset in PRESETS
    for extra in ({}, {"s_init": "relative"}, {"s_init": 1e-3, "max_scale": 5e-3})
]


# The same in every library


def torch_tuner(options, steps):
    state, states, keeps = (
        tuner.init(options, torch.tensor(options.betas, dtype=torch.float64)),
        [],
        [],
    )
    for sums in steps:
        tensors = tuner.Sums(*(torch.tensor(value) for value in sums))
        state, keep = tuner.update(options, state, tensors)
        states.append(state)
        keeps.append(float(keep))
    return states, keeps


def jax_tuner(options, steps):
    with jax.enable_x64(True):
        update = jax.jit(lambda state, sums: tuner.update(options, state, sums))
        state, states, keeps = tuner.init(options, jax.numpy.asarray(options.betas)), [], []
        for sums in steps:
            state, keep = update(state, tuner.Sums(*map(jax.numpy.asarray, sums)))
            states.append(state)
            keeps.append(float(keep))
    return states, keeps


@pytest.mark.parametrize(
    ("variant", "library"),
    [
        *(case(own, torch_tuner, name=f"{own}-torch_tuner") for own in VARIANTS),
        *(  # which compiles each: by day one of every preset
            case(own, jax_tuner, name=f"{own}-jax_tuner", by_day=i % 3 == i // 3 % 3)
            for i, own in enumerate(VARIANTS)
        ),
    ],
)
def test_libraries_agree(variant, library):
    options, steps = Options(**variant), training()
    expected, expected_keeps = run(options, steps)
    states, keeps = library(options, steps)
    S = np.array([state.s.sum() for state in expected])
    assert S.max() > 1.9 * S[S > 0].min()
    np.testing.assert_allclose(keeps, expected_keeps, rtol=1e-12)
    for state, wanted in zip(states, expected, strict=True):
        for name, value in state._asdict().items():
            np.testing.assert_allclose(
                np.asarray(value), getattr(wanted, name), rtol=1e-12, atol=0, err_msg=name
            )


@light
@given(hs=st.one_of(sequences, wild), variant=st.sampled_from(VARIANTS))
@example(hs=[0.0] * 20, variant={"preset": "default"})
@example(hs=[1e150, -1e150] * 10, variant={"preset": "optax"})
def test_floats_agree_bit_for_bit(hs, variant):
    """A tuner with one β may be computed with Python's own numbers."""
    options = Options(**variant, betas=(0.99,))
    steps = [sums_of(h) for h in hs]
    with np.errstate(over="ignore"):
        expected, expected_keeps = run(options, steps)
    state = tuner.init(options, options.betas[0])
    for sums, wanted, keep in zip(steps, expected, expected_keeps, strict=True):
        state, own = tuner.update(options, state, tuner.Sums(*map(float, sums)))
        np.testing.assert_array_equal(list(state), [float(value.sum()) for value in wanted])
        assert own == keep
        assert all(type(value) is float for value in (*state, own))


@pytest.mark.parametrize("preset", PRESETS)
def test_several_at_once(preset):
    """vmap over independent tuners, in torch and in JAX."""
    options, seeds = Options(preset=preset, s_init="relative", max_scale=0.1), range(3)
    runs = [training(30, seed) for seed in seeds]
    expected = [run(options, steps)[0][-1].s.sum() for steps in runs]
    stacked = [
        tuner.Sums(*(np.stack(parts) for parts in zip(*step, strict=True)))
        for step in zip(*runs, strict=True)
    ]
    init, batch = tuner.init(options, torch.tensor(options.betas, dtype=torch.float64)), len(seeds)
    state = type(init)(*(torch.stack([value] * batch) for value in init))
    for step in stacked:
        sums = tuner.Sums(*map(torch.tensor, step))
        state, _ = torch.vmap(lambda a, b: tuner.update(options, a, b))(state, sums)
    np.testing.assert_allclose(state.s.sum(1), expected, rtol=1e-12)
    with jax.enable_x64(True):
        update = jax.jit(jax.vmap(lambda a, b: tuner.update(options, a, b)))
        init = tuner.init(options, jax.numpy.asarray(options.betas))
        state = type(init)(*(jax.numpy.stack([value] * batch) for value in init))
        for step in stacked:
            state, _ = update(state, step)
        np.testing.assert_allclose(state.s.sum(1), expected, rtol=1e-12)


# Properties of Algorithm 1 and of the default rule


@light
@given(hs=st.one_of(sequences, wild), variant=st.sampled_from(VARIANTS))
@example(hs=[0.0] * 20, variant={"preset": "default"})
@example(hs=[1e90, -1e-90] * 10, variant={"preset": "paper"})
def test_scales_are_finite_and_not_negative(hs, variant):
    states, keeps = run(Options(**variant), map(sums_of, hs))
    for state in states:
        assert np.isfinite(state.s).all()
        assert (state.s >= 0).all()
        assert all(np.isfinite(value).all() for value in state)
    assert (np.isfinite(keeps) & (keeps >= 0)).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_scales_grow_while_the_loss_falls(variant):
    S = sizes(Options(**variant), map(sums_of, [0.0] + [-1.0] * 30))
    cap = variant.get("max_scale", math.inf)
    assert S[-1] == pytest.approx(cap) if cap < math.inf else S[-1] > 100 * S[1]


@light
@given(
    hs=sequences,
    exponent=st.floats(-12, 12),
    preset=st.sampled_from(["default", "paper"]),
    s_init=st.sampled_from([None, "relative", 1e-3]),
)
def test_scale_of_the_loss(hs, exponent, preset, s_init):
    options, c = Options(preset=preset, s_init=s_init), 10.0**exponent
    hs = [0.0, -1.0, -1.0, *hs]
    expected = sizes(options, [sums_of(h) for h in hs])
    got = sizes(options, [sums_of(c * h, gradient=c) for h in hs])
    assert expected[2] != expected[1]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("preset", ["mechanic-pytorch", "optax"])
def test_the_published_codes_depend_on_the_scale_of_the_loss(preset):
    # So that the test above is seen to be able to fail: these have an ε.
    options, hs = Options(preset=preset), [0.0] + [-1.0] * 30
    expected = sizes(options, [sums_of(h) for h in hs])
    got = sizes(options, [sums_of(1e-9 * h, gradient=1e-9) for h in hs])
    assert abs(got[-1] / expected[-1] - 1) > 0.5


@light
@given(hs=sequences, exponent=st.integers(-40, 40))
def test_scale_of_the_updates(hs, exponent):
    """The relative start: where u grows by c, and h with it, S falls by c. By a power of two, since
    nothing is rounded then, however much of ‖Δ‖ − ‖q·Δ‖ cancels."""
    options, c = Options(), 2.0**exponent
    hs = [0.0, -1.0, -1.0, *hs]
    expected = sizes(options, [sums_of(h) for h in hs])
    got = sizes(options, [sums_of(c * h, update=c) for h in hs])
    assert expected[2] != expected[1]
    np.testing.assert_array_equal(c * got, expected)


@light
@given(
    hs=sequences,
    beta=st.sampled_from([0.5, 0.9, 0.999999, 1.0]),
    n=st.integers(2, 7),
    preset=st.sampled_from(["default", "paper", "mechanic-pytorch"]),
)
def test_tuners_of_one_beta_are_one_tuner(hs, beta, n, preset):
    hs = [0.0, -1.0, -1.0, *hs]
    one, many = (
        sizes(Options(preset=preset, betas=betas), map(sums_of, hs))
        for betas in ((beta,), (beta,) * n)
    )
    assert one[2] != one[1]
    np.testing.assert_allclose(many, one, rtol=1e-9, atol=0)


@light
@given(
    hs=sequences,
    idle=st.integers(0, 5),
    s_init=st.floats(1e-12, 10),
    betas=st.lists(st.floats(0, 1), min_size=1, max_size=7),
)
def test_the_first_scale_of_the_paper_is_s_init(hs, idle, s_init, betas):
    options = Options(preset="paper", s_init=s_init, betas=tuple(betas))
    assume(hs[0] != 0)
    S = sizes(options, map(sums_of, [0.0] * idle + hs))
    assert (S[:idle] == 0).all()
    assert S[idle] == pytest.approx(s_init, rel=1e-12)


@light
@given(hs=sequences, preset=st.sampled_from(PRESETS), exponent=st.floats(-12, 1))
def test_a_cap_is_never_exceeded(hs, preset, exponent):
    cap = 10.0**exponent
    options = Options(preset=preset, s_init=cap / 20, max_scale=cap)
    S = sizes(options, map(sums_of, [0.0] + [-1.0] * 20 + hs))
    assert S.max() == pytest.approx(cap, rel=1e-12)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "default"])
def test_the_size_of_h_is_in_m(preset):
    # With h itself in line 11, m would stay 0 as long as the loss falls, and s with it.
    options = Options(preset=preset, s_decay=0.0, s_init=1e-3)
    states, _ = run(options, map(sums_of, [0.0] + [-2.0] * 30))
    np.testing.assert_allclose(states[-1].m, 2, rtol=0.01)
    assert states[-1].s.sum() > 10 * states[1].s.sum()


# The parts of the default rule


def fixed(h, cosine=0.5, slope=None, **more):
    """A step whose Δ is no longer than the one before it, so that no update grows: of length 1,
    unless the slope along it is given."""
    length = 1.0 if slope is None else abs(h) / slope
    return sums_of(h, cosine=cosine, **more)._replace(
        dd=np.float64(length**2), gg=np.float64((h / length / cosine) ** 2)
    )


def speed(hesitation):
    """How fast the scale moves after the ramp"""
    return 2 / (2 + hesitation)


RAMP = [fixed(-1.0)] * 8


@pytest.mark.parametrize("cosine", [1.0, 0.5, 1e-3])
def test_the_ramp_is_the_faster_the_better_the_direction_is_known(cosine):
    S = sizes(Options(), [fixed(-1.0, cosine)] * 20)
    np.testing.assert_allclose(S[1:] / S[:-1], 1.5 + cosine / 2, rtol=1e-12)


@pytest.mark.parametrize("cosine", [0.5, 0.2, 0.01])
def test_a_smaller_cosine_than_before_raises_it_less(cosine):
    S = sizes(Options(betas=(1.0,)), [*RAMP, fixed(-1.0, cosine)])  # as much is left to gain
    assert S[-1] / S[-2] == pytest.approx(1 + cosine / 0.5 * (1 + cosine) / 2, rel=1e-12)


def test_the_first_step_against_the_displacement_ends_the_ramp():
    S = sizes(Options(betas=(1.0,)), [*RAMP, fixed(1.0, 0.1), fixed(1.0, 0.1)])
    assert S[-2] / S[-3] == pytest.approx(0.5 / (1 + 0.2 / 2 + 0.01 / 4), rel=1e-12)
    much = S[-2] / (0.95 * S[-4])  # of the recent fall
    c = 0.2 * (1 - 0.01 * (1 - much))
    assert S[-1] / S[-2] == pytest.approx(1 / (1 + c * 2 / 2.2), rel=1e-12)


@pytest.mark.parametrize("part", [1.0, 0.5, 0.2, 0.01])
@pytest.mark.parametrize("cosine", [1e-4, 1e-5])
@pytest.mark.parametrize("side", [-1, 1])
def test_a_step_counts_by_its_slope_where_that_is_smaller_than_its_cosine(part, cosine, side):
    """Each is measured by its largest recent one."""
    options = Options(betas=(1.0,), s_init=1e-4)
    steps = [*[fixed(-1.0, 1e-4)] * 8, fixed(1e-9, 1e-4)]
    last = run(options, steps)[0][-1]
    h = side * last.stake / last.s.sum()  # as much at stake as ever
    steps.append(fixed(h, cosine, slope=part * last.recent_slope))
    S, after = sizes(options, steps), run(options, steps)[0][-1]
    moved = 1 + speed(last.hesitation) * min(cosine / 1e-4, part)
    assert S[-1] / S[-2] == pytest.approx(moved if side < 0 else 1 / moved, rel=1e-6)
    more = min(cosine / 1e-4, part) if side > 0 else 0.0
    assert after.hesitation == pytest.approx(last.hesitation + more, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_steps_against_the_displacement_make_the_tuner_slower(steps):
    ramp, against = [fixed(-1.0, 1e-5)] * 8, [fixed(1e-9, 1e-5, slope=1.0)] * steps
    last = run(Options(), [*ramp, *against])[0][-1]
    assert last.hesitation == pytest.approx(steps, rel=1e-9)
    for size, times in ((0.5, 1.0), (1.0, 1.0), (3.0, 3.0), (100.0, 4.0)):
        # A fall larger than the stake makes them count less, a single one four times less at most.
        h = -size * last.stake / last.s.sum()
        slope = max(abs(h), last.recent_slope)
        S = sizes(Options(), [*ramp, *against, fixed(h, 1e-5, slope=slope)])
        assert S[-1] / S[-2] == pytest.approx(1 + speed(steps / times), rel=1e-7)


@pytest.mark.parametrize("sides", [(1, -1), (-1, 1), (1, 1, -1, -1), (-1, -1, 1, -1, 1)])
def test_the_parameters_follow_the_mean_of_two_steps(sides):
    """A step up right after an equal step down does not move them, nor a step down after one up."""
    options, steps = Options(betas=(1.0,)), [*[fixed(-1.0, 1e-5)] * 8, fixed(1e-9, 1e-5, slope=1.0)]
    for side in sides:  # of one size, as much at stake as ever
        last = run(options, steps)[0][-1]
        h = -0.9 * side * last.stake / last.s.sum()
        steps.append(fixed(h, 1e-5, slope=max(abs(h), last.recent_slope)))
    states, kept = run(options, steps)
    S = np.array([state.s.sum() for state in states])
    factors, moved = (ends[-len(sides) :] for ends in (S[1:] / S[:-1], kept[1:] * S[1:] / S[:-1]))
    assert ((factors > 1) == (np.array(sides) > 0)).all()
    assert moved[0] == pytest.approx(factors[0] ** (1 / 4 if sides[0] > 0 else 1 / 2), rel=1e-8)
    for i in range(1, len(sides)):
        mean = math.sqrt(factors[i - 1] * factors[i])
        assert moved[i] == pytest.approx(mean ** (1 / 4 if mean > 1 else 1 / 2), rel=1e-8)
        if sides[i] != sides[i - 1]:
            assert abs(moved[i] - 1) < abs(factors[i] - 1) / 8


def offsets(options, steps):
    """What x − x_ref is multiplied with in each of the steps."""
    states, kept = run(options, steps)
    S = np.array([state.s.sum() for state in states])
    return kept[1:] * S[1:] / S[:-1]


@pytest.mark.parametrize("side", [1, -1])
def test_where_the_scale_rests_the_parameters_rest(side):
    """In a step that measures nothing, and where the cap holds the scale."""
    steps = [*[fixed(-1.0, 1e-5)] * 8, fixed(1e-9, 1e-5, slope=1.0)]
    last = run(Options(), steps)[0][-1]
    big = fixed(-0.9 * side * last.stake / last.s.sum(), 1e-5, slope=last.recent_slope)
    assert offsets(Options(), [*steps, big])[-1] != 1
    assert offsets(Options(), [*steps, big, fixed(0.0)])[-1] == 1

    cap = Options(max_scale=1.2 * float(last.s.sum()))
    moved = offsets(cap, [*steps, *[big] * 6])
    assert (moved[-6] == 1, moved[-1] == 1) == (False, side > 0)


@pytest.mark.parametrize("betas", [(0.99,), (0.9, 0.99, 0.999)])
def test_at_its_cap_the_scale_rests_to_the_last_bit(betas):
    """Whatever the cap: otherwise x would follow half of the step before, back and forth."""
    hs = np.where(np.random.default_rng(0).random(200) < 0.2, 0.3, -0.3)
    steps = [*[fixed(-1.0, 0.5)] * 20, fixed(1e-9, 0.5), *[fixed(h, 0.5) for h in hs]]
    for cap in np.random.default_rng(1).uniform(1e-4, 1e-3, 10):
        options = Options(betas=betas, max_scale=float(cap))
        states, kept = run(options, steps)
        S = np.array([state.s.sum() for state in states])
        rests = (S[1:] >= cap * (1 - 1e-9)) & (S[:-1] >= cap * (1 - 1e-9))
        assert rests.sum() > 50
        assert abs(kept[1:][rests] - 1).max() < 1e-12


@pytest.mark.parametrize("largest", [0.1, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("above", [True, False])
def test_a_large_cosine_counts_against_a_scale_above_that_of_the_ramp(largest, above):
    """Cosines that come close to 1 are no noise, unless the scale was safe in the ramp. For the
    scale they count as others do."""
    options = Options(betas=(1.0,))
    steps = [*[fixed(-1.0, largest)] * 8, fixed(1e-9, largest)]  # the ramp, and its end
    for _ in range(2 if above else 0):  # along Δ
        last = run(options, steps)[0][-1]
        steps.append(fixed(-0.9 * last.stake / last.s.sum(), largest))
    last = run(options, steps)[0][-1]
    assert (last.s.sum() > tuner.SAFE * last.top) == above
    h, k = last.recent_fall / last.s.sum(), speed(last.hesitation)
    slope = max(h, last.recent_slope)
    rise, fall = (sizes(options, [*steps, fixed(g, largest, slope=slope)]) for g in (-h, h))
    assert rise[-1] / rise[-2] == pytest.approx(1 + k, rel=1e-9)
    divergence = largest**4 if above else 0.0
    assert fall[-2] / fall[-1] == pytest.approx(1 + k + divergence, rel=1e-9)


@pytest.mark.parametrize("along", [1, 4, 20])
def test_steps_in_a_row_along_the_displacement_make_the_tuner_no_quicker(along):
    """In noise there are such rows for ever, and S would grow without end."""
    steps = [*[fixed(-1.0, 1e-5)] * 8, *[fixed(1e-9, 1e-5, slope=1.0)] * 10]
    for _ in range(along):
        last = run(Options(), steps)[0][-1]
        assert last.hesitation == pytest.approx(10, rel=1e-9)
        h = -0.5 * last.stake / last.s.sum()
        steps.append(fixed(h, 1e-5, slope=max(abs(h), last.recent_slope)))
        S = sizes(Options(), steps)
        assert S[-1] / S[-2] == pytest.approx(1 + speed(10), rel=1e-6)


def test_a_decay_in_float32_makes_no_nan():
    """With one, h is more than ⟨Δ, g⟩, and −h/(‖Δ‖·‖g‖) as large as λ: the cosine is clipped."""
    options, u = Options(s_decay=1e7), 1e-12
    state = tuner.init(options, np.array(options.betas, dtype=np.float32))
    for t in range(40):
        sums = tuner.Sums(
            dg=(-1 if t % 7 else 1) * 0.3 * t * u,
            dx=(1 if t % 5 else -1) * 0.5 * t * u,
            **{"gg": 1.0, "xx": 1.0, "x1": 1.0, "d": 4.0, "dd": (t * u) ** 2, "uu": u**2},
        )
        state, _ = tuner.update(options, state, tuner.Sums(*map(np.float32, sums)))
        assert np.isfinite(state.s).all()
    assert state.largest_cosine == 1.0


@pytest.mark.parametrize(("size", "factor"), [(3.9, 1.0), (5.0, 0.8), (1e9, 0.5)])
def test_an_outlier_against_the_displacement_halves_it_at_most(size, factor):
    before = [*RAMP, fixed(1e-9, 1e-3)]  # the ramp is over
    last = run(Options(betas=(1.0,)), before)[0]
    # The recent S·h is that of the ramp's last step, a step ago; the cosine is too small to count.
    h = size * 0.95 * last[-3].s.sum() / last[-1].s.sum()
    S = sizes(Options(betas=(1.0,)), [*before, fixed(h, 1e-9)])
    assert S[-1] / S[-2] == pytest.approx(factor, rel=1e-6)


def test_outliers_that_come_again_and_again_are_noise():
    """One batch of few is hard now and then: the scale must not fall each time."""
    before = [*RAMP, fixed(1e-9, 1e-3)]
    S = float(run(Options(betas=(1.0,)), before)[0][-1].s.sum())
    hard, easy = fixed(1000 / S, 1e-9), [fixed(-1 / S, 1e-9)] * 100
    falls = []
    for _ in range(12):
        states = run(Options(betas=(1.0,)), [*before, hard])[0]
        falls.append(states[-2].s.sum() / states[-1].s.sum())
        before += [hard, *easy]
    # 5 = log₄ 1000: each raises the stake fourfold, until they are no more than the stake.
    assert falls[:5] == pytest.approx([2.0] * 5, rel=1e-6)
    assert max(falls[5:]) < 1.07
    assert falls[5:] == sorted(falls[5:], reverse=True)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(("size", "times"), [(2.0, 2.0), (4.0, 4.0), (1e6, 4.0)])
def test_an_outlier_leaves_the_scale_free(size, times, side):
    """What is hardly worth a change goes by the stake, which one outlier raises fourfold; those
    that come again raise it again."""
    options, steps = Options(betas=(1.0,)), [*RAMP, fixed(1e-9, 1e-3)]
    before = run(options, steps)[0][-1]
    steps.append(fixed(side * size * before.stake / before.s.sum(), 1e-3))
    after = run(options, steps)[0][-1]
    assert pytest.approx(times * before.stake, rel=1e-9) == after.stake
    again = run(options, [*steps, fixed(1e6 * before.stake / after.s.sum(), 1e-3)])[0][-1]
    assert pytest.approx(4 * times * before.stake, rel=1e-9) == again.stake
    # A step along Δ of a twentieth of the largest before counts in full, as it did then.
    h = -0.05 * before.stake / after.s.sum()
    S = sizes(options, [*steps, fixed(h, 1e-3, slope=after.recent_slope)])
    recent_part = 0.05 * before.stake / after.recent_fall
    c = 1e-3 / 0.5 * (1 - 1e-6 * (1 - recent_part))
    assert S[-1] / S[-2] == pytest.approx(1 + speed(after.hesitation) * c, rel=1e-9)


@pytest.mark.parametrize("size", [10.0, 1e3, 1e30])
@pytest.mark.parametrize("side", [1, -1])
def test_one_steep_step_is_remembered_for_a_while(size, side):
    """A hundred steps, however steep it is."""
    options, steps = Options(betas=(1.0,), s_init=1e-4), [*RAMP, fixed(1e-9, 0.5, slope=1.0)]
    steps += [fixed(1e-9 * side, slope=size), *[fixed(-1e-9, slope=1.0)] * 100]
    states = run(options, steps)[0]
    assert states[9].recent_slope == pytest.approx(min(size, 95.0), rel=1e-9)
    assert states[-1].recent_slope == 1


@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
def test_the_ramp_goes_on_after_a_steep_step(size):
    """A hundred steps later at the latest, if it is not the first."""
    steep, *after = [fixed(-size, 1e-3), *[fixed(-1.0, 1e-3)] * 120]
    S = sizes(Options(), [*after[:3], steep, *after])
    np.testing.assert_allclose(S[-20:] / S[-21:-1], 1.5 + 1e-3 / 2, rtol=1e-5)


@pytest.mark.parametrize("begins", [1e-3, 1e3])
def test_a_blow_up_in_the_first_step_counts_in_full(begins):
    """There is nothing yet that it could be compared with."""
    last = run(Options(), [fixed(-1.0), fixed(begins)])[0]
    assert last[-1].stake == pytest.approx(begins * last[0].s.sum(), rel=1e-12)


@pytest.mark.parametrize("part", [1e-3, 1e-2, 0.1])
def test_what_is_hardly_worth_it_changes_the_scale_less(part):
    """By the square: when all is learned, every step goes along Δ. Up and down alike, since in
    noise the scale would drift otherwise."""
    ramp = [fixed(-1.0, 1e-9)] * 8  # the cosine is too small to count
    S = sizes(Options(), ramp)
    h = part * tuner.LEAST * S[-2] / S[-1]  # S·h is so small a part of the largest
    rise, fall = (sizes(Options(), [*ramp, fixed(g, 1e-9, slope=1.0)]) for g in (-h, h))
    assert rise[-1] / rise[-2] == pytest.approx(1 + 0.5 * part**2, rel=1e-9)
    assert fall[-2] / fall[-1] == pytest.approx(2 * (1 + 0.5 * part**2), rel=1e-9)

    options, steps = Options(betas=(1.0,)), [*RAMP, fixed(1e-9)]  # the ramp is over
    last = run(options, steps)[0][-1]
    h = part * tuner.LEAST * last.stake / last.s.sum()
    slope = last.recent_slope
    rise, fall = (sizes(options, [*steps, fixed(g, slope=slope)]) for g in (-h, h))
    recent_part = part * tuner.LEAST * last.stake / last.recent_fall
    k = speed(last.hesitation) * (1 - 0.5**2 * (1 - recent_part))
    assert rise[-1] / rise[-2] == pytest.approx(1 + part**2 * k, rel=1e-9)
    assert fall[-2] / fall[-1] == pytest.approx(1 + part**2 * k, rel=1e-9)


@light
@given(factor=st.floats(1, 1e6))
def test_updates_that_grow_lower_the_scale_by_as_much(factor):
    """As in a warm-up."""
    same, grown = (sizes(Options(), [*RAMP, fixed(-1.0, update=u)]) for u in (1.0, factor))
    assert grown[-1] == pytest.approx(same[-1] / factor, rel=1e-12)


@pytest.mark.parametrize(("growth", "factor"), [(1.0, 1.0), (1.5, 1 / 1.5), (3.0, 0.5)])
def test_a_rise_that_goes_on_is_an_outlier_only_while_it_grows(growth, factor):
    """A run that diverges is met at every step; one that is a little past its optimum is not."""
    options, steps = Options(betas=(1.0,)), [*RAMP, fixed(1e-9, 1e-3)]
    size = 8 * run(options, steps)[0][-1].recent_fall
    for _ in range(6):
        S = sizes(options, steps)
        steps.append(fixed(size / S[-1], 1e-9))
        size *= growth
    np.testing.assert_allclose(S[-4:] / S[-5:-1], factor, rtol=0.06)


@pytest.mark.parametrize("cosine", [1e-6, 0.5, 1.0])
@pytest.mark.parametrize("share", [-3.0, -0.3, -0.01, 0.01, 0.3, 3.0])
def test_the_past_follows_by_a_root(cosine, share):
    """The second where the scale falls, the fourth where it rises; less where g lies along Δ and
    little is at stake, beside what recently was."""
    ramp = [fixed(-1.0, cosine)] * 8
    before = run(Options(), [*ramp, fixed(1e-9, cosine)])[0][-1]
    h = -share * before.recent_fall / before.s.sum()
    states, keeps = run(Options(), [*ramp, fixed(1e-9, cosine), fixed(h, cosine)])
    S = [state.s.sum() for state in states]
    past, by = keeps[-1] * S[-1] / S[-2], S[-1] / S[-2]
    by = by**0.25 if share > 0 else by**0.5
    assert past == pytest.approx(1 + (1 - cosine**2 * (1 - min(1, abs(share)))) * (by - 1))
    assert (past > 1) == (share > 0)


def moving(c, **more):
    """A step of relative cosine c after `RAMP`, where β is 1, with as much at stake as ever."""
    return fixed(-math.copysign(1e3, c), abs(c) / 2, **more)


ENDED = [*RAMP, fixed(1e-9, 0.5)]  # the ramp is over, with a hesitation of 1


def test_the_displacement_is_forgotten_when_the_scale_has_fallen_tenfold():
    """It was wrong: x_ref becomes x, and the tuner is faster for what comes."""
    options, steps = Options(betas=(1.0,)), [*ENDED]
    top = run(options, RAMP)[0][-1].s.sum()
    while True:
        steps.append(moving(-1.0))
        states, keeps = run(options, steps)
        if keeps[-1] == 0:
            break
        assert states[-1].s.sum() >= 0.1 * top
        assert states[-1].top == top
    last, before = states[-1], states[-2]
    assert 0.05 * top < last.s.sum() < 0.1 * top
    assert last.top == last.s.sum()
    assert last.D == 1  # so that what others keep of it does not count as an update
    assert last.hesitation == pytest.approx((before.hesitation + 1) / 4, rel=1e-9)
    assert before.last_factor < 1
    assert last.last_factor == 0  # the next Δ follows its own steps
    # The next time is a tenth of that; larger updates lower what it is measured by.
    steps.append(moving(-1.0, update=10.0))
    after = run(options, steps)[0][-1]
    assert after.top == pytest.approx(last.top / 10, rel=1e-9)


@pytest.mark.parametrize("cap", [1e-3, 1e-4])
def test_a_scale_at_its_cap_is_not_lost(cap):
    """What it has fallen from is what it was, and not what it would have been."""
    keeps = run(Options(max_scale=cap), [*RAMP, *[moving(-0.3), moving(0.3)] * 20])[1]
    assert (keeps > 0).all()


@pytest.mark.parametrize(("d", "begins"), [(10, False), (11, False), (12, True), (1000, True)])
def test_many_new_parameters_begin_the_ramp_anew(d, begins):
    last = fixed(-9.0, d=d)  # a fall as large as any recent one
    states, keeps = run(Options(), [*RAMP, fixed(1.0), last, last])
    S = np.array([state.s.sum() for state in states])
    assert (S[-2] == pytest.approx(S[0] * max(1.0, math.sqrt(d * 0.01 / 4)))) == begins
    assert keeps[-2] * S[-2] == pytest.approx(0 if begins else S[-2] ** 0.25 * S[-3] ** 0.75)
    assert (S[-1] == pytest.approx(1.75 * S[-2])) == begins


@pytest.mark.parametrize(
    ("x1", "size"), [(3.0, 3.0), (0.0, 0.1 * math.sqrt(10)), (0.01, 0.1 * math.sqrt(10))]
)
def test_the_relative_start(x1, size):
    # Nothing is measured (h = 0), so S stays at its start: 1e-4·size over the largest u so far.
    updates = [0.0, 0.0, 2.0, 1.0] + [1.5**k for k in range(20)]
    steps = [sums_of(0.0, update=u)._replace(x1=np.float64(x1**2)) for u in updates]
    expected = np.array([1e-4 * size / max(updates[: k + 1]) for k in range(2, 24)])
    S = sizes(Options(), steps)
    assert (S[:2] == 0).all()
    np.testing.assert_allclose(S[2:], expected, rtol=1e-12)
    assert S[2] > 100 * S[-1]


# Algorithm 2


def play(hs, wealth, beta=1.0, array=np.float64):
    """The scales that Algorithm 2 plays against each h, and its wealth after each."""
    state, played, wealths = provable.init(array(0.0)), [], []
    for h in hs:
        played.append(float(state.s))
        state = provable.update(state, array(h), wealth=wealth, beta=beta)
        wealths.append(wealth + float(state.r))
    return np.array(played), np.array(wealths)


moderate = st.lists(
    st.one_of(st.just(0.0), st.floats(0.01, 1).map(lambda h: -h), powers(-1, 1), powers(-6, 6)),
    min_size=20,
    max_size=80,
)


def drift(T=400, seed=0, bias=0.5):
    return list(np.random.default_rng(seed).normal(size=T) - bias)


@light
@given(hs=moderate, wealth=st.floats(1e-3, 1e3), beta=st.sampled_from([0.9, 0.999, 1.0]))
@example(hs=drift(), wealth=1.0, beta=1.0)
@example(hs=drift(), wealth=1.0, beta=0.99)
def test_algorithm_2_as_it_is_written(hs, wealth, beta):
    hs = [-1.0, -1.0, -1.0, *hs]
    played, wealths = play(hs, wealth, beta)
    expected_played, expected_wealths = reference.algorithm2(hs, wealth, beta)
    assert played[3] > played[2] > played[1] == 0
    np.testing.assert_allclose(played, expected_played, rtol=1e-9, atol=1e-12 * played.max())
    np.testing.assert_allclose(wealths, expected_wealths, rtol=1e-9, atol=1e-12 * wealths.max())


def test_algorithm_2_in_every_library():
    expected, _ = play(drift(), 1.0)
    assert expected.max() > 100 * expected[expected > 0][0]
    in_torch, _ = play(drift(), 1.0, array=lambda h: torch.tensor(h, dtype=torch.float64))
    np.testing.assert_allclose(in_torch, expected, rtol=1e-12)
    with jax.enable_x64(True):
        in_jax, _ = play(drift(T=40), 1.0, array=jax.numpy.asarray)
    np.testing.assert_allclose(in_jax, expected[:40], rtol=1e-12)


def a(z):
    """The a of the proof: 0, then z²/2, then z − 1/2."""
    return 0.0 if z <= 0 else z * z / 2 if z <= 1 else z - 0.5


def log_potential(hs, W0):
    """K and V of the wealth's lower bound W_T ≥ K·exp(a(−Σĥ/√V)), K by its logarithm; and −Σĥ.

    The paper's proof with its constants. Telescoping (as the paper does, with V = 4·m_T² + v_T),

        log W_T ≥ log W_0 + a(−Σĥ/√V) − 2·Σ_t ĥ_t²/(4·m_{t−1}² + v_{t−1}).

    Let m_1 be the first |h| above 0, and w_t = m_1² + v_t. Since |ĥ_t| ≤ m_{t−1}, we have
    4·m_{t−1}² + v_{t−1} ≥ w_t, so that a term of the sum is at most (w_t − w_{t−1})/w_t, which is
    at most log(w_t/w_{t−1}). The sum is then at most log(w_T/m_1²), and K = W_0·(m_1²/w_T)².
    This is the paper's W_0·m_1/(T²·m_T) where its O(·) is not yet taken: w_T ≤ T·m_T².
    """
    sizes = np.abs(hs)
    m = np.maximum.accumulate(np.concatenate([[0.0], sizes]))
    clipped = np.clip(hs, -m[:-1], m[:-1])
    v, first = (clipped**2).sum(), sizes[sizes > 0][0]
    log_K = math.log(W0) - 2 * math.log1p(v / first**2)
    return log_K, 4 * m[-1] ** 2 + v, -clipped.sum()


def conjugate(b, log_K):
    """sup over z of b·z − K·exp(a(z)), in closed form: the potential is convex and smooth."""
    if b == 0:
        return -math.exp(log_K)
    log_ratio = math.log(b) - log_K
    if log_ratio >= 0.5:  # the maximum is at z = 1/2 + log(b/K) ≥ 1
        return b * (log_ratio - 0.5)
    z = math.sqrt(lambertw(math.exp(2 * log_ratio)).real)  # z·exp(z²/2) = b/K
    return b * z - math.exp(log_K + z * z / 2)


@pytest.mark.parametrize(("b", "K"), [(1e-3, 1.0), (0.5, 1.0), (1.6, 1.0), (1.7, 1.0), (30.0, 0.1)])
def test_the_conjugate(b, K):
    z = np.linspace(0, 20, 200_001)
    best = max(b * x - K * math.exp(a(x)) for x in z)
    assert conjugate(b, math.log(K)) == pytest.approx(best, rel=1e-6)


ADVERSARIES = {
    "drift": drift(),
    "no drift": drift(bias=0.0),
    "always down": [-1.0] * 400,
    "down and back": [-1.0] * 200 + [1.0] * 200,
    "alternating": [-1.0, -1.0, 1.0, 1.0] * 100,
    "growing": [-(1.1**k) for k in range(200)],
    "growing, then a fall": [-(1.1**k) for k in range(150)] + [1.1**160],
}


COMPARATORS = (0.0, *np.geomspace(1e-6, 1e6, 25))


@light
@given(hs=moderate, wealth=st.floats(1e-3, 1e3))
def test_regret(hs, wealth):
    check_regret([-1.0, -1.0, -1.0, *hs], wealth)


@pytest.mark.parametrize("wealth", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("hs", ADVERSARIES.values(), ids=list(ADVERSARIES))
def test_regret_against_adversaries(hs, wealth):
    check_regret(hs, wealth)


def check_regret(hs, W0):
    """The theorem of Algorithm 2 (β = 1), with explicit constants, and the bound on its wealth."""
    hs = np.array(hs)
    played, wealths = play(hs, W0)
    assert played.max() > 0
    assert played.max() > 1.1 * played[played > 0].min()
    assert (wealths > 0).all()
    assert (wealths[1:] >= wealths[:-1] / 2 * (1 - 1e-12)).all()  # no bet is above a half
    log_K, V, H = log_potential(hs, W0)
    assert math.log(wealths[-1]) >= log_K + a(H / math.sqrt(V)) - 1e-9
    for comparator in COMPARATORS:
        regret = (hs * (played - comparator)).sum()
        truncation = (comparator + played.max()) * np.abs(hs).max()  # Σ|h − ĥ| = m_T
        bound = W0 + truncation + conjugate(comparator * math.sqrt(V), log_K)
        rounding = 1e-12 * np.abs(hs * (played + comparator)).sum()
        assert regret <= bound + rounding, comparator


# The readings of the paper's text that fail, shown on the reference


def descend(loss_scale=1.0, base=reference.sgd, hyper=None, **reading):
    """Without noise from 0 towards 1: how far away after each of 300 steps, and the scales."""
    points, S = reference.run(
        base,
        lambda x, t: loss_scale * (x - 1.0),
        np.zeros(4),
        300,
        1.0,
        "paper",
        options=reading,
        **(hyper or {}),
    )
    return np.linalg.norm(points - 1.0, axis=1), S


def test_with_h_in_line_11_it_never_starts():
    away, S = descend(m_of=lambda h: h)
    assert (S == 0).all()
    assert (away == away[0]).all()
    away, S = descend()
    assert S.max() > 1e5 * S[2]
    assert away[-1] < 1e-5 * away[0]


def test_with_the_scale_before_in_line_13_it_does_not_arrive():
    away, S = descend(s_of_reward="s_{t-1}")
    assert S.max() > 1e5 * S[S > 0][0]
    assert away[-1] > 0.1 * away[0]


def test_with_epsilon_in_line_16_it_depends_on_the_scale_of_the_loss():
    scale_free = {"base": reference.adamw, "hyper": {"eps": 1e-30}}
    for epsilon, tolerance in ((0.0, 1e-9), (1e-8, None)):
        _, S = descend(**scale_free, epsilon=epsilon)
        _, small = descend(1e-8, **scale_free, epsilon=epsilon)
        assert S.max() > 1e5 * S[2]
        if tolerance is not None:
            np.testing.assert_allclose(small[:20], S[:20], rtol=tolerance)
        else:
            assert (small[3:20] < 0.9 * S[3:20]).all()


def test_with_q_in_line_12_algorithm_2_never_bets():
    played, wealths = reference.algorithm2([-1.0] * 100, 1.0, q_sign=1.0)
    assert (played == 0).all()
    assert (wealths == 1).all()
    played, _ = play([-1.0] * 100, 1.0)
    assert played[-1] > 100 * played[2] > 0


# Options

BAD = {
    "preset": (["adam", "Paper", None, 3], "'paper'"),
    "s_init": ([0, 0.0, -1.0, math.nan, math.inf, "auto", True], "Leave it out"),
    "s_decay": ([-1.0, math.nan, math.inf, "much", True], "Use 0.01"),
    "betas": (
        [(), (1.5,), (0.9, -0.1), (math.nan,), 0.9, ("a",)],
        "Use a sequence of numbers from 0 to 1",
    ),
    "max_scale": ([0, 0.0, -1.0, math.nan, "large", None], "Leave it out"),
    "skip_nonfinite": ([1, 0, "yes", None], "True or False"),
}


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [(name, value, fix) for name, (values, fix) in BAD.items() for value in values],
)
def test_a_bad_option_says_what_it_got_and_what_to_do(name, value, fix):
    with pytest.raises(ValueError, match=f"^{name} must be ") as raised:
        Options(**{name: value})
    assert f"got {value!r}." in str(raised.value)
    assert fix in str(raised.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_good_options(preset):
    options = Options(preset=preset, betas=[0.5, 1], max_scale=3, skip_nonfinite=False)
    assert options.betas == (0.5, 1.0)
    assert options.s_init == {"default": "relative", "optax": 1e-6}.get(preset, 1e-8)
    assert options.s_decay == (0.0 if preset == "default" else 0.01)
    own = Options(preset=preset).betas
    assert own == ((0.99,) if preset == "default" else tuple(reference.BETAS))


def test_importing_mechanic_imports_no_framework():
    code = "import sys, mechanic, mechanic.tuner; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    modules = set(output.decode().split())
    assert "mechanic.tuner" in modules
    assert not modules & {"torch", "jax", "jaxlib", "numpy", "optax", "scipy", "sklearn"}
