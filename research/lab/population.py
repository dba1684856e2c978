"""Many training runs at once: the members of a population differ in rule, constants, lr or seed.

All members are rows of one matrix, `x`, and `torch.func.vmap` takes their gradients together; on a
GPU a step is one CUDA graph. So a rule keeps what it remembers in tensors that it changes in place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

Batch = tuple[Tensor, ...]
Loss = Callable[[Tensor, Batch, bool], Tensor]  # of a flat vector; whether it is training
Schedule = Callable[[float], float]  # of the part of training that is over

WARM_UP = 3  # steps before a CUDA graph is captured
CHUNK = 512  # examples that are evaluated at once
MEMBERS = 16  # members that are evaluated at once


class Layout:
    """Where each parameter lies in one flat vector, and what it starts from."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.spreads: list[tuple[float, float]] = []

    def add(self, *shape: int, std: float = 0.0, value: float = 0.0) -> None:
        """A parameter that starts as noise of deviation `std`, or else as `value`."""
        self.shapes.append(shape)
        self.spreads.append((std, value))

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters, in the order in which they were added."""
        parts = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def first(self, seed: int) -> Tensor:
        """What training starts from."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for shape, (std, value) in zip(self.shapes, self.spreads, strict=True):
            count = math.prod(shape)
            noise = torch.randn(count, generator=generator) * std if std else None
            parts.append(torch.full((count,), value) if noise is None else noise)
        return torch.cat(parts)


@dataclass
class Problem:
    """What is trained, and how, but for the learning rate."""

    layout: Layout
    loss: Loss
    data: Batch
    batch: int
    steps: int
    schedule: Schedule
    base: str
    lrs: Sequence[float]
    """What a sweep tries."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The base's: momentum, betas, weight_decay."""
    clip: float = math.inf
    """The most that the norm of a gradient may be."""
    evals: int = 20_000
    """The loss that counts is that on so many of the training examples."""
    first: Tensor | None = None
    """Pretrained weights, to start from."""

    def start(self, seed: int) -> Tensor:
        return self.layout.first(seed) if self.first is None else self.first.clone()

    def indices(self, seed: int) -> Tensor:
        """The examples of each step: epochs in random order, without the incomplete batches."""
        generator = torch.Generator().manual_seed(1000 + seed)
        count = len(self.data[0])
        batch = min(self.batch, count)
        batches: list[Tensor] = []
        while len(batches) < self.steps:
            order = torch.randperm(count, generator=generator)
            batches += order[: count // batch * batch].view(-1, batch)
        return torch.stack(batches[: self.steps])


class Base:
    """The base optimizers, over a population."""

    def __init__(self, problem: Problem, x: Tensor) -> None:
        self.kind, self.options = problem.base, problem.options
        self.first, self.second = torch.zeros_like(x), torch.zeros_like(x)
        self.steps = torch.zeros((), device=x.device)

    def update(self, x: Tensor, g: Tensor, factor: Tensor) -> Tensor:
        """What it would add to x at lr 1, times the schedule's factor."""
        self.steps += 1
        decay = self.options.get("weight_decay", 0.0)
        if self.kind == "sgd":  # here decay is part of the gradient
            return -factor * self._sgd(g + decay * x if decay else g)
        u: Tensor = getattr(self, f"_{self.kind}")(g)
        return -factor * (u + decay * x if decay else u)

    def _sgd(self, g: Tensor) -> Tensor:
        return self.first.mul_(0.9).add_(g)

    def _adamw(self, g: Tensor) -> Tensor:
        beta1, beta2 = self.options.get("betas", (0.9, 0.999))
        self.first.lerp_(g, 1 - beta1)
        self.second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        first: Tensor = self.first / (1 - beta1**self.steps)
        second: Tensor = self.second / (1 - beta2**self.steps)
        return first / (second.sqrt() + 1e-8)

    def _lion(self, g: Tensor) -> Tensor:
        u = torch.sign(self.first * 0.9 + g * (1 - 0.9))
        self.first.lerp_(g, 1 - 0.99)
        return u

    def _rmsprop(self, g: Tensor) -> Tensor:
        self.second.mul_(0.99).addcmul_(g, g, value=0.01)
        return g / (self.second.sqrt() + 1e-8)

    def _adagrad(self, g: Tensor) -> Tensor:
        self.second.addcmul_(g, g)
        return g / (self.second.sqrt() + 1e-10)


class Rule(Protocol):
    """What applies the base's updates. It has variants, each of which is run with every seed."""

    names: list[str]

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        """Forget the past. Member v·seeds + k is variant v with seed k."""

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        """Change x in place, by the base's update u; returns the scales that it was given."""


@dataclass
class Outcome:
    """What became of a population."""

    start: float
    """The loss before."""
    final: Tensor
    """The loss after, by variant and seed."""
    scales: Tensor
    """By step, variant and seed."""
    weights: Tensor
    """By member."""


def run(problem: Problem, rule: Rule, seeds: Sequence[int]) -> Outcome:
    """Train a member for each variant of the rule and each seed."""
    variants, steps, device = len(rule.names), problem.steps, problem.data[0].device
    torch.manual_seed(0)  # dropout draws from it
    x = torch.stack([problem.start(seed) for seed in seeds]).to(device).repeat(variants, 1)
    indices = torch.stack([problem.indices(seed) for seed in seeds], 1).to(device)
    factors = torch.tensor([problem.schedule((k + 0.5) / steps) for k in range(steps)])
    factors = factors.to(device)
    scales = torch.zeros(steps, len(x), device=device)
    at = torch.zeros(1, dtype=torch.long, device=device)
    gradient = vmap(grad_and_value(problem.loss), in_dims=(0, 0, None), randomness="different")
    base = Base(problem, x)
    rule.begin(x, len(seeds), steps)

    def step() -> None:
        rows = indices.index_select(0, at)[0]  # seeds, batch
        batch = tuple(part[rows].repeat(variants, *[1] * part.dim()) for part in problem.data)
        g = torch.nan_to_num(gradient(x, batch, True)[0], 0.0, 0.0, 0.0)
        if problem.clip < math.inf:
            g = g * (problem.clip / g.norm(dim=1, keepdim=True).clamp(min=problem.clip))
        u = base.update(x, g, factors.index_select(0, at)[0])
        scales.index_copy_(0, at, rule.step(x, g, u).float()[None])
        at.add_(1)

    start = float(evaluate(problem, x[: len(seeds)]).mean())
    repeat(step, steps, device)
    final = evaluate(problem, x).view(variants, len(seeds)).cpu()
    return Outcome(start, final, scales.view(steps, variants, len(seeds)).cpu(), x)


def repeat(step: Callable[[], None], steps: int, device: torch.device) -> None:
    """Run it so many times; on a GPU as a CUDA graph."""
    if device.type != "cuda":
        for _ in range(steps):
            step()
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps - WARM_UP):
        graph.replay()


@torch.no_grad()
def evaluate(problem: Problem, x: Tensor) -> Tensor:
    """The loss of each member on the first `evals` examples."""
    count = min(problem.evals, len(problem.data[0]))
    loss = vmap(problem.loss, in_dims=(0, None, None))
    total = torch.zeros(len(x), device=x.device)
    for first in range(0, count, CHUNK):
        rows = slice(first, min(count, first + CHUNK))
        batch = tuple(part[rows] for part in problem.data)
        losses = torch.cat([loss(members, batch, False) for members in torch.split(x, MEMBERS)])
        total += losses * (rows.stop - rows.start)
    return total / count
