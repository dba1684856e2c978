"""What the scale does where the norms of gradients differ from step to step, without a model.

    python research/norms.py        # ten seconds; needs the extra `optax`

Cosines of Δ and −g of 0.01 that say nothing, after a ramp, and then a mean of a tenth of them; the
norms are drawn from a lognormal distribution. And one gradient far larger than the others, in the
ramp or after it. Means over 64 runs.
"""

import functools
from typing import Any

import jax
import numpy as np

from mechanic import tuner
from mechanic.options import Options

OPTIONS = Options()
RAMP, RUNS = 20, 64
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@functools.cache
def compiled() -> Any:
    """From the cosines and norms of each step and run to the scales."""
    jnp = jax.numpy

    def update(state: Any, cosine: Any, norm: Any, first: Any) -> Any:
        one, zero = 0 * cosine + 1, 0 * cosine
        named = {"dg": -cosine * norm, "dx": zero, "gg": norm**2, "xx": one, "x1": one}
        sums = tuner.Sums(**named, d=1e4 * one, dd=one, uu=jnp.where(first, 1.0, zero))
        return tuner.update(OPTIONS, state, sums)[0]

    def step(state: Any, given: Any) -> Any:
        state = jax.vmap(update, (0, 0, 0, None))(state, *given)
        return state, state.s.sum(1)

    def play(cosines: Any, norms: Any) -> Any:
        init = tuner.init(OPTIONS, jnp.array(OPTIONS.betas))
        state = type(init)(*(jnp.stack([value] * RUNS) for value in init))
        return jax.lax.scan(step, state, (cosines, norms, jnp.arange(len(cosines)) < 10))[1]

    return jax.jit(play)


def scales(cosines: Numbers, norms: Numbers) -> Numbers:
    """The scale after each step of each run."""
    with jax.enable_x64(True):
        given = (np.clip(cosines, -1, 1), norms)
        return np.asarray(compiled()(*map(jax.numpy.asarray, given)))


def followed(sigma: float, steps: int, side: int) -> float:
    """By how many times log₂ S moves in seven times as many steps as there was noise before."""
    draw = np.random.default_rng(0)
    cosines = 0.01 * draw.normal(size=(RAMP + 8 * steps, RUNS))
    norms = np.exp(sigma * draw.normal(size=cosines.shape))
    cosines[RAMP + steps :] += side * 0.001
    cosines[:RAMP], norms[:RAMP] = 0.3, 1.0
    S = scales(cosines, norms)
    return float(side * np.log2(S[-1] / S[RAMP + steps - 1]).mean())


def steps_of_the_ramp(large: float) -> int:
    """The steps in which S grows to 0.03, where the third gradient is so large."""
    cosines = 0.3 + 0.05 * np.random.default_rng(3).normal(size=(400, RUNS))
    norms = np.ones(cosines.shape)
    norms[2] = large
    return int(np.argmax(np.log10(scales(cosines, norms)).mean(1) > -1.5))


def steps_to_double(large: float) -> int:
    """The steps in which a clear signal doubles S, where its first gradient is so large."""
    cosines = 0.01 * np.random.default_rng(4).normal(size=(1000, RUNS))
    cosines[:RAMP] = 0.3
    cosines[100:] += 0.01
    norms = np.ones(cosines.shape)
    norms[100] = large
    S = scales(cosines, norms)
    return int(np.argmax(np.log2(S[100:] / S[99]).mean(1) > 1))


def main() -> None:
    print("σ of log ‖g‖ | up, down after 100 steps | up, down after 1,000")
    for sigma in (0.0, 0.5, 1.0, 1.5, 2.0):
        found = [followed(sigma, steps, side) for steps in (100, 1000) for side in (1, -1)]
        print(sigma, *(f"{number:.2f}" for number in found))
    print("one gradient | steps of the ramp | steps to double S after it")
    for large in (1.0, 1e2, 1e3, 1e6, 1e10):
        print(f"{large:g}", steps_of_the_ramp(large), steps_to_double(large))


if __name__ == "__main__":
    main()
