"""Parameters that something else changes after every update, with `follow_edits=True`."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import case
from optax.projections import projection_non_negative

from mechanic.optax import mechanize, scale, scopes
from mechanic.optax.readers import find

TARGET = {"w": jnp.array([1.0, -1.0, 2.0]), "b": jnp.array([-0.5, 0.3])}
BEST = 1.25  # with nothing below 0
STEPS = 200
RATE = optax.cosine_decay_schedule(0.03, STEPS)
BASES = {"adam": optax.adam, "momentum": lambda lr: optax.sgd(lr, momentum=0.9), "lion": optax.lion}


def loss(params):
    return sum(jnp.sum((params[name] - TARGET[name]) ** 2) for name in TARGET)


def train(tx, project=lambda params: params, *, noise=0.3, dtype=jnp.float32, steps=STEPS):
    params = jax.tree.map(lambda t: jnp.zeros(t.shape, dtype), TARGET)
    state = tx.init(params)

    def step(carry, key):
        params, state = carry
        grads = jax.grad(loss)(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        drawn = jax.random.normal(key, (5,)) * noise
        grads = {"w": grads["w"] + drawn[:3], "b": grads["b"] + drawn[3:]}
        grads = jax.tree.map(lambda g: g.astype(dtype), grads)
        updates, state = tx.update(grads, state, params)
        return (project(optax.apply_updates(params, updates)), state), None

    keys = jax.random.split(jax.random.key(0), steps)
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[0], donate_argnums=0)
    return run((params, state))


@pytest.mark.parametrize(
    ("place", "base"),
    [
        case(place, base, name=f"{place}-{base}", by_day=i == j)
        for i, place in enumerate(["projection", "chain", "freeze"])
        for j, base in enumerate(BASES)
    ],
)
def test_what_is_taken_back_does_not_move_the_scale(place, base):
    tx, project = mechanize(BASES[base](RATE), learning_rate=RATE, follow_edits=True), None
    if place == "projection":
        project = projection_non_negative
    elif place == "chain":
        tx = optax.chain(tx, optax.keep_params_nonnegative())
    else:  # the elements whose target is below 0 stay at 0
        held = jax.tree.map(lambda t: t > 0, TARGET)
        tx = optax.chain(tx, optax.stateless(lambda u, _: jax.tree.map(jnp.multiply, u, held)))
    params, state = train(tx, project or (lambda params: params))
    assert float(loss(params)) < BEST + 0.1 * (
        float(loss(jax.tree.map(jnp.zeros_like, TARGET))) - BEST
    )
    assert 0 < float(scale(state)) < 1e4


def test_without_it_the_scale_grows_without_end():
    """Which is why the option is there."""
    tx = mechanize(optax.adam(RATE), learning_rate=RATE)
    _, state = train(tx, projection_non_negative, noise=0.0)
    assert float(scale(state)) > 1e7


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_edits_it_changes_nothing(dtype):
    plain = mechanize(optax.adam(RATE), learning_rate=RATE)
    followed = mechanize(optax.adam(RATE), learning_rate=RATE, follow_edits=True)
    params, state = train(plain, dtype=dtype)
    same, own = train(followed, dtype=dtype)
    np.testing.assert_allclose(
        np.asarray(same["w"], np.float32), np.asarray(params["w"], np.float32), rtol=1e-3
    )
    assert float(scale(own)) == pytest.approx(float(scale(state)), rel=1e-3)


def test_the_parameters_lie_on_their_displacement():
    """x = x_ref + S·Δ, whatever is done to x."""
    tx = mechanize(optax.adam(RATE), learning_rate=RATE, follow_edits=True)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        there = optax.apply_updates(params, updates)
        return there, projection_non_negative(there), state

    params = jax.tree.map(lambda t: 0.1 + jnp.zeros_like(t), TARGET)
    state, scales, references = tx.init(params), [], []
    for _ in range(40):
        there, params, state = step(params, state)
        own = find(state)
        length = float(own.numbers.scale * own.numbers.share)
        references.append(there["w"] - length * own.displacement["w"])
        scales.append(float(scale(state)))
    for reference in references[1:]:
        np.testing.assert_allclose(reference, references[0], atol=1e-4)
    assert max(scales) > 3 * min(scales)


@pytest.mark.nightly
def test_several_scales_and_a_model_that_can_be_called():
    model = eqx.nn.MLP(3, 1, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    x = jax.random.normal(jax.random.key(1), (64, 3))
    y = jnp.tanh(x @ jnp.array([1.0, -2.0, 0.5]))[:, None]

    def own_loss(params):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    tx = mechanize(optax.adam(RATE), learning_rate=RATE, scope="tensor", follow_edits=True)
    state, start = tx.init(params), float(own_loss(params))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(own_loss)(params), state, params)
        return projection_non_negative(optax.apply_updates(params, updates)), state

    for _ in range(STEPS):
        params, state = step(params, state)
    assert float(own_loss(params)) < 0.9 * start
    # That of a bias whose elements are all held at 0 grows on, to 1e9 and more with some keys.
    assert all(0 < float(scale(own)) < math.inf for own in scopes(state).values())


def test_averaging_states_keeps_their_types():
    """As `optax.contrib.sam` does, in whose scan the types must not change."""
    tx = optax.contrib.sam(mechanize(optax.sgd(0.1)), optax.sgd(0.01), sync_period=2)
    params = jax.tree.map(jnp.zeros_like, TARGET)
    state = tx.init(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, state), length=100)
    assert float(loss(params)) < 0.5
