"""`mechanic.optax` among the rest of JAX and optax: wrappers around it and inside of it, the
transformations of JAX, odd trees, steps that are skipped, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_runs import row

from mechanic.optax import effective_learning_rate, eval_params, mechanize, metrics, scale
from mechanic.optax.readers import find

TARGETS = {"a": jnp.array([1.0, -1.0, 2.0]), "b": jnp.array([[1.0, 0.5], [-1.0, 1.0]])}
STEPS = 60


def grads_of(params, t):
    """Of ½‖x − target‖², with noise."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), t), len(params))
    return {
        name: own - TARGETS[name] + 0.3 * jax.random.normal(key, own.shape, own.dtype)
        for key, (name, own) in zip(keys, sorted(params.items()), strict=True)
    }


def zeros():
    return jax.tree.map(jnp.zeros_like, TARGETS)


def train(tx, params=None, steps=STEPS, grads=grads_of):
    params = zeros() if params is None else params

    def step(carry, t):
        params, state = carry
        updates, state = tx.update(grads(params, t), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
    return run((params, tx.init(params)))


@functools.cache
def plain():
    """The run that the others are compared with."""
    return train(mechanize(optax.adamw(1.0)))


def assert_close(one, two, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same_run(params, state):
    expected, expected_state = plain()
    assert float(scale(expected_state)) > 0.01
    assert_close(params, expected)
    np.testing.assert_allclose(scale(state), scale(expected_state), rtol=1e-4)


def chained():
    return optax.chain(
        optax.clip_by_global_norm(1e6), mechanize(optax.adamw(1.0)), optax.scale(1.0)
    )


def injected():
    return optax.inject_hyperparams(lambda learning_rate: mechanize(optax.adamw(learning_rate)))(
        learning_rate=1.0
    )


SAME = {
    "chain": chained,
    "inject_hyperparams outside": injected,
    "inject_hyperparams inside": lambda: mechanize(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1.0)
    ),
    "masked, all": lambda: optax.masked(mechanize(optax.adamw(1.0)), {"a": True, "b": True}),
    "multi_transform inside": lambda: mechanize(
        optax.multi_transform(
            {"one": optax.adamw(1.0), "two": optax.adamw(1.0)}, {"a": "one", "b": "two"}
        )
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(mechanize(optax.adamw(1.0)), 3),
    "MultiSteps": lambda: optax.MultiSteps(mechanize(optax.adamw(1.0)), 1),
    "partition": lambda: optax.partition({"x": mechanize(optax.adamw(1.0))}, {"a": "x", "b": "x"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME)
def test_a_wrapper_that_changes_nothing(name):
    params, state = train(SAME[name]())
    assert_same_run(params, state)
    if "inject" in name:
        assert float(effective_learning_rate(state)) == pytest.approx(float(scale(state)))


@pytest.mark.nightly
def test_multi_steps_of_equal_gradients():
    tx = optax.MultiSteps(mechanize(optax.adamw(1.0)), 3)
    params, state = train(tx, steps=3 * STEPS, grads=lambda x, t: grads_of(x, t // 3))
    assert_same_run(params, state)


@pytest.mark.nightly
def test_a_mask_and_parts_of_their_own():
    masked = optax.masked(mechanize(optax.adamw(1.0)), {"a": True, "b": False})
    params, state = train(masked, grads=lambda x, t: {**grads_of(x, t), "b": 0 * x["b"]})
    alone, alone_state = train(
        mechanize(optax.adamw(1.0)),
        {"a": jnp.zeros(3)},
        grads=lambda x, t: {"a": grads_of({**zeros(), **x}, t)["a"]},
    )
    assert_close(params["a"], alone["a"])
    np.testing.assert_allclose(scale(state), scale(alone_state), rtol=1e-4)
    assert (params["b"] == 0).all()

    parts = optax.multi_transform(
        {"one": mechanize(optax.adamw(1.0)), "two": mechanize(optax.sgd(1.0))},
        {"a": "one", "b": "two"},
    )
    params, state = train(parts)
    assert_close(params["a"], alone["a"])
    assert float(scale(state.inner_states["one"])) != float(scale(state.inner_states["two"]))
    with pytest.raises(ValueError, match="2 states of mechanize"):
        scale(state)


@pytest.mark.nightly
def test_a_frozen_part_has_no_part():
    """Neither in the norm of the gradient nor in the size of the parameters' displacement."""
    base = optax.multi_transform(
        {"on": optax.adamw(1.0), "off": optax.set_to_zero()}, {"a": "on", "b": "off"}
    )
    params, state = train(mechanize(base))
    without, _ = train(
        mechanize(base), grads=lambda x, t: {**grads_of(x, t), "b": 100.0 * jnp.ones_like(x["b"])}
    )
    assert (params["b"] == 0).all()
    assert_close(params, without)
    assert float(scale(state)) > 0.01


@pytest.mark.nightly
def test_vmap_over_init_and_update():
    starts = jax.tree.map(lambda own: jnp.stack([own * 0, own * 0 + 0.5]), TARGETS)
    tx = mechanize(optax.adamw(1.0))
    state = jax.vmap(tx.init)(starts)

    def step(params, state, t):
        updates, state = tx.update(grads_of(params, t), state, params)
        return optax.apply_updates(params, updates), state

    every, params = jax.jit(jax.vmap(step, in_axes=(0, 0, None))), starts
    for t in range(STEPS):
        params, state = every(params, state, t)
    assert scale(state).shape == (2,)
    assert_same_run(*jax.tree.map(lambda own: own[0], (params, state)))


def test_grad_through_steps():
    """The coefficients count as constants, as they do in torch."""
    tx = mechanize(optax.sgd(1.0))

    def after(target, lr_of_two):
        x, state = jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2))
        scales = []
        for _ in range(2):
            updates, state = tx.update(x - target, state, x)
            x = optax.apply_updates(x, updates)
            scales.append(scale(state))
        return jnp.sum(x * lr_of_two), scales

    gradient, scales = jax.jit(jax.grad(after, has_aux=True))(jnp.zeros(2), jnp.ones(2))
    # x' = x + pull·Δ − S'·(x − target), with everything but the target a constant
    assert np.isfinite(gradient).all()
    assert (gradient > 0.5 * scales[-1]).all()
    assert (gradient < 2 * sum(scales)).all()


def test_donated_buffers_and_memory():
    tx = mechanize(contrib.dog(1.0))  # a base whose state holds the parameters
    params = zeros()
    state = tx.init(params)
    assert len({id(own) for own in jax.tree.leaves((params, state))}) == len(
        jax.tree.leaves((params, state))
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, t):
        updates, state = tx.update(grads_of(params, t), state, params)
        return optax.apply_updates(params, updates), state

    for t in range(3):
        params, state = step(params, state, t)
    assert int(metrics(state)["steps"]) == 3


@pytest.mark.nightly
def test_nothing_is_stored_beside_the_state():
    """Nothing is kept of the parameters, and donated buffers are written in place."""
    size = 1 << 16
    params, tx = jnp.ones(size), mechanize(optax.adamw(1.0))
    state = tx.init(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * 4 * size  # x, Δ and Adam's two
    assert memory.temp_size_in_bytes < 2.1 * 4 * size  # g² and the update, of one array at a time


@pytest.mark.parametrize("value", [row(np.nan), row(np.inf, by_day=False)])
def test_a_gradient_that_is_not_finite_skips_the_step(value):
    tx = mechanize(optax.adamw(1.0))
    params = zeros()
    state, update = tx.init(params), jax.jit(tx.update)
    for t in range(5):
        if t in (0, 3):  # before the first step, and later
            bad = grads_of(params, t)
            bad["b"] = bad["b"].at[0, 1].set(value)
            updates, after = update(bad, state, params)
            assert all((own == 0).all() for own in jax.tree.leaves(updates))
            counts = after.counts
            assert int(counts.skipped) - int(state.counts.skipped) == 1
            assert int(counts.skipped_in_a_row) == 1
            jax.tree.map(
                np.testing.assert_array_equal,
                after._replace(counts=None),
                state._replace(counts=None),
            )
            state = after
        updates, state = update(grads_of(params, t), state, params)
        params = optax.apply_updates(params, updates)
    assert int(metrics(state)["skipped"]) == 2
    assert int(state.counts.skipped_in_a_row) == 0
    assert float(scale(state)) > 1e-4


@pytest.mark.nightly
def test_a_nan_may_pass_if_it_is_asked_for():
    tx = mechanize(optax.sgd(1.0), skip_nonfinite=False)
    updates, state = tx.update(
        {"a": jnp.array([np.nan, 1.0])}, tx.init(zeros_a := {"a": jnp.ones(2)}), zeros_a
    )
    assert int(metrics(state)["skipped"]) == 0
    assert not np.isfinite(updates["a"]).all()


def test_odd_trees():
    """None, an integer, an empty array, a scalar and complex numbers among the parameters."""
    params = {
        "none": None,
        "count": jnp.arange(3),
        "empty": jnp.zeros((0, 4)),
        "scalar": jnp.zeros(()),
        "complex": jnp.zeros(3, jnp.complex64),
        "idle": jnp.ones(2),
    }
    target = jnp.array([1 + 2j, -1j, 0.5], jnp.complex64)
    tx = mechanize(optax.sgd(1.0))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = {**dict.fromkeys(params), "empty": params["empty"]}
        grads |= {"scalar": params["scalar"] - 3, "complex": params["complex"] - target}
        return tx.update(grads, state, params)

    for _ in range(80):
        updates, state = step(params, state)
        assert updates["idle"] is None
        assert updates["count"] is None
        params |= {n: params[n] + updates[n] for n in ("scalar", "complex", "empty")}
    assert abs(params["scalar"] - 3) < 0.3
    assert (abs(params["complex"] - target) < 0.3).all()
    assert params["complex"].dtype == jnp.complex64
    assert int(find(state).numbers.size) == 7


def test_numbers_of_python_and_integers():
    """The one is moved as an array is, the other stays, whatever gradient it is given."""
    params = {"x": 1.0, "count": jnp.arange(3)}
    tx = mechanize(optax.sgd(1.0))
    state = tx.init(params)
    for _ in range(30):
        grads = {"x": params["x"] - 3, "count": jnp.ones(3)}
        updates, state = tx.update(grads, state, params)
        assert not updates["count"].any()
        params["x"] = float(params["x"] + updates["x"])
    assert abs(params["x"] - 3) < 0.5
    assert float(scale(state)) > 0.01


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
def test_an_update_that_is_not_finite_moves_nothing(broken):
    """Its gradients are finite. The elements that the base goes on to move are moved."""

    def update(grads, step, params=None):
        bad = (step >= 30) & (jnp.arange(4) == 2)
        return jnp.where(bad, broken, -grads), step + 1

    tx = mechanize(optax.GradientTransformation(lambda params: 0, update))
    x = jnp.zeros(4)
    state, jitted = tx.init(x), jax.jit(tx.update)
    for _ in range(60):
        updates, state = jitted(x - 3, state, x)
        x = x + updates
    assert jnp.isfinite(x).all()
    assert abs(x - 3).max() < 1
    assert float(scale(state)) > 0.01


@pytest.mark.parametrize("wrapper", ["multi_transform", "masked"])
def test_schedule_free_for_a_part(wrapper):
    """It is shown its own point, and the other base the parameters."""
    free, plain = contrib.schedule_free_sgd(1.0), optax.sgd(1.0)
    if wrapper == "masked":
        is_free = {"a": True, "b": False}
        is_plain = {"a": False, "b": True}
        base = optax.chain(optax.masked(free, is_free), optax.masked(plain, is_plain))
    else:
        base = optax.multi_transform({"f": free, "p": plain}, {"a": "f", "b": "p"})
    params, state = train(mechanize(base), steps=100)
    assert float(scale(state)) > 0.001
    assert abs(params["a"] - TARGETS["a"]).max() < abs(TARGETS["a"]).max()


@pytest.mark.nightly
def test_complex_numbers_are_pairs_of_real_ones():
    target = jnp.array([1 + 2j, -1j, 0.5], jnp.complex64)
    pair = jnp.stack([target.real, target.imag])
    runs = []
    for goal in (target, pair):
        tx = mechanize(optax.sgd(1.0))
        x, state, update = goal * 0, tx.init(goal * 0), jax.jit(tx.update)
        for _ in range(30):
            updates, state = update(x - goal, state, x)
            x = optax.apply_updates(x, updates)
        runs.append((x, scale(state)))
    (x, S), (pairs, expected) = runs
    assert float(S) > 0.01
    np.testing.assert_allclose(S, expected, rtol=1e-4)
    np.testing.assert_allclose(jnp.stack([x.real, x.imag]), pairs, rtol=1e-3, atol=1e-5)


def test_an_empty_tree_and_a_map_over_the_state():
    tx = mechanize(optax.adamw(1.0))
    for empty in ({}, (), None):
        updates, _ = tx.update(empty, tx.init(empty), {} if empty is None else empty)
        assert not jax.tree.leaves(updates)
    params = zeros()
    state = tx.init(params)
    specs = optax.tree.map_params(
        tx, lambda _, spec: spec, state, {"a": "A", "b": "B"}, transform_non_params=lambda _: None
    )
    assert find(specs).displacement == {"a": "A", "b": "B"}
    assert find(specs).numbers.scale is None


@pytest.mark.nightly
def test_schedule_free_goes_on_its_own_way():
    """At lr 1 and S = 1, what is shown to it is what it would be alone."""
    base = contrib.schedule_free_sgd(0.3)
    params, state = train(base)
    alone = contrib.schedule_free_eval_params(state, params)
    tx = mechanize(base, preset="paper", s_init=1e9, max_scale=1.0, s_decay=0.0)
    # Its first step is at S = 0: the base is one step ahead of the parameters, and no more.
    params, state = train(tx, steps=STEPS)
    assert float(scale(state)) == pytest.approx(1.0)
    assert_close(eval_params(state, params), alone, 0.2)


def test_what_is_refused():
    params = zeros()
    tx = mechanize(optax.sgd(1.0))
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"params must be given, got None.*update\(grads, state"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="the parameters must be a tree of the same structure"):
        tx.update(params, state, {"a": params["a"]})
    with pytest.raises(ValueError, match=r"tx must be an optax.GradientTransformation, got 0.1"):
        mechanize(0.1)
    with pytest.raises(ValueError, match=r"optax.MultiSteps\(mechanize\(tx\)"):
        mechanize(optax.MultiSteps(optax.sgd(1.0), 2))
    with pytest.raises(ValueError, match="mechanized already, and its scale would be tuned twice"):
        mechanize(optax.chain(optax.clip(1.0), mechanize(optax.sgd(1.0)))).init(params)
    with pytest.raises(ValueError, match=r"a gradient has shape \(1,\), and its parameter"):
        tx.update({**params, "a": jnp.ones(1)}, state, params)
    with pytest.raises(ValueError, match="s_decay must be a finite number of at least 0, got -1"):
        mechanize(optax.sgd(1.0), s_decay=-1)
    with pytest.raises(ValueError, match="there is no state of mechanize"):
        scale(optax.sgd(1.0).init(params))
    with pytest.raises(ValueError, match="is not in the state"):
        effective_learning_rate(state)
    known = mechanize(optax.sgd(0.5), learning_rate=0.5)
    assert float(effective_learning_rate(known.init(params))) == 0.0
    assert "effective_lr" in metrics(known.init(params))
    assert float(effective_learning_rate(state, 2.0)) == 0.0
