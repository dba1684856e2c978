"""What the tests of `mechanic.optax` share: problems in JAX, and whole runs of a transformation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from cases import case

from mechanic.optax import scale

Gradient = Callable[[Any, Any], Any]


def row(*values: Any, by_day: bool = True) -> Any:
    return case(*values, name="-".join(map(str, values)), by_day=by_day)


@contextmanager
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def quadratic(x: Any, t: Any) -> Any:
    problem = reference.QUADRATIC
    a, optimum, noise = (
        jnp.asarray(own, x.dtype) for own in (problem.a, problem.optimum, problem.noise)
    )
    return a * (x - optimum) + noise[t]


def wine(x: Any, t: Any) -> Any:
    features = jnp.asarray(reference.WINE.features, x.dtype)[t]
    labels = jax.nn.one_hot(jnp.asarray(reference.WINE.labels)[t], 3, dtype=x.dtype)
    logits = features @ x[:39].reshape(13, 3) + x[39:]
    error = (jax.nn.softmax(logits) - labels) / len(features)
    return jnp.concatenate([(features.T @ error).ravel(), error.sum(0)])


PROBLEMS = {"quadratic": (reference.QUADRATIC, quadratic), "wine": (reference.WINE, wine)}


def parts(x: Any) -> dict[str, Any]:
    """A vector as a tree of two arrays."""
    return {"a": x[:15].reshape(5, 3), "b": {"c": x[15:]}}


def flat(tree: Any) -> Any:
    return jnp.concatenate([tree["a"].ravel(), tree["b"]["c"]])


def run(
    tx: Any, gradient: Gradient, x0: Any, steps: int, *, read: Any = scale, dtype: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Points and scales of a run, all of its steps in one `scan`."""
    points, scales = jax.jit(lambda x: trajectory(tx, gradient, x, steps, read))(
        jnp.asarray(x0, dtype)
    )
    return np.asarray(points, np.float64), np.asarray(scales, np.float64)


def trajectory(tx: Any, gradient: Gradient, x0: Any, steps: int, read: Any = scale) -> Any:
    """The same, to be compiled or mapped."""
    x = parts(x0)
    state = tx.init(x)

    def step(carry: Any, t: Any) -> Any:
        x, state = carry
        updates, state = tx.update(parts(gradient(flat(x), t)), state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), (flat(x), read(state))

    _, (points, scales) = jax.lax.scan(step, (x, state), jnp.arange(steps))
    return jnp.concatenate([x0[None], points]), jnp.concatenate([read(state)[None], scales])


def assert_same(trajectory: Any, expected: Any, tolerance: float, growth: float = 300.0) -> None:
    """The same scales and points at every step, and a scale that has grown by a large factor."""
    (points, scales), (expected_points, expected_scales) = trajectory, expected
    assert scales.max() > growth * scales[scales > 0][0]
    np.testing.assert_allclose(scales, expected_scales, rtol=tolerance, atol=0)
    errors = np.linalg.norm(points - expected_points, axis=1)
    assert (errors <= tolerance * np.linalg.norm(expected_points, axis=1)).all(), errors.max()
