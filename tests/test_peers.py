"""The presets `mechanic-pytorch` and `optax` against the packages they are named after."""

import functools
import itertools
from typing import NamedTuple

import jax
import mechanic_pytorch
import numpy as np
import optax
import pytest
import reference
import torch
from cases import case
from torch import nn

from mechanic.torch import mechanize, tuner

torch.set_num_threads(1)

STEPS, LR = 100, 0.5


class Base(NamedTuple):
    """The same optimizer in torch and in optax."""

    torch: type
    hyper: dict
    optax: optax.GradientTransformation


BASES = {
    "sgd": Base(torch.optim.SGD, {}, optax.sgd(LR)),
    "momentum": Base(torch.optim.SGD, {"momentum": 0.9}, optax.sgd(LR, momentum=0.9)),
    "adamw": Base(torch.optim.AdamW, {"weight_decay": 0.02}, optax.adamw(LR, weight_decay=0.02)),
}
PROBLEMS = {"quadratic": reference.QUADRATIC, "wine": reference.WINE}


def train(problem, make, scale_of):
    """Points and scales under a torch optimizer over two float64 parameters."""
    params = [nn.Parameter(torch.tensor(part)) for part in np.array_split(problem.x0, 2)]
    optimizer = make(params)
    points, scales = [problem.x0], [float(scale_of(optimizer))]
    for t in range(STEPS):
        x = torch.cat([param.detach() for param in params]).numpy()
        for param, part in zip(params, np.array_split(problem.gradient(x, t), 2), strict=True):
            param.grad = torch.tensor(part)
        optimizer.step()
        points.append(torch.cat([param.detach() for param in params]).numpy())
        scales.append(float(scale_of(optimizer)))
    return np.array(points), np.array(scales)


@functools.cache
def ours(problem, base, preset):
    problem, base = PROBLEMS[problem], BASES[base]

    def make(params):
        return mechanize(base.torch(params, lr=LR, **base.hyper), preset=preset)

    return train(problem, make, lambda optimizer: tuner(optimizer).scale)


def mechanic_pytorchs(problem, base):
    problem, base = PROBLEMS[problem], BASES[base]

    def make(params):
        return mechanic_pytorch.mechanize(base.torch)(params, lr=LR, **base.hyper)

    def scale_of(optimizer):  # it has none before its first step
        state = optimizer.state
        return state["_mechanic"]["s"].double().sum() if "_mechanic" in state else 0.0

    return train(problem, make, scale_of)


def optaxs(problem, base):
    problem, base = PROBLEMS[problem], BASES[base]
    with jax.enable_x64(True):
        optimizer = optax.contrib.mechanize(base.optax)
        x = [jax.numpy.asarray(part) for part in np.array_split(problem.x0, 2)]
        state, update = optimizer.init(x), jax.jit(optimizer.update)
        points, scales = [problem.x0], [float(state.s.sum())]
        for t in range(STEPS):
            g = problem.gradient(np.concatenate(x), t)
            updates, state = update(np.array_split(g, 2), state, x)
            x = optax.apply_updates(x, updates)
            points.append(np.concatenate(x))
            scales.append(float(state.s.sum()))
    return np.array(points), np.array(scales)


def assert_same(trajectory, expected, tolerance):
    (points, scales), (expected_points, expected_scales) = trajectory, expected
    assert scales.max() > 1000 * scales[1]
    np.testing.assert_allclose(scales, expected_scales, rtol=tolerance, atol=0)
    errors = np.linalg.norm(points - expected_points, axis=1)
    assert (errors <= tolerance * np.linalg.norm(expected_points, axis=1)).all(), errors.max()


@pytest.fixture
def double():
    """float64 for tensors whose dtype is not given, as those of mechanic-pytorch's tuner are."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


each_peer = pytest.mark.parametrize(
    ("problem", "base"),
    [
        case(problem, base, name=f"{problem}-{base}", by_day=(i + j) % 2 == 0)
        for i, problem in enumerate(PROBLEMS)
        for j, base in enumerate(BASES)
    ],
)


@each_peer
@pytest.mark.usefixtures("double")
def test_mechanic_pytorch(problem, base):
    trajectory = ours(problem, base, "mechanic-pytorch")
    assert_same(trajectory, mechanic_pytorchs(problem, base), 1e-9)


@pytest.mark.parametrize("base", BASES)
def test_mechanic_pytorch_as_it_comes(base):
    # Its tuner rounds to float32, which S then has.
    trajectory = ours("quadratic", base, "mechanic-pytorch")
    assert_same(trajectory, mechanic_pytorchs("quadratic", base), 1e-5)


@each_peer
def test_optax(problem, base):
    assert_same(ours(problem, base, "optax"), optaxs(problem, base), 1e-9)


@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_presets_differ(base):
    presets = ("paper", "mechanic-pytorch", "optax", "default")
    scales = {preset: ours("wine", base, preset)[1][2:] for preset in presets}
    for one, other in itertools.combinations(presets, 2):
        apart = np.abs(scales[one] / scales[other] - 1)
        assert apart.max() > 0.5, (one, other)
        assert np.median(apart) > 0.02, (one, other)
