"""One algorithm in two frameworks: the same scales on the same gradients, states that convert into
each other, and packages that do not need each other."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax_runs import double, row
from torch import nn

from mechanic import convert
from mechanic.optax import mechanize, scale, vectors
from mechanic.optax.readers import find
from mechanic.torch import mechanize as torch_mechanize
from mechanic.torch import tuner
from mechanic.torch.vectors import dither

BASES = {
    "adamw": (
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.02),
        optax.adamw(0.1, weight_decay=0.02),
    ),
    "momentum": (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        optax.sgd(0.1, momentum=0.9),
    ),
    "rmsprop": (
        lambda params: torch.optim.RMSprop(params, lr=0.1),
        optax.rmsprop(0.1, decay=0.99, eps_in_sqrt=False),
    ),
    "adagrad": (
        lambda params: torch.optim.Adagrad(params, lr=0.1),
        optax.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
    ),
}


def gradients(draw, x, t):
    """Of ½‖x − 2‖² with noise, and of the opposite for a while, so that Δ is forgotten."""
    sign = -1.0 if 12 <= t < 24 else 1.0
    return (sign * (x - 2 + draw.normal(size=x.shape))).astype(np.float32)


@pytest.mark.parametrize(
    ("base", "preset"),
    [
        row("adamw", "default"),
        *(row("momentum", preset, by_day=False) for preset in ("default", "paper", "optax")),
        row("adamw", "mechanic-pytorch", by_day=False),
    ],
)
def test_the_same_scales_on_the_same_gradients(base, preset):
    draw, (make, tx) = np.random.default_rng(0), BASES[base]
    x0 = [draw.normal(size=(7, 5)).astype(np.float32), draw.normal(size=6).astype(np.float32)]
    params = [nn.Parameter(torch.tensor(x)) for x in x0]
    optimizer = torch_mechanize(make(params), preset=preset)
    tx = mechanize(tx, preset=preset)
    xs = [jnp.asarray(x) for x in x0]
    state, update = tx.init(xs), jax.jit(tx.update)
    scales = []
    for t in range(100):
        grads = [gradients(draw, param.detach().numpy(), t) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
        updates, state = update([jnp.asarray(grad) for grad in grads], state, xs)
        xs = optax.apply_updates(xs, updates)
        scales.append((float(tuner(optimizer).scale), float(scale(state))))
    theirs, ours = np.array(scales).T
    assert theirs.max() > 50 * theirs[theirs > 0][0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    for param, x in zip(params, xs, strict=True):
        np.testing.assert_allclose(x, param.detach(), rtol=1e-3, atol=1e-3)
    saved = optimizer.state_dict()["param_groups"][0]["mechanic"]
    for name, value in find(state).numbers.tuner._asdict().items():
        # D is a difference of sums, of which much has cancelled
        np.testing.assert_allclose(value, saved[name], rtol=1e-2, err_msg=name)


@pytest.mark.parametrize("dtype", [row("bfloat16"), row("float16", by_day=False)])
def test_rounding_is_the_same_bit_for_bit(dtype):
    draw = np.random.default_rng(1)
    point = (draw.normal(size=(13, 7)) * 10.0 ** draw.uniform(-9, 4, (13, 7))).astype(np.float32)
    point[0, :3] = 0.0, np.inf, 1.0
    for step in (1, 77_777):
        for later in (False, True):
            theirs = dither(
                torch.tensor(point), getattr(torch, dtype), torch.tensor(step), later=later
            )
            ours = vectors.dither(
                jnp.asarray(point), jnp.dtype(dtype), jnp.int32(step), later=later
            )
            is_finite = np.isfinite(point)  # torch makes NaN of an infinite point, and skips it
            np.testing.assert_array_equal(
                np.asarray(ours, np.float32)[is_finite], theirs.float().numpy()[is_finite]
            )
            assert np.isinf(np.asarray(ours, np.float32)[0, 1])


class Mlp:
    """The same network in torch and in JAX, where kernels are transposed."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        draw = np.random.default_rng(2)
        self.x = draw.normal(size=(100, 32, 8)).astype(np.float32)
        self.y = np.sin(self.x.sum(-1, keepdims=True)) + 0.1 * draw.normal(size=(100, 32, 1))
        self.y = self.y.astype(np.float32)

    @staticmethod
    def to_jax(arrays):
        w1, b1, w2, b2 = arrays
        return {"in": {"kernel": w1.T, "bias": b1}, "out": {"kernel": w2.T, "bias": b2}}

    @staticmethod
    def to_torch(tree):
        one, two = tree["in"], tree["out"]
        return [one["kernel"].T, one["bias"], two["kernel"].T, two["bias"]]

    def params(self):
        return jax.tree.map(
            jnp.asarray, self.to_jax([p.detach().numpy().copy() for p in self.model.parameters()])
        )

    def load(self, params):
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), self.to_torch(params), strict=True):
                param.copy_(torch.tensor(np.asarray(value)))

    def train_torch(self, optimizer, steps):
        for t in steps:
            optimizer.zero_grad()
            x, y = torch.tensor(self.x[t]), torch.tensor(self.y[t])
            nn.functional.mse_loss(self.model(x), y).backward()
            optimizer.step()

    def loss(self, params, t):
        hidden = jnp.tanh(jnp.asarray(self.x)[t] @ params["in"]["kernel"] + params["in"]["bias"])
        out = hidden @ params["out"]["kernel"] + params["out"]["bias"]
        return jnp.mean((out - jnp.asarray(self.y)[t]) ** 2)

    def train_jax(self, tx, state, params, first, last):
        def step(carry, t):
            params, state = carry
            updates, state = tx.update(jax.grad(self.loss)(params, t), state, params)
            return (optax.apply_updates(params, updates), state), None

        run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(first, last))[0])
        return run((params, state))


def saved_tuner(optimizer):
    return optimizer.state_dict()["param_groups"][0]["mechanic"]


@pytest.mark.nightly
@pytest.mark.parametrize("base", BASES)
def test_an_mlp_trained_half_in_each(base):
    make, tx = BASES[base]
    whole = Mlp()
    expected = torch_mechanize(make(whole.model.parameters()))
    whole.train_torch(expected, range(80))

    mlp, tx = Mlp(), optax.chain(optax.clip_by_global_norm(1e6), mechanize(tx))
    optimizer = torch_mechanize(make(mlp.model.parameters()))
    mlp.train_torch(optimizer, range(40))
    params = mlp.params()
    state = convert.from_torch(optimizer.state_dict(), tx.init(params), arrange=mlp.to_jax)
    _assert_carried(saved_tuner(optimizer), state, np.float32)

    params, state = mlp.train_jax(tx, state, params, 40, 80)
    assert float(scale(state)) == pytest.approx(float(tuner(expected).scale), rel=1e-2)
    for param, value in zip(whole.model.parameters(), mlp.to_torch(params), strict=True):
        np.testing.assert_allclose(value, param.detach(), rtol=1e-2, atol=1e-3)

    mlp.load(params)
    back = torch_mechanize(make(mlp.model.parameters()))
    back.load_state_dict(convert.to_torch(state, back, arrange=mlp.to_torch))
    _assert_carried(saved_tuner(back), state, np.float32)
    again = convert.from_torch(back.state_dict(), state, arrange=mlp.to_jax)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    before = float(tuner(back).scale)
    mlp.train_torch(back, range(80, 100))
    assert float(tuner(back).scale) != before
    whole.train_torch(expected, range(80, 100))
    assert float(tuner(back).scale) == pytest.approx(float(tuner(expected).scale), rel=5e-2)


def _assert_carried(saved, state, dtype):
    """Every scalar of a tuner is the same bit for bit, in the dtype that JAX has it in."""
    own = find(state)
    values = own.numbers._asdict() | own.counts._asdict()
    values |= values.pop("tuner")._asdict()
    names = values.keys() & saved.keys()
    assert len(names) > 15
    for name in names:
        kind = values[name].dtype
        assert kind in (dtype, np.int32)
        np.testing.assert_array_equal(np.asarray(saved[name], kind), values[name], name)


def test_in_float64_no_bit_is_lost_in_either_direction():
    mlp = Mlp()
    optimizer = torch_mechanize(BASES["adamw"][0](mlp.model.parameters()), preset="paper")
    mlp.train_torch(optimizer, range(30))
    with double():
        tx = mechanize(BASES["adamw"][1], preset="paper")
        state = convert.from_torch(
            optimizer.state_dict(), tx.init(mlp.params()), arrange=mlp.to_jax
        )
        _assert_carried(saved_tuner(optimizer), state, np.float64)
        back = convert.to_torch(state, optimizer, arrange=mlp.to_torch)
    assert back["param_groups"][0]["mechanic"] == saved_tuner(optimizer)
    for own, other in zip(
        optimizer.state_dict()["state"].values(), back["state"].values(), strict=True
    ):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_what_does_not_fit_is_refused():
    mlp = Mlp()
    optimizer = torch_mechanize(BASES["adamw"][0](mlp.model.parameters()))
    mlp.train_torch(optimizer, range(2))
    saved, params = optimizer.state_dict(), mlp.params()
    state = mechanize(BASES["adamw"][1]).init(params)
    with pytest.raises(ValueError, match=r"has shape .* arrange="):
        convert.from_torch(saved, state)
    with pytest.raises(ValueError, match=r"has shape .* arrange="):
        convert.to_torch(state, optimizer)
    others = {
        "preset='default'": mechanize(BASES["adamw"][1], preset="paper"),
        "keeps no mu": mechanize(optax.sgd(0.1)),
        "betas": mechanize(BASES["adamw"][1], betas=(0.9,)),
    }
    for message, tx in others.items():
        with pytest.raises(ValueError, match=message):
            convert.from_torch(saved, tx.init(params), arrange=mlp.to_jax)
    plain = torch.optim.AdamW(mlp.model.parameters())
    with pytest.raises(ValueError, match="plain optimizer"):
        convert.from_torch(plain.state_dict(), state)
    radam = torch_mechanize(torch.optim.RAdam(mlp.model.parameters()))
    with pytest.raises(ValueError, match="RAdam"):
        convert.to_torch(state, radam, arrange=mlp.to_torch)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import jax, jax.numpy as jnp, optax
from mechanic import convert
from mechanic.optax import freeze, mechanize, scale, suggest_lr
tx = mechanize(optax.sgd(1.0))
x = jnp.ones(3)
state = tx.init(x)
update = jax.jit(tx.update)
updates, state = update(x - 2, state, x)
updates, after = update(x - 2, freeze(state), x)
assert scale(after) == scale(state) > 0
assert abs(suggest_lr(after, 1.0) / scale(after) - 1) < 1e-6
"""
WITHOUT_JAX = """
import sys
sys.modules["jax"] = sys.modules["optax"] = None
import mechanic.torch, mechanic.convert
import mechanic.cli
"""


@pytest.mark.parametrize("script", [WITHOUT_TORCH, WITHOUT_JAX], ids=["torch", "jax"])
def test_one_framework_does_without_the_other(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
