"""States that go from torch to optax and back: of each base, with schedules, frozen, sharded; and
those that cannot, which are refused before anything is loaded."""

import copy

import jax
import jax.numpy as jnp
import lion_pytorch
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.optim.lr_scheduler import LambdaLR

from mechanic import convert
from mechanic.optax import freeze, mechanize, scale, suggest_lr
from mechanic.optax.readers import find
from mechanic.torch import mechanize as torch_mechanize
from mechanic.torch import tuner

SCHEDULE = optax.cosine_decay_schedule(0.1, 80)


class Line:
    """A linear regression, in torch and in JAX."""

    def __init__(self):
        draw = np.random.default_rng(3)
        self.x = draw.normal(size=(80, 16, 8)).astype(np.float32)
        noise = 0.1 * draw.normal(size=(80, 16, 3))
        self.y = (self.x @ draw.normal(size=(8, 3)) + noise).astype(np.float32)
        self.params = {"b": torch.zeros(3), "w": torch.zeros(8, 3)}
        self.params = {name: torch.nn.Parameter(value) for name, value in self.params.items()}

    def in_jax(self):
        return {name: jnp.array(value.detach().numpy()) for name, value in self.params.items()}

    def train_torch(self, optimizer, first, last, schedule=None):
        scheduler = None
        if schedule is not None:
            scheduler = LambdaLR(optimizer, lambda t: float(schedule(t)) / float(schedule(0)))
        for t in range(first, last):
            optimizer.zero_grad()
            out = torch.tensor(self.x[t]) @ self.params["w"] + self.params["b"]
            torch.nn.functional.mse_loss(out, torch.tensor(self.y[t])).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return optimizer

    def loss(self, params, t):
        out = jnp.asarray(self.x)[t] @ params["w"] + params["b"]
        return jnp.mean((out - jnp.asarray(self.y)[t]) ** 2)

    def train_jax(self, tx, state, first, last):
        def step(carry, t):
            params, state = carry
            updates, state = tx.update(jax.grad(self.loss)(params, t), state, params)
            return (optax.apply_updates(params, updates), state), None

        run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(first, last))[0])
        return run((self.in_jax(), state))

    def load(self, params):
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(torch.tensor(np.asarray(params[name])))


def sgd(params):
    return torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params.values(), lr=0.1)


def two_groups(params):
    groups = [{"params": [params["b"]], "lr": 0.01}, {"params": [params["w"]], "lr": 0.1}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def rmsprop(params, **options):
    return torch.optim.RMSprop(params.values(), lr=0.1, **options)


def trained(make, steps, **options):
    """A problem, and a mechanized torch optimizer that has made some steps."""
    line = Line()
    return line, line.train_torch(torch_mechanize(make(line.params), **options), 0, steps)


BASES = {
    "rmsprop": (rmsprop, optax.rmsprop(0.1, decay=0.99, eps_in_sqrt=False)),
    "adagrad": (
        lambda params: torch.optim.Adagrad(params.values(), lr=0.1),
        optax.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
    ),
    "lion": (
        lambda params: lion_pytorch.Lion(params.values(), lr=0.1, betas=(0.9, 0.99)),
        optax.lion(0.1, weight_decay=0.0),
    ),
    "two-rates": (
        two_groups,
        optax.partition(
            {"slow": optax.adam(0.01), "fast": optax.adam(0.1)}, {"b": "slow", "w": "fast"}
        ),
    ),
}


@pytest.mark.parametrize("base", BASES)
def test_a_run_goes_on_in_the_other_framework(base):
    make, tx = BASES[base][0], mechanize(BASES[base][1])
    whole, expected = trained(make, 40)
    line, optimizer = trained(make, 20)
    state = convert.from_torch(optimizer.state_dict(), tx.init(line.in_jax()))
    params, state = line.train_jax(tx, state, 20, 40)
    assert float(scale(state)) == pytest.approx(float(tuner(expected).scale), rel=1e-2)
    assert float(scale(state)) != pytest.approx(float(tuner(optimizer).scale), rel=0.1)
    line.load(params)
    back = torch_mechanize(make(line.params))
    back.load_state_dict(convert.to_torch(state, back))
    again = convert.from_torch(back.state_dict(), state)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    line.train_torch(back, 40, 60)
    whole.train_torch(expected, 40, 60)
    assert float(tuner(back).scale) == pytest.approx(float(tuner(expected).scale), rel=1e-2)
    for name, param in whole.params.items():
        np.testing.assert_allclose(line.params[name].detach(), param.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(SCHEDULE, momentum=0.9),
        optax.inject_hyperparams(optax.sgd)(SCHEDULE, momentum=0.9),
    ],
    ids=["plain", "injected"],
)
def test_a_schedule_goes_on_where_it_was(tx):
    whole, line = Line(), Line()
    expected = whole.train_torch(torch_mechanize(sgd(whole.params)), 0, 60, SCHEDULE)
    optimizer = line.train_torch(torch_mechanize(sgd(line.params)), 0, 30, SCHEDULE)
    tx = mechanize(tx, learning_rate=SCHEDULE)
    state = convert.from_torch(optimizer.state_dict(), tx.init(line.in_jax()))
    # its rate is the peak, which the scheduler keeps as initial_lr
    assert suggest_lr(state) == pytest.approx(tuner(optimizer).suggest_lr()[0], rel=1e-5)
    params, state = line.train_jax(tx, state, 30, 60)
    assert float(scale(state)) == pytest.approx(float(tuner(expected).scale), rel=1e-2)
    assert suggest_lr(state) == pytest.approx(tuner(expected).suggest_lr()[0], rel=1e-2)
    for name, param in whole.params.items():
        np.testing.assert_allclose(params[name], param.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "tx"),
    [
        (sgd, mechanize(optax.sgd(0.1, momentum=0.9), learning_rate=0.1)),
        (adamw, mechanize(optax.adamw(SCHEDULE))),
    ],
    ids=["rate", "schedule"],
)
def test_every_array_is_its_own(make, tx):
    line, optimizer = trained(make, 12)
    params = line.in_jax()
    state = convert.from_torch(optimizer.state_dict(), tx.init(params))
    before = jax.tree.map(np.array, state)
    line.train_torch(optimizer, 12, 20)  # which writes torch's own tensors
    jax.tree.map(np.testing.assert_array_equal, before, state)
    updates, _ = jax.jit(tx.update, donate_argnums=1)(params, state, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert np.isfinite(updates["w"]).all()


def test_arrays_lie_where_those_of_the_state_do():
    line, optimizer = trained(adamw, 3)
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    params = line.in_jax() | {"w": jax.device_put(line.in_jax()["w"], sharding)}
    target = mechanize(optax.adamw(0.1), learning_rate=0.1).init(params)
    assert target.displacement["w"].sharding == sharding
    state = convert.from_torch(optimizer.state_dict(), target)
    for leaf, own in zip(jax.tree.leaves(target), jax.tree.leaves(state), strict=True):
        assert (leaf.sharding, leaf.committed) == (own.sharding, own.committed)


def test_a_frozen_scale_stays_frozen():
    line, optimizer = trained(adamw, 20)
    tuner(optimizer).freeze()
    tx = mechanize(optax.adamw(0.1))
    state = convert.from_torch(optimizer.state_dict(), tx.init(line.in_jax()))
    _, after = line.train_jax(tx, state, 20, 30)
    assert find(after).frozen
    assert float(scale(after)) == float(scale(state)) > 0

    tuner(optimizer).unfreeze()
    thawed = convert.from_torch(optimizer.state_dict(), state)
    assert not find(thawed).frozen
    optimizer.load_state_dict(convert.to_torch(freeze(thawed), optimizer))
    before = float(tuner(optimizer).scale)
    line.train_torch(optimizer, 30, 40)
    assert tuner(optimizer).frozen
    assert float(tuner(optimizer).scale) == before
    optimizer.load_state_dict(convert.to_torch(thawed, optimizer))
    assert not tuner(optimizer).frozen


OTHERS = {
    "sgd-adamw": (optax.sgd(0.1), adamw, "no mu"),
    "sgd-momentum": (optax.sgd(0.1), sgd, "no trace"),
    "momentum-sgd": (
        optax.sgd(0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params.values(), lr=0.1),
        "a trace",
    ),
    "adam-rmsprop": (optax.adam(0.1), rmsprop, "a mu"),
    "amsgrad": (optax.amsgrad(0.1), adamw, "nu_max"),
    "rmsprop-momentum": (
        optax.rmsprop(0.1, momentum=0.9),
        lambda params: rmsprop(params, momentum=0.9),
        "momentum of RMSprop",
    ),
    "torch-amsgrad": (
        optax.adam(0.1),
        lambda params: torch.optim.Adam(params.values(), lr=0.1, amsgrad=True),
        r"max_exp_avg_sq|amsgrad=True",
    ),
    "torch-centered": (
        optax.rmsprop(0.1),
        lambda params: rmsprop(params, centered=True),
        r"grad_avg|centered=True",
    ),
    "some-otherwise": (
        optax.partition(
            {"adam": optax.adam(0.1), "zero": optax.set_to_zero()}, {"b": "zero", "w": "adam"}
        ),
        adamw,
        r"1 arrays as (mu|nu), where there are 2 parameters",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_base_is_refused(name):
    tx, make, message = OTHERS[name]
    line, optimizer = trained(make, 2)
    before = copy.deepcopy(optimizer.state_dict())
    state = mechanize(tx).init(line.in_jax())
    with pytest.raises(ValueError, match=message):
        convert.from_torch(optimizer.state_dict(), state)
    with pytest.raises(ValueError, match=message):
        convert.to_torch(state, optimizer)
    jax.tree.map(np.testing.assert_array_equal, optimizer.state_dict(), before)


def test_several_scales_are_refused():
    line, optimizer = trained(adamw, 2, scope="tensor")
    params = line.in_jax()
    one = mechanize(optax.adamw(0.1)).init(params)
    several = mechanize(optax.adamw(0.1), scope="tensor").init(params)
    _, plain = trained(adamw, 2)
    for state, other, message in (
        (one, optimizer, r"torch optimizer has 2, for group0\.tensor0, group0\.tensor1"),
        (several, optimizer, r"PartitionState has 2\. .* without scope="),
        (several, plain, r"PartitionState has 2\. .* without scope="),
    ):
        with pytest.raises(ValueError, match=message):
            convert.from_torch(other.state_dict(), state)
        with pytest.raises(ValueError, match=message):
            convert.to_torch(state, other)


def test_what_has_not_moved_yet():
    line, optimizer = trained(sgd, 0)
    tx = mechanize(optax.sgd(0.1, momentum=0.9))
    state = tx.init(line.in_jax())
    with pytest.raises(ValueError, match=r"has made no step\. Start with tx\.init"):
        convert.from_torch(optimizer.state_dict(), state)
    optimizer.load_state_dict(convert.to_torch(state, optimizer))
    line.train_torch(optimizer, 0, 20)  # as if nothing had been loaded
    assert float(tuner(optimizer).scale) == float(tuner(trained(sgd, 20)[1]).scale) > 0

    grads = {"b": jnp.ones(3), "w": jnp.zeros((8, 3))}
    _, after = tx.update(grads, state, line.in_jax())
    one, two = convert.to_torch(after, optimizer)["state"].values()
    assert one.keys() - two.keys() == {"mechanic_displacement"}
    _, after = tx.update(jax.tree.map(jnp.zeros_like, grads), state, line.in_jax())
    with pytest.raises(ValueError, match="no parameter has moved in the 1 steps"):
        convert.to_torch(after, optimizer)


def test_another_tuner_or_model_is_refused_by_to_torch():
    line, optimizer = trained(adamw, 2)
    params, tx = line.in_jax(), optax.adamw(0.1)
    with pytest.raises(ValueError, match=r"betas=\[0\.99\]"):
        convert.to_torch(mechanize(tx, betas=(0.9,)).init(params), optimizer)
    with pytest.raises(ValueError, match="preset='default'"):
        convert.to_torch(mechanize(tx, preset="paper").init(params), optimizer)
    with pytest.raises(ValueError, match="3 arrays, and the optimizer 2 parameters"):
        convert.to_torch(mechanize(tx).init({**params, "z": jnp.ones(2)}), optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("top"), r"incomplete: it lacks top\."),
        (
            lambda saved: saved.update(momentum=1.0),
            r"another version of mechanic: it has momentum,",
        ),
        (lambda saved: saved.pop("preset"), r"incomplete: it lacks preset\."),
    ],
)
def test_the_tuner_of_another_version_is_refused(change, message):
    line, optimizer = trained(adamw, 2)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["mechanic"] = dict(group["mechanic"])
    change(saved["param_groups"][0]["mechanic"])
    with pytest.raises(ValueError, match=message):
        convert.from_torch(saved, mechanize(optax.adamw(0.1)).init(line.in_jax()))
