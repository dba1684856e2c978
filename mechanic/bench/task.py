"""What is trained: a task names a problem, and builds it again for each run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mechanic.bench.data import Data, DataKind

Budget = Literal["smoke", "short", "full"]
"""The length of the runs: seconds, only to see that they work; minutes; as long as in the paper."""

Library = Literal["torch", "optax"]
"""The library whose optimizers train a task."""


@dataclass(frozen=True)
class BuildSettings:
    """What `Task.build` needs to know to build a problem."""

    budget: Budget
    seed: int
    """Everything random must follow from this seed alone: the weights, the batches and the rest."""
    device: torch.device
    data: Data


class Opponent(NamedTuple):
    """A network that is trained against the model of a problem, by an optimizer of its own."""

    model: nn.Module
    loss: Callable[[Any], Tensor]
    """The loss of a batch, the same batch that the model is trained on after it."""


@dataclass(frozen=True)
class Problem:
    """The model and the data of one training run."""

    model: nn.Module
    """The model, on the device, with its initial weights. Parameters that need no gradient are
    frozen: no method sees them."""
    batches: Iterator[Any]
    """Endless; each batch is passed to `loss`."""
    loss: Callable[[Any], Tensor]
    """The loss of a batch; called with the model in train mode."""
    evaluate: Callable[[], Mapping[str, float]]
    """The metrics of the model as it is now. One of them must be `train_loss`, which is scored.
    Called with the model in eval mode and with gradients off."""
    steps: int
    schedule: Callable[[float], float]
    """The factor of the lr, by the fraction of training that is done, at least 0 and below 1."""
    hyperparameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By base ("sgd", "adamw", "lion"): weight_decay, betas, momentum, where not the default."""
    clip: float | None = None
    """The global norm to which gradients are clipped; None for no clipping."""
    autocast: bool = False
    """Whether the forward pass runs in bfloat16 on a GPU."""
    ema: float | None = None
    """The decay of the moving average of the weights, which is evaluated at the end in their place;
    None for no average. A method that averages by itself is evaluated with its own average."""
    opponent: Opponent | None = None
    """In each step it is trained first, by the same method and with the same lr."""

    @property
    def players(self) -> list["Problem"]:
        """One problem for each optimizer, in the order in which they step. The last is this one."""
        if self.opponent is None:
            return [self]
        model, loss = self.opponent
        return [replace(self, model=model, loss=loss, opponent=None, ema=None), self]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class OptaxProblem:
    """The same for a transformation of optax: a model in JAX is a function of its parameters."""

    params: Any
    """A tree of arrays, on the device."""
    batches: Iterator[Any]
    """Endless; each batch, of NumPy arrays, is passed to `loss`."""
    loss: Callable[[Any, Any], Any]
    """The loss of parameters on a batch; pure, to be compiled."""
    evaluate: Callable[[Any], Mapping[str, float]]
    """The metrics of parameters, as those of `Problem`."""
    steps: int
    schedule: Callable[[float], float]
    hyperparameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    clip: float | None = None


@dataclass(frozen=True)
class Task:
    """A problem with a name, which the report shows as one or more rows: one for each base."""

    suite: str
    name: str
    """Names the model and the data, so that no two tasks share a name: "resnet18-cifar10"."""
    grids: Mapping[str, Sequence[float]]
    """The bases to compare with, and the learning rates to sweep for each."""
    build: Callable[[BuildSettings], Problem | OptaxProblem]
    metric: str
    """The metric that is shown beside the train loss. Low is better if its name ends in "loss",
    high is better otherwise."""
    about: str
    """One line for `--list`: model, data, schedule."""
    uses: tuple[DataKind, str] | None
    """The kind of the data, and its name; None if the task needs none."""
    missing: str = ""
    """Why the task cannot run here and what to do about it; empty if it can run."""
    extra_methods: Sequence[str] = ()
    """Methods that run on this task in addition to those that run on all tasks."""
    only_methods: Sequence[str] = ()
    """If given, only these methods run by default: for tasks that answer one question."""
    library: Library = "torch"
    """What trains it: optax if `build` returns an `OptaxProblem`."""


def shuffled(count: int, batch: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """The indices of each batch, in a new order in each epoch, without an incomplete last batch."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, count)
    while True:
        order = torch.randperm(count, generator=generator).to(device)
        yield from torch.split(order[: count - count % batch], batch)


def cosine(warmup: float = 0.0) -> Callable[[float], float]:
    """Linear from 0 over the fraction `warmup` of training, then half a cosine down to 0."""

    def factor(done: float) -> float:
        if done < warmup:
            return done / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (1 - warmup))

    return factor


def linear(warmup: float = 0.0) -> Callable[[float], float]:
    """Linear from 0 over the fraction `warmup` of training, then linear down to 0."""
    return lambda done: done / warmup if done < warmup else (1 - done) / (1 - warmup)


def constant(warmup: float = 0.0) -> Callable[[float], float]:
    """Linear from 0 over the fraction `warmup` of training, then 1 to the end."""
    return lambda done: done / warmup if done < warmup else 1.0


def step_decay(factor: float, at: Sequence[float]) -> Callable[[float], float]:
    """Multiplied by `factor` at each of the fractions `at` of training."""
    return lambda done: float(factor ** sum(done >= fraction for fraction in at))


def half_decades(low: int, high: int) -> list[float]:
    """Learning rates from 10 ** low to 10 ** high: 1e-3, 3e-3, 1e-2, …"""
    rates = [float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 3)]
    return [*rates, float(f"1e{high}")]
