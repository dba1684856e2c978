"""Inner products of many arrays, side by side and one by one, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mechanic.optax import products

SHAPES = [
    *[(), (5,), (300, 200), (3, 4), (5,), (0, 7), (200, 300), (3, 4), (40_000,), (9000, 3)],
    *[(4, 2, 40, 130), (300, 200), ()],
]


def draw(dtype: str) -> list[list[tuple[jax.Array, jax.Array]]]:
    chance = np.random.default_rng(0)
    rows = []
    for shape in SHAPES:
        a, b = (chance.normal(size=shape) + 1j * chance.normal(size=shape) for _ in range(2))
        parts = (a, b) if dtype == "complex64" else (a.real, b.real)
        one, two = (jnp.asarray(part, dtype) for part in parts)
        rows.append([(one, two), (one, one), (two, two)])
    return rows


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_each_is_in_its_place(monkeypatch, devices, dtype):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    rows = draw(dtype)
    found = jax.jit(lambda rows: products.inner_products(rows, jnp.float32))(rows)
    wide = [[[np.asarray(x, np.complex128) for x in pair] for pair in pairs] for pairs in rows]
    expected = np.array([[np.vdot(a, b).real for a, b in pairs] for pairs in wide])
    lengths = np.array([[np.linalg.norm(a) * np.linalg.norm(b) for a, b in p] for p in wide])
    assert found.shape == (len(SHAPES), 3)
    assert found.dtype == jnp.float32
    assert np.all(np.abs(found - expected) <= 1e-6 * lengths)


def test_no_array_at_all():
    assert products.inner_products([], jnp.float32).size == 0


def test_many_arrays_are_few_sums():
    """The compiled sums of 60 small arrays of three shapes, and of 20 large ones of one."""
    shapes = [(7,), (9,), (2, 3)] * 20 + [(128, 256)] * 20
    rows = [[(x, x)] for x in map(jnp.ones, shapes)]
    lowered = jax.jit(lambda rows: products.inner_products(rows, jnp.float32)).lower(rows)
    assert lowered.as_text().count("stablehlo.reduce(") == 3 + 20 + 1
