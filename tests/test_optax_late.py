"""Arrays that move only later: one counts from the step in which it first moves, as a parameter of
torch does from its first gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax_runs import row
from torch import nn

from mechanic.optax import mechanize, scale
from mechanic.optax.readers import find
from mechanic.torch import mechanize as torch_mechanize
from mechanic.torch import tuner

LATE, STEPS = 20, 60
BASES = {
    "momentum": (
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adamw": (
        lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.02),
        optax.adamw(0.1, weight_decay=0.02),
    ),
}


def released(base):
    """The base, at rest at first."""
    return optax.conditionally_mask(base, lambda step, **_: step >= LATE)


# A base that counts its steps has counted them with gradients of zeros, too, and torch's has not.
@pytest.mark.parametrize(
    ("base", "held_by"),
    [
        row("momentum", "gradients of zeros", by_day=False),
        row("momentum", "the base", by_day=False),
        row("adamw", "the base", by_day=False),
    ],
)
def test_it_counts_as_in_torch(base, held_by):
    """Beside a parameter that has no gradient at first. There are fewer of the others, so that the
    ramp begins anew."""
    draw, (make, tx) = np.random.default_rng(0), BASES[base]
    x0 = [draw.normal(size=(3, 4)).astype(np.float32), draw.normal(size=30).astype(np.float32)]
    params = [nn.Parameter(torch.tensor(x)) for x in x0]
    optimizer = torch_mechanize(make([{"params": [param]} for param in params]))
    if held_by == "the base":
        tx = optax.multi_transform({"now": tx, "late": released(tx)}, ["now", "late"])
    tx, xs = mechanize(tx), [jnp.asarray(x) for x in x0]
    state, update = tx.init(xs), jax.jit(tx.update)
    scales, sizes = [], []
    for t in range(STEPS):
        is_late = t < LATE
        grads = [param.detach().numpy() - 2 + draw.normal(size=param.shape) for param in params]
        grads = [grad.astype(np.float32) for grad in grads]
        params[0].grad = torch.tensor(grads[0])
        params[1].grad = None if is_late else torch.tensor(grads[1])
        optimizer.step()
        if is_late and held_by != "the base":
            grads[1] = np.zeros_like(grads[1])
        updates, state = update([jnp.asarray(grad) for grad in grads], state, xs)
        xs = optax.apply_updates(xs, updates)
        scales.append((float(tuner(optimizer).scale), float(scale(state))))
        sizes.append(float(find(state).numbers.size))
    theirs, ours = np.array(scales).T
    assert theirs[LATE - 1] > 50 * theirs[0]
    assert theirs[LATE] < theirs[LATE - 1] / 50
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert sizes == [12.0] * LATE + [42.0] * (STEPS - LATE)
    for param, x in zip(params, xs, strict=True):
        np.testing.assert_allclose(x, param.detach(), rtol=1e-3, atol=1e-4)
    saved = optimizer.state_dict()["param_groups"][0]["mechanic"]
    for name in ("reference_square", "size", "scale"):
        np.testing.assert_allclose(getattr(find(state).numbers, name), saved[name], rtol=1e-4)


def run(tx, params, gradient, steps=STEPS):
    """The scales of a run, and its last parameters and state."""

    def step(carry, t):
        params, state = carry
        updates, state = tx.update(gradient(params, t), state, params)
        return (optax.apply_updates(params, updates), state), scale(state)

    last, scales = jax.jit(lambda own: jax.lax.scan(step, own, jnp.arange(steps)))(
        (params, tx.init(params))
    )
    return np.asarray(scales), *last


def pull(params, t):
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), (5,))
    return {"a": params["a"] - 2 + noise * (1 + t / 4)}  # updates that grow


@pytest.mark.nightly
@pytest.mark.parametrize("base", BASES)
def test_an_array_that_never_moves_changes_nothing(base):
    """Neither by its size at the start, nor by being looked at in every step."""
    base = BASES[base][1]
    alone, params, _ = run(mechanize(base), {"a": jnp.zeros(5)}, pull)

    def both(params, t):
        return {**pull(params, t), "b": 10 + params["b"]}

    held = optax.multi_transform({"on": base, "off": optax.set_to_zero()}, {"a": "on", "b": "off"})
    start = {"a": jnp.zeros(5), "b": 50 * jnp.ones(1000)}
    scales, with_held, state = run(mechanize(held), start, both)
    assert alone.max() > 50 * alone[0]
    np.testing.assert_allclose(scales, alone, rtol=1e-5)
    np.testing.assert_allclose(with_held["a"], params["a"], rtol=1e-4)
    assert (with_held["b"] == 50).all()
    assert float(find(state).numbers.size) == 5


@pytest.mark.nightly
def test_a_large_part_that_is_released_is_not_thrown_at_the_scale_of_a_small_one():
    """A head of few weights has learned a large scale. The body, which is where it should be, moves
    little when it is unfrozen."""
    head = optax.adamw(1.0, weight_decay=0.0)
    parts = {"head": head, "body": released(head)}
    tx = mechanize(optax.multi_transform(parts, {"a": "head", "b": "body"}))
    goal = jax.random.normal(jax.random.key(1), (1000,))

    def gradient(params, t):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(2), t), (1000,))
        return {"a": params["a"] - 20, "b": params["b"] - goal + 0.1 * noise}

    params = {"a": jnp.zeros(5), "b": goal}
    scales, at_rest, _ = run(tx, params, gradient, LATE)
    assert (at_rest["b"] == goal).all()
    assert scales[-1] > 0.5  # an element of the body would move as far in one step
    for steps in (LATE + 1, LATE + 20):
        _, after, _ = run(tx, params, gradient, steps)
        assert abs(after["b"] - goal).max() > 0
        assert abs(after["b"] - goal).max() < 0.1 * scales[-1]


@pytest.mark.nightly
def test_an_array_whose_displacement_returns_to_zero_is_not_counted_twice():
    """A sign that goes to and fro: the displacement of a single number comes back to 0."""
    tx = mechanize(optax.sgd(1.0), preset="paper", s_init="relative")
    params = {"a": jnp.zeros(()), "b": jnp.zeros(4)}

    def gradient(params, t):
        return {"a": jnp.where(t % 2 == 0, 1.0, -1.0), "b": params["b"] - 2}

    _, _, state = run(tx, params, gradient, 40)
    assert float(find(state).numbers.size) == 5


@pytest.mark.nightly
def test_none_among_the_gradients_at_first():
    tx = mechanize(optax.sgd(0.1))
    params = {"a": jnp.zeros(3), "b": jnp.zeros(5)}
    state, sizes = tx.init(params), []
    for t in range(30):
        grads = {"a": params["a"] - 2, "b": params["b"] - 3 if t >= 12 else None}
        updates, state = tx.update(grads, state, params)
        params |= {name: params[name] + own for name, own in updates.items() if own is not None}
        sizes.append(float(find(state).numbers.size))
    assert sizes == [3.0] * 12 + [8.0] * 18
    assert (params["b"] != 0).all()
    assert float(scale(state)) > 1e-4
