"""`mechanic.optax` in the training states, models and checkpoints of other packages."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from mechanic.optax import effective_learning_rate, freeze, mechanize, scale, scopes, unfreeze

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(64, 6)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True)).astype(np.float32)
STEPS = 40


def tx() -> Any:
    return optax.chain(optax.clip_by_global_norm(10.0), mechanize(optax.adamw(1.0)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))


def linen_state() -> TrainState:
    model = Linen()
    params = model.init(jax.random.key(0), X)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx())


def linen_step(state: TrainState) -> tuple[TrainState, Any]:
    def loss(params: Any) -> Any:
        return jnp.mean((state.apply_fn(params, X) - Y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def assert_learned(losses: list[float], state: Any) -> None:
    assert losses[-1] < losses[0] / 2
    assert float(scale(state)) > 1e-4


@pytest.mark.nightly
def test_linen_and_a_resume_from_orbax(tmp_path):
    step = jax.jit(linen_step, donate_argnums=0)
    state, losses = linen_state(), []
    for _ in range(STEPS // 2):
        state, loss = step(state)
        losses.append(float(loss))
    saved = {"params": state.params, "opt_state": state.opt_state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    for _ in range(STEPS // 2):
        state, loss = step(state)
        losses.append(float(loss))
    assert_learned(losses, state)

    fresh = linen_state()
    like = {"params": fresh.params, "opt_state": fresh.opt_state}
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "state", like)
    resumed = fresh.replace(**loaded, step=STEPS // 2)
    for _ in range(STEPS // 2):
        resumed, _ = step(resumed)
    one, two = (jax.tree.leaves(own) for own in (state, resumed))
    assert len(one) > 30
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.two = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(jnp.tanh(self.one(x)))


def train_nnx(model: Any, optimizer: Any) -> list[float]:
    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda own: jnp.mean((own(X) - Y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(STEPS)]


@pytest.mark.nightly
def test_nnx():
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx(), wrt=nnx.Param)

    losses = train_nnx(model, optimizer)
    assert_learned(losses, optimizer.opt_state)
    assert float(effective_learning_rate(optimizer.opt_state, 0.5)) == pytest.approx(
        0.5 * float(scale(optimizer.opt_state))
    )


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        ("tensor", ["one.bias", "one.kernel", "two.bias", "two.kernel"]),
        ({"kernels": "*.kernel"}, ["kernels", "rest"]),
    ],
    ids=["tensor", "patterns"],
)
def test_scopes_in_nnx(scope, names):
    """Its `init` is given variables, and its `update` arrays; the names are the same."""
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mechanize(optax.adamw(1.0), scope=scope), wrt=nnx.Param)

    losses = train_nnx(model, optimizer)
    assert losses[-1] < 0.5 * losses[0]
    found = scopes(optimizer.opt_state)
    assert list(found) == names
    assert all(float(scale(own)) > 0 for own in found.values())


@pytest.mark.nightly
def test_freeze_in_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mechanize(optax.sgd(1.0)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda own: (own(jnp.ones((4, 3))) - 2).var() + own.kernel[...].var())(
            model
        )
        optimizer.update(model, grads)

    for _ in range(20):
        step(model, optimizer)
    before = float(scale(optimizer.opt_state))
    optimizer.opt_state = freeze(optimizer.opt_state)
    for _ in range(3):
        step(model, optimizer)
    assert float(scale(optimizer.opt_state)) == before > 0
    optimizer.opt_state = unfreeze(optimizer.opt_state)
    step(model, optimizer)
    assert float(scale(optimizer.opt_state)) != before


class Equinox(eqx.Module):
    """A model with a function and an integer, which no one trains."""

    one: eqx.nn.Linear
    two: eqx.nn.Linear
    calls: jax.Array
    activation: Any

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.one, self.two = eqx.nn.Linear(6, 16, key=one), eqx.nn.Linear(16, 1, key=two)
        self.calls, self.activation = jnp.zeros((), jnp.int32), jnp.tanh

    def __call__(self, x: Any) -> Any:
        return self.two(self.activation(self.one(x)))


@pytest.mark.nightly
def test_equinox():
    model = Equinox(jax.random.key(0))
    optimizer = tx()
    # Integers among the parameters, and None in their place among the gradients.
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(X) - Y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for _ in range(STEPS):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert_learned(losses, state)
    assert model.calls.dtype == jnp.int32
