"""Several scales in one transformation: `mechanic.optax.mechanize(tx, scope=...)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.optax import freeze, mechanize, metrics, scale, scopes

STEPS = 40
PATTERNS = {"text": "text.*"}


def model():
    draw = np.random.default_rng(0)
    sizes = {"text": {"kernel": (6, 4), "bias": (4,)}, "unet": {"kernel": (4, 2), "bias": (2,)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
        sizes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


DRAW = np.random.default_rng(1)
INPUTS, TARGETS = DRAW.normal(size=(32, 6)), DRAW.normal(size=(32, 2))


def loss(params):
    hidden = jnp.tanh(10 * (INPUTS @ params["text"]["kernel"] + params["text"]["bias"]))
    return jnp.mean((hidden @ params["unet"]["kernel"] + params["unet"]["bias"] - TARGETS) ** 2)


gradient = jax.jit(jax.grad(loss))


TX = mechanize(optax.adamw(1.0), scope=PATTERNS)
SIMPLE = mechanize(optax.sgd(1.0), scope=PATTERNS)
jitted = functools.cache(lambda tx: jax.jit(tx.update))


def train(tx, params, state=None, steps=STEPS, change=lambda grads, step: grads):
    state = tx.init(params) if state is None else state
    update = jitted(tx)
    for step in range(steps):
        updates, state = update(change(gradient(params), step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def train_apart(labels, steps=STEPS):
    """A mechanized transformation for each label, on the gradients of all."""
    params, txs = model(), {label: mechanize(optax.adamw(1.0)) for label in labels}
    own = {label: txs[label].init(pick(params)) for label, pick in labels.items()}
    updates = {label: jax.jit(tx.update) for label, tx in txs.items()}
    for _ in range(steps):
        grads, after = gradient(params), jax.tree.map(lambda leaf: leaf, params)
        for label, pick in labels.items():
            moves, own[label] = updates[label](pick(grads), own[label], pick(params))
            moved = optax.apply_updates(pick(params), moves)
            after = after | {label: moved}
        params = after
    return params, own


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), one, other)


@pytest.mark.nightly
def test_scopes_are_as_transformations_of_their_own():
    params, state = train(TX, model())
    labels = {"text": lambda tree: tree["text"], "unet": lambda tree: tree["unet"]}
    apart, own = train_apart(labels)
    assert_close(params, apart)
    found = {name: float(scale(one)) for name, one in scopes(state).items()}
    assert found["text"] == pytest.approx(float(scale(own["text"])), rel=1e-4)
    assert found["rest"] == pytest.approx(float(scale(own["unet"])), rel=1e-4)
    assert found["text"] != found["rest"]
    assert min(found.values()) > 0


@pytest.mark.nightly
def test_each_array_may_have_a_scale():
    params, state = train(mechanize(optax.adamw(1.0), scope="tensor"), model())
    assert list(scopes(state)) == ["text.bias", "text.kernel", "unet.bias", "unet.kernel"]
    assert len({float(scale(own)) for own in scopes(state).values()}) == 4
    assert loss(params) < loss(model()) / 2


def test_nan_in_one_scope_skips_the_step_of_all():
    def spoil(grads, step):
        if step != 20:
            return grads
        return grads | {"unet": jax.tree.map(lambda leaf: leaf * jnp.nan, grads["unet"])}

    params, state = train(SIMPLE, model(), steps=STEPS + 1, change=spoil)
    expected, _ = train(SIMPLE, model())
    assert_close(params, expected)
    assert [int(metrics(own)["skipped"]) for own in scopes(state).values()] == [1, 1]


@pytest.mark.nightly
def test_gradients_are_clipped_together():
    def clip(grads, _):
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(0.05 / (norm + 1e-6), 1), grads)

    params, _ = train(mechanize(optax.sgd(1.0), scope=PATTERNS, max_grad_norm=0.05), model())
    expected, _ = train(
        mechanize(optax.sgd(1.0), scope=PATTERNS),
        model(),
        change=clip,
    )
    assert_close(params, expected)


@pytest.mark.nightly
def test_readers_take_the_state_of_a_scope():
    tx = mechanize(optax.adamw(1.0), learning_rate=1.0, scope=PATTERNS)
    params, state = train(tx, model())
    with pytest.raises(ValueError, match="there are 2 states of mechanize"):
        scale(state)
    before = {name: float(scale(own)) for name, own in scopes(state).items()}
    _, state = train(tx, params, freeze(state), steps=5)
    assert {name: float(scale(own)) for name, own in scopes(state).items()} == before
    assert float(metrics(scopes(state)["text"])["effective_lr"]) == pytest.approx(before["text"])
    with pytest.raises(ValueError, match="there are no scopes in this"):
        scopes(mechanize(optax.sgd(1.0)).init(params))


@pytest.mark.parametrize(
    ("scope", "reason"), [("group", "optax has no groups"), ({}, "scope must be")]
)
def test_bad_scopes_are_refused(scope, reason):
    with pytest.raises(ValueError, match=reason):
        mechanize(optax.sgd(1.0), scope=scope)


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match=r"no parameter is left for 'a'.*text\.bias"):
        mechanize(optax.sgd(1.0), scope={"a": "nothing.*"}).init(model())


def test_what_is_mechanized_is_refused():
    with pytest.raises(ValueError, match="mechanized already"):
        mechanize(mechanize(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="learning_rate must be the number or the schedule"):
        mechanize(optax.sgd(1.0), learning_rate="x")


@pytest.mark.nightly
def test_scopes_stand_in_a_chain_and_a_scan():
    tx = optax.chain(optax.clip(1.0), mechanize(optax.adamw(1.0), scope=PATTERNS))
    params = model()

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), loss(params)

    (params, state), losses = jax.lax.scan(body, (params, tx.init(params)), length=STEPS)
    assert losses[-1] < losses[0] / 2
    assert min(float(scale(own)) for own in scopes(state).values()) > 0
