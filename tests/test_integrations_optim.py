"""The classes of `mechanic.torch.optim`: mechanized optimizers for trainers that take a name."""

import copy
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from mechanic.torch import mechanize, optim, tuner

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
)
GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randn(6, 4, generator=GENERATOR)
ARGUMENTS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}
BY_DAY = ("AdamW", "LBFGS", "SGD")


def by_name(path: str) -> Any:
    """A class by its path, as trainers look one up."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def train(make: Any, steps: int = 25) -> tuple[torch.Tensor, Any]:
    weights = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = make([weights])
    descend(weights, optimizer, steps)
    return weights, optimizer


def descend(weights: torch.nn.Parameter, optimizer: Optimizer, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((weights - TARGET) ** 2).sum()
        loss.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            weights.grad = weights.grad.to_sparse(1)
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_is_there_and_is_mechanized(name):
    named, base = by_name(f"mechanic.torch.optim.{name}"), getattr(torch.optim, name)
    optimizer = named([torch.nn.Parameter(torch.zeros(6, 4))])
    assert isinstance(optimizer, base)
    assert (named.__module__, named.__qualname__) == ("mechanic.torch.optim", name)
    assert pickle.loads(pickle.dumps(named)) is named


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in NAMES],
)
def test_a_step_is_that_of_the_base_mechanized(name):
    named, base = getattr(optim, name), getattr(torch.optim, name)
    arguments = {"lr": 0.5, **ARGUMENTS.get(name, {})}
    weights, optimizer = train(lambda params: named(params, **arguments))
    expected, mechanized = train(lambda params: mechanize(base(params, **arguments)))
    _, early = train(lambda params: named(params, **arguments), steps=2)
    assert torch.equal(weights, expected)
    assert tuner(optimizer).scale == tuner(mechanized).scale != tuner(early).scale
    assert type(tuner(optimizer).detach()) is base


@pytest.mark.parametrize("restore", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_pickles_and_checkpoints_go_on_with_their_options(restore):
    options = {"preset": "paper", "max_scale": 0.003, "s_init": 1e-4}
    prefixed = {f"mechanic_{name}": value for name, value in options.items()}
    weights, optimizer = train(lambda params: optim.AdamW(params, lr=1.0, **prefixed))
    copied, restored = restore((weights, optimizer))
    assert type(restored) is optim.AdamW
    assert restored._options.preset == "paper"

    expected, mechanized = train(
        lambda params: mechanize(torch.optim.AdamW(params, lr=1.0), **options)
    )
    loaded = torch.nn.Parameter(expected.detach().clone())
    other = optim.AdamW([loaded], lr=1.0, **prefixed)
    other.load_state_dict(copy.deepcopy(mechanized.state_dict()))
    assert float(tuner(optimizer).scale) == pytest.approx(0.003)
    for x, stepped in ((weights, optimizer), (copied, restored), (loaded, other)):
        descend(x, stepped, 20)
    descend(expected, mechanized, 20)
    for x in (weights, copied, loaded):
        assert torch.equal(x, expected)


def test_the_betas_of_the_base_and_those_of_the_tuner():
    def make(params):
        return optim.AdamW(params, lr=1.0, betas=(0.8, 0.9), mechanic_betas=(0.9, 0.99))

    _, optimizer = train(make)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer._options.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_scale": 1.0}, TypeError, "SGD has no argument max_scale.*Write mechanic_max_scale="),
        ({"mechanic_max": 1.0}, TypeError, "SGD has no argument mechanic_max.*mechanic_max_scale,"),
        ({"beta": 1.0}, TypeError, r"SGD has no argument beta.*those of torch\.optim\.SGD"),
        ({"mechanic_max_scale": -1}, ValueError, "max_scale must be a number above 0, got -1"),
        ({"momentum": -1.0}, ValueError, "Invalid momentum"),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(given, error, message):
    with pytest.raises(error, match=message):
        optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, **given)


def test_the_signature_names_all_that_can_be_given():
    shown = inspect.signature(optim.AdamW).parameters
    base = inspect.signature(torch.optim.AdamW).parameters
    options = [p for p in inspect.signature(mechanize).parameters if p != "optimizer"]
    assert list(shown) == [*base, *(f"mechanic_{name}" for name in options)]
    assert shown["mechanic_displacement"].default == "float32"


def test_a_subclass_that_a_user_writes():
    class Own(optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=1.0, mechanic_max_scale=0.01)

    weights, optimizer = train(Own)
    assert type(optimizer) is Own
    assert float(tuner(optimizer).scale) == pytest.approx(0.01)
    assert type(tuner(optimizer).detach()) is torch.optim.AdamW
    assert weights.abs().max() > 0
