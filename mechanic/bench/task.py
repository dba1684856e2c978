"""What is trained: a task names a problem, and builds it anew for each run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mechanic.bench.data import Data, Kind

Budget = Literal["smoke", "short", "full"]  # seconds to see that all runs; minutes; the paper's


@dataclass(frozen=True)
class Setting:
    """What a problem is built for."""

    budget: Budget
    seed: int
    """Of the weights, the batches and whatever else is drawn: seed it from this alone."""
    device: torch.device
    data: Data


@dataclass(frozen=True)
class Problem:
    """One training run's worth of model and data."""

    model: nn.Module
    """On the device, with its first weights."""
    batches: Iterator[Any]
    """Endless; what comes is given to `loss`."""
    loss: Callable[[Any], Tensor]
    """Of a batch, with the model in train mode."""
    evaluate: Callable[[], Mapping[str, float]]
    """The metrics of the model as it is; `train_loss` is one of them, and what is scored. It is
    called with the model in eval mode and gradients off."""
    steps: int
    schedule: Callable[[float], float]
    """The lr's factor, by the fraction of training that is done: from 0 up to, not including, 1."""
    hyperparameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By base ("sgd", "adamw", "lion"): weight_decay, betas, momentum, where not the default."""
    clip: float | None = None
    """Clip the global norm of the gradient."""
    autocast: bool = False
    """Forward in bfloat16 where the device is a GPU."""


@dataclass(frozen=True)
class Task:
    """A row of the tables."""

    suite: str
    name: str
    """Names model and data, so that no two tasks share a name: "resnet18-cifar10"."""
    grids: Mapping[str, Sequence[float]]
    """The bases to compare with, and the learning rates to sweep for each."""
    build: Callable[[Setting], Problem]
    metric: str
    """The one of `evaluate`'s metrics that is shown beside the train loss. Names that end in
    "loss" are better low, all others better high."""
    about: str
    """One line: model, data, schedule."""
    uses: tuple[Kind, str]
    """The data: of what kind, and its name."""
    missing: str = ""
    """Why the task cannot run here and what to do about it; empty where it can."""
    extra_methods: Sequence[str] = ()
    """Methods that only this task has, beyond those that all have."""
    only_methods: Sequence[str] = ()
    """If given, nothing else runs by default: for tasks that ask one question."""


def shuffled(count: int, batch: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Indices of one batch after the other, each epoch in a new order; a short last one is left."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, count)
    while True:
        order = torch.randperm(count, generator=generator).to(device)
        yield from torch.split(order[: count - count % batch], batch)


def cosine(warmup: float = 0.0) -> Callable[[float], float]:
    """Linear from 0 over the fraction `warmup`, then half a cosine down to 0."""

    def factor(done: float) -> float:
        if done < warmup:
            return done / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (1 - warmup))

    return factor


def linear(warmup: float = 0.0) -> Callable[[float], float]:
    """Linear from 0 over the fraction `warmup`, then linear down to 0."""
    return lambda done: done / warmup if done < warmup else (1 - done) / (1 - warmup)


def step_decay(factor: float, at: Sequence[float]) -> Callable[[float], float]:
    """Times `factor` at each of the fractions `at`."""
    return lambda done: float(factor ** sum(done >= place for place in at))


def half_decades(low: int, high: int) -> list[float]:
    """Learning rates from 10 ** low to 10 ** high: 1e-3, 3e-3, 1e-2, …"""
    every = [float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 3)]
    return [*every, float(f"1e{high}")]
