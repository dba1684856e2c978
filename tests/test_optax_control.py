"""The learning rate to paste, and a scale that is held: as in torch, from states alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax_runs import double
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mechanic.optax import freeze, mechanize, scale, suggest_lr, unfreeze
from mechanic.optax.readers import find
from mechanic.torch import mechanize as torch_mechanize
from mechanic.torch import tuner

STEPS, LR = 60, 0.3
FROZEN = range(25, 40)


def shape(t):
    """A slow warm-up over 20 steps, then down to a tenth."""
    return jnp.where(t < 20, (t + 15.3) / 35.3, 1 - 0.9 * (t - 20) / (STEPS - 20))


def schedule(t):
    return LR * shape(t)


def test_freeze_and_suggest_as_in_torch():
    draw = np.random.default_rng(0)
    x0 = draw.normal(size=(6, 4)).astype(np.float32)
    param = nn.Parameter(torch.tensor(x0))
    optimizer = torch_mechanize(torch.optim.SGD([param], lr=LR, momentum=0.9))
    scheduler = LambdaLR(optimizer, lambda t: float(shape(t)))
    own = mechanize(optax.sgd(schedule, momentum=0.9), learning_rate=schedule)
    tx = optax.chain(optax.clip_by_global_norm(1e6), own)
    x = jnp.asarray(x0)
    state, update = tx.init(x), jax.jit(tx.update)
    scales, suggested = [], []
    for t in range(STEPS):
        if t == FROZEN.start:
            tuner(optimizer).freeze()
            state = jax.jit(freeze)(state)
        if t == FROZEN.stop:
            tuner(optimizer).unfreeze()
            state = unfreeze(state)
        grad = (param.detach().numpy() - 2 + draw.normal(size=x0.shape)).astype(np.float32)
        param.grad = torch.tensor(grad)
        optimizer.step()
        scheduler.step()
        updates, state = update(jnp.asarray(grad), state, x)
        x = optax.apply_updates(x, updates)
        scales.append((float(tuner(optimizer).scale), float(scale(state))))
        suggested.append((*tuner(optimizer).suggest_lr(), suggest_lr(state)))
    theirs, ours = np.array(scales).T
    assert theirs.max() > 20 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    held = slice(FROZEN.start - 1, FROZEN.stop)
    assert len(set(ours[held])) == 1
    assert len(set(ours[FROZEN.stop - 1 :])) > 10
    np.testing.assert_allclose(x, param.detach(), rtol=1e-3, atol=1e-4)
    # Before its peak, the warm-up is not known to become higher.
    theirs, ours = np.array(suggested[20:]).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert update._cache_size() == 1  # a frozen state is of the same type


def gradient(x, t):
    return x - 2 + jax.random.normal(jax.random.fold_in(jax.random.key(0), t), x.shape, x.dtype)


def run(tx, steps=STEPS):
    x = jnp.zeros(7)

    def step(carry, t):
        x, state = carry
        updates, state = tx.update(gradient(x, t), state, x)
        return (optax.apply_updates(x, updates), state), scale(state)

    last, scales = jax.jit(lambda own: jax.lax.scan(step, own, jnp.arange(steps)))((x, tx.init(x)))
    return np.asarray(scales), last[1]


def injected(rate):
    return optax.inject_hyperparams(optax.adamw)(learning_rate=rate)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["given", "injected", "constant"])
def test_the_suggestion_is_the_mean_scale_by_learning_rate(kind):
    t = np.arange(STEPS)
    rates = np.asarray(schedule(t), np.float64) if kind != "constant" else np.full(STEPS, LR)
    with double():
        if kind == "given":
            tx = mechanize(optax.adamw(schedule), learning_rate=schedule)
        elif kind == "injected":
            tx = optax.chain(mechanize(injected(schedule)), optax.identity())
        else:
            tx = mechanize(optax.adamw(LR))
        scales, state = run(tx)
        found = suggest_lr(state, LR) if kind == "constant" else suggest_lr(state)
    assert scales.max() > 50 * scales[0]
    assert found == pytest.approx((scales * rates).sum() / rates.sum() * LR, rel=1e-6)
    assert found != pytest.approx(scales[-1] * LR, rel=0.05)  # that would be too easy


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_frozen_step_is_the_plain_one_at_the_learned_rate(name):
    base = getattr(optax, name)
    _, state = run(mechanize(base(1.0)))
    x = jnp.linspace(-1.0, 1.0, 7)
    plain = base(scale(state))
    plain_state, held = state.base, freeze(state)
    own, theirs, update = x, x, jax.jit(mechanize(base(1.0)).update)
    for t in range(20):
        updates, held = update(gradient(own, t), held, own)
        own = optax.apply_updates(own, updates)
        updates, plain_state = plain.update(gradient(theirs, t), plain_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert float(scale(held)) == float(scale(state)) > 0.01
    np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)
    assert int(held.counts.steps) == STEPS + 20


def test_states_without_steps_and_what_is_refused():
    x = jnp.ones(3)
    state = mechanize(optax.sgd(0.5)).init(x)
    with pytest.raises(ValueError, match=r"got learning_rate=None. Call mechanize\(tx, learning_r"):
        suggest_lr(state)
    with pytest.raises(ValueError, match=r"got learning_rate=<function schedule"):
        suggest_lr(state, schedule)
    assert suggest_lr(state, 0.5) == 0.0  # nothing is learned
    assert suggest_lr(mechanize(optax.sgd(0.5), learning_rate=0.5).init(x)) == 0.0
    with pytest.raises(ValueError, match="there is no state of mechanize"):
        freeze(optax.sgd(0.5).init(x))
    parts = {"one": mechanize(optax.sgd(1.0)), "two": mechanize(optax.adamw(1.0))}
    both = optax.multi_transform(parts, ["one", "two"]).init([x, x])
    for name in parts:
        assert bool(find(freeze(both).inner_states[name]).frozen)
        assert not bool(find(unfreeze(freeze(both)).inner_states[name]).frozen)
        assert not bool(find(both.inner_states[name]).frozen)


@pytest.mark.nightly
def test_freeze_under_vmap():
    tx = mechanize(optax.sgd(1.0))
    many = jax.vmap(tx.init)(jnp.ones((2, 3)))
    assert freeze(many).frozen.shape == (2,)
    one_of_two = many._replace(frozen=jnp.array([True, False]))
    for t in range(3):
        grads = jnp.ones((2, 3)) * (1 + t)
        _, one_of_two = jax.vmap(tx.update)(grads, one_of_two, jnp.ones((2, 3)))
    assert scale(one_of_two)[0] == 0 < scale(one_of_two)[1]
