"""What the scale of the default rule does whatever the task: the scalar rule, without a model.

Many runs are made at once. After a ramp, each is given cosines of Δ and −g that are drawn as
`NOISE` says. The means are over many runs of one seed. docs/algorithm.md says what other seeds do.
"""

import functools

import jax
import numpy as np
import pytest

from mechanic import tuner
from mechanic.options import Options

OPTIONS = Options()
RAMP, SETTLE, SEEDS = 20, 20, 64
SIZES = (1e-4, 1e-3, 2e-3, 4e-3, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7)


@functools.cache
def compiled():
    """From the cosines of each step and run to the scales."""
    jnp = jax.numpy

    def update(state, cosine, first):
        one, zero = 0 * cosine + 1, 0 * cosine
        named = {"dg": -cosine, "dx": zero, "gg": one, "xx": one, "x1": one, "d": 1e4 * one}
        sums = tuner.Sums(**named, dd=one, uu=jnp.where(first, 1.0, zero))
        return tuner.update(OPTIONS, state, sums)[0]

    def step(state, given):
        cosines, first = given
        state = jax.vmap(update, (0, 0, None))(state, cosines, first)
        return state, state.s.sum(1)

    def play(cosines):
        init = tuner.init(OPTIONS, jnp.array(OPTIONS.betas))
        state = type(init)(*(jnp.stack([value] * cosines.shape[1]) for value in init))
        return jax.lax.scan(step, state, (cosines, jnp.arange(len(cosines)) < 10))[1]

    return jax.jit(play)


def scales(cosines):
    """The scales of all runs: steps × runs."""
    with jax.enable_x64(True):
        return np.asarray(compiled()(jax.numpy.asarray(np.clip(cosines, -1, 1))))


def correlated(draw, shape, correlation):
    noise = draw.normal(size=shape)
    for t in range(1, shape[0]):
        noise[t] = correlation * noise[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    return noise


def with_outlier(draw, shape):
    noise = draw.normal(size=shape)
    noise[shape[0] // 10] *= 100
    return noise


NOISE = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "uniform": lambda draw, shape: draw.uniform(-1, 1, size=shape),
    "signs": lambda draw, shape: draw.choice([-1.0, 1.0], size=shape),
    "heavy tails": lambda draw, shape: draw.standard_t(2, size=shape),
    "one outlier": with_outlier,
    "correlation 0.3": lambda draw, shape: correlated(draw, shape, 0.3),
    "correlation 0.5": lambda draw, shape: correlated(draw, shape, 0.5),
}


def drawn(kind, steps):
    """Noise of every size, after a ramp: steps × sizes × seeds."""
    shape = (RAMP + steps, len(SIZES), SEEDS)
    noise = NOISE[kind](np.random.default_rng(0), shape) * np.array(SIZES)[:, None]
    noise[:RAMP] = 0.3
    return noise


@pytest.mark.parametrize(
    "steps", [3_000, pytest.param(100_000, marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.parametrize("kind", NOISE)
def test_in_noise_that_says_nothing_the_scale_stays(kind, steps):
    """The mean of log S over the runs is never above twice the one at first, nor below a tenth of
    it, at any size of the cosines."""
    cosines = drawn(kind, steps)
    S = scales(cosines.reshape(len(cosines), -1)).reshape(cosines.shape)
    S = S[RAMP + SETTLE :] / S[RAMP + SETTLE]
    means = np.exp(np.log(S).mean(-1))
    assert means.max() < 2, f"up to {means.max():.3g}"
    assert means.min() > 0.1, f"down to {means.min():.3g}"


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(
    "steps",
    [100, 1_000, *(pytest.param(n, marks=pytest.mark.nightly) for n in (10_000, 100_000))],
    ids=str,
)
def test_a_signal_of_a_tenth_of_the_noise_is_followed(steps, side):
    """After so many steps of noise, seven times as many with the signal double or halve S."""
    noise = np.random.default_rng(0).normal(size=(RAMP + 8 * steps, SEEDS))
    noise[RAMP + steps :] += side / 10
    noise[:RAMP] = 30
    S = scales(0.01 * noise)
    assert side * np.log2(S[-1] / S[RAMP + steps - 1]).mean() > 1


@pytest.mark.parametrize("side", [1, -1])
def test_a_clear_signal_is_followed_at_once(side):
    """One as large as the noise, at any size of both: half of the runs double or halve S in 60
    steps."""
    draw, shape = np.random.default_rng(0), (RAMP + 160, len(SIZES[4:]), SEEDS)
    noise = draw.normal(size=shape)
    noise[RAMP + 100 :] += side
    cosines = noise * np.array(SIZES[4:])[:, None] / 2
    cosines[:RAMP] = 0.3
    S = scales(cosines.reshape(len(cosines), -1))[RAMP + 100 :]
    assert (np.median(side * np.log2(S[-1] / S[0])) > 1).all()
