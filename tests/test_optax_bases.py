"""The bases that a transformation may be: those that optax runs its own wrappers over, and more.

Each is run at lr 1 on a small problem (Fromage at 0.01: its decay is not proportional to lr). It
must reach a loss far below the first, keep its dtypes, take arguments that it does not know, and be
compiled once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_runs import row

from mechanic.optax import eval_params, mechanize, scale

TARGETS = {"a": jnp.array([1.0, -1.0, 2.0]), "b": jnp.array([[1.0, 0.5], [-1.0, 1.0]])}
STEPS = 400


def loss(params):
    return sum(jnp.sum((params[name] - TARGETS[name]) ** 2) for name in TARGETS)


BASES = {
    "sgd": optax.sgd(1.0),
    "momentum": optax.sgd(1.0, momentum=0.9),
    "nesterov": optax.sgd(1.0, momentum=0.9, nesterov=True),
    "adam": optax.adam(1.0),
    "adamw": optax.adamw(1.0),
    "nadamw": optax.nadamw(1.0),
    "adamax": optax.adamax(1.0),
    "adamaxw": optax.adamaxw(1.0),
    "adan": optax.adan(1.0),
    "amsgrad": optax.amsgrad(1.0),
    "lamb": optax.lamb(1.0),
    "lars": optax.lars(1.0),
    "fromage": optax.fromage(0.01),
    "lion": optax.lion(1.0, b1=0.99),
    "noisy_sgd": optax.noisy_sgd(1.0, eta=1e-4, key=0),
    "novograd": optax.novograd(1.0),
    "optimistic": optax.optimistic_gradient_descent(1.0, alpha=0.7, beta=0.1),
    "rmsprop": optax.rmsprop(1.0),
    "rmsprop-momentum": optax.rmsprop(1.0, momentum=0.9),
    "rprop": optax.rprop(1.0),
    "adabelief": optax.adabelief(1.0),
    "adagrad": optax.adagrad(1.0),
    "adadelta": optax.adadelta(1.0),
    "adafactor": optax.adafactor(1.0),
    "radam": optax.radam(1.0),
    "sm3": optax.sm3(3.0),
    "yogi": optax.yogi(1.0, b1=0.99),
    "sign_sgd": optax.sign_sgd(1.0),
    "muon": contrib.muon(1.0),
    "ademamix": contrib.ademamix(1.0),
    "adopt": contrib.adopt(1.0),
    "acprop": contrib.acprop(1.0),
    "schedule_free_sgd": contrib.schedule_free_sgd(1.0),
    "schedule_free_adamw": contrib.schedule_free_adamw(1.0),
    "dadapt_adamw": contrib.dadapt_adamw(1.0),
    "dog": contrib.dog(1.0),
    "polyak_sgd": optax.polyak_sgd(1.0),
}
if hasattr(contrib, "madgrad"):  # optax 0.2.6 does not have it
    BASES["madgrad"] = contrib.madgrad(1.0)
BY_DAY = ("sgd",)


def train(tx, params, steps=STEPS):
    """A run with noise of a tenth in the gradients, and a learning rate that falls to 0."""
    state = tx.init(params)

    def step(carry, t):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        keys = dict(
            zip(grads, jax.random.split(jax.random.fold_in(jax.random.key(1), t)), strict=True)
        )
        grads = {
            n: g + 0.1 * jax.random.normal(keys[n], g.shape, g.dtype) for n, g in grads.items()
        }
        updates, state = tx.update(grads, state, params, value=value, unknown_to_the_base=1)
        return (optax.apply_updates(params, updates), state), scale(state)

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))
    return run((params, state))


@pytest.mark.parametrize("name", [row(name, by_day=name in BY_DAY) for name in BASES])
def test_a_base(name):
    tx = mechanize(BASES[name])
    params = jax.tree.map(jnp.zeros_like, TARGETS)
    first = float(loss(params))
    (params, state), scales = train(tx, params)
    assert scales.max() > 2 * scales[scales > 0].min()
    ended = float(loss(eval_params(state, params)))
    assert ended < first / 20, f"{first:.3g} became {ended:.3g}"
    assert int(state.counts.skipped) == 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        row(name, dtype, by_day=False)
        for name in ("sgd", "adamw", "lion", "schedule_free_sgd", "muon")
        for dtype in ("bfloat16", "float16")
    ],
)
def test_narrow_parameters_stay_narrow_and_learn(name, dtype):
    tx = mechanize(BASES[name])
    params = jax.tree.map(lambda own: jnp.zeros_like(own, dtype=dtype), TARGETS)
    kinds = jax.tree.map(lambda own: own.dtype, tx.init(params))
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert {own.dtype for own in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    (params, state), _ = train(tx, params)
    assert kinds == jax.tree.map(lambda own: own.dtype, state)
    assert {own.dtype for own in jax.tree.leaves(state.displacement)} == {jnp.dtype("float32")}
    assert {own.dtype for own in jax.tree.leaves(state.numbers)} == {jnp.dtype("float32")}
    assert float(loss(eval_params(state, params))) < 0.5


def test_small_steps_of_bfloat16_are_not_lost():
    """A step of a thousandth of the weights' last place: a thousand of them move by one place."""
    params = jnp.full(4096, 1.0, jnp.bfloat16)
    tx = mechanize(optax.sgd(1.0), preset="paper", s_init=1.0, max_scale=1e-5, s_decay=0.0)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(1000):
        updates, state = update(jnp.full(4096, 0.5, jnp.bfloat16), state, params)
        params = optax.apply_updates(params, updates)
    moved = 1.0 - np.asarray(params, np.float64).mean()
    # S is at its cap from the third step on, so that nearly all steps move by 5e-6.
    assert moved == pytest.approx(1000 * 0.5 * 1e-5, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(BASES))
def test_compiled_once(name):
    tx = mechanize(BASES[name])
    params = jax.tree.map(jnp.zeros_like, TARGETS)
    state, compiled = tx.init(params), []

    @jax.jit
    def step(params, state):
        compiled.append(None)
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    assert len(compiled) == 1


@pytest.mark.nightly
def test_linesearch_gets_what_it_asks_for():
    tx = mechanize(optax.lbfgs(1.0, memory_size=3))
    params = jax.tree.map(jnp.zeros_like, TARGETS)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(60):
        params, state = step(params, state)
    assert float(loss(params)) < 1e-2


@pytest.mark.nightly
def test_what_cannot_work():
    """Lookahead has parameters of two kinds, and gradients of one."""
    tx = mechanize(optax.lookahead(optax.sgd(1.0), sync_period=5, slow_step_size=0.5))
    params = optax.LookaheadParams.init_synced(TARGETS)
    state = tx.init(params)
    with pytest.raises(ValueError, match="same structure"):
        tx.update(TARGETS, state, params)
