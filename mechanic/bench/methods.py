"""What trains a problem: the bases of a sweep, Mechanic over each, the learning-rate-free peers.

A method is one row of `METHODS`. Peers are set up as their READMEs recommend; each gets the task's
schedule unless its authors say that it needs none.
"""

import contextlib
import importlib.metadata
import io
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.bench.record import Kind
from mechanic.bench.task import Problem, Task
from mechanic.torch import mechanize, tuner

BASES = ("sgd", "adamw", "lion")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}


def version(package: str) -> str | None:
    """What is installed of a package, None if nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Live:
    """A method at work on a problem."""

    optimizer: Optimizer
    rate: Callable[[], float]
    """The lr in force now, schedule included; NaN if the method has none to tell."""
    scheduled: bool = True
    """Whether the task's schedule is set on the optimizer."""
    after_step: Callable[[], None] = _nothing
    before_evaluation: Callable[[], None] = _nothing
    """Puts the weights that the method would ship into the model."""


Build = Callable[[Problem, str, float], Live]  # of a problem, base and typed lr


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    kind: Kind
    build: Build
    bases: tuple[str, ...] = BASES
    """What it can wrap or be; ("",) if it is what it is, and runs once for all bases of a task."""
    lr: float = 1.0
    """What to type; a sweep's come from the task."""
    package: str = "torch"
    """The distribution it comes from."""
    on_request: bool = False
    """Only where a task or the user names it."""

    def cells(self, task: Task, typed: tuple[float, ...]) -> Mapping[str, tuple[float, ...]]:
        """The learning rates to type on a task, by base."""
        if self.bases == ("",):
            return {"": (self.lr,)}
        bases = [base for base in task.grids if base in self.bases]
        if self.kind == "sweep":
            return {base: tuple(task.grids[base]) for base in bases}
        return dict.fromkeys(bases, typed if self.kind == "mechanic" else (self.lr,))


def hyperparameters(problem: Problem, base: str) -> dict[str, Any]:
    """Those of a base on a problem, without the lr."""
    return {**_DEFAULTS[base], **problem.hyperparameters.get(base, {})}


def make_base(
    problem: Problem, base: str, lr: float, wrap: Callable[[Any], Any] = lambda c: c
) -> Any:
    """The base optimizer of a problem; `wrap` may exchange its class."""
    options = hyperparameters(problem, base)
    parameters = list(problem.model.parameters())
    on_gpu = parameters[0].is_cuda
    if base == "sgd":
        return wrap(SGD)(parameters, lr=lr, fused=on_gpu, **options)
    if base == "adamw":
        return wrap(AdamW)(parameters, lr=lr, fused=on_gpu, **options)
    from lion_pytorch import Lion

    return wrap(Lion)(parameters, lr=lr, **options)


def _group_rate(optimizer: Optimizer, key: str | None = None) -> Callable[[], float]:
    def rate() -> float:
        group = optimizer.param_groups[0]
        return float(group["lr"]) * (float(group[key]) if key else 1.0)

    return rate


def _sweep(problem: Problem, base: str, lr: float) -> Live:
    optimizer = make_base(problem, base, lr)
    return Live(optimizer, _group_rate(optimizer))


def _mechanic(**options: Any) -> Build:
    def build(problem: Problem, base: str, lr: float) -> Live:
        optimizer = mechanize(make_base(problem, base, lr), **options)
        return Live(optimizer, lambda: float(tuner(optimizer).effective_lr[0]))

    return build


def _mechanic_pytorch(problem: Problem, base: str, lr: float) -> Live:
    from mechanic_pytorch import mechanize as mechanize_peer

    optimizer = make_base(problem, base, lr, mechanize_peer)

    def rate() -> float:
        scales = optimizer.state.get("_mechanic", {}).get("s")
        return math.nan if scales is None else float(scales.sum()) * optimizer.param_groups[0]["lr"]

    return Live(optimizer, rate)


def _quietly(make: Callable[..., Optimizer], *args: Any, **options: Any) -> Optimizer:
    """Without what some constructors print."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make(*args, **options)


def _prodigy(problem: Problem, base: str, lr: float) -> Live:
    from prodigyopt import Prodigy

    # "To avoid issues with warm-up, use option safeguard_warmup=True"
    optimizer = _quietly(
        Prodigy,
        problem.model.parameters(),
        lr=lr,
        safeguard_warmup=problem.schedule(0.0) < problem.schedule(0.1),
        **hyperparameters(problem, "adamw"),
    )
    return Live(optimizer, _group_rate(optimizer, "d"))


def _dadaptation(problem: Problem, base: str, lr: float) -> Live:
    import dadaptation

    options = hyperparameters(problem, base)
    options.pop("nesterov", None)
    if base == "adamw":
        options["decouple"] = True  # "set decouple=True" for AdamW's weight decay
    makers = {"sgd": "DAdaptSGD", "adamw": "DAdaptAdam", "lion": "DAdaptLion"}
    make = getattr(dadaptation, makers[base])
    optimizer = _quietly(make, problem.model.parameters(), lr=lr, **options)
    rate = _group_rate(optimizer, "d")
    if base != "sgd":
        return Live(optimizer, rate)
    # Its steps are divided by the first gradient's norm, and its momentum is an average.
    group, share = optimizer.param_groups[0], 1 - options["momentum"]
    return Live(optimizer, lambda: rate() * share / group.get("g0_norm", math.nan))


def _dog(layerwise: bool) -> Build:
    def build(problem: Problem, base: str, lr: float) -> Live:
        from dog import DoG, LDoG, PolynomialDecayAverager

        decay = hyperparameters(problem, "sgd").get("weight_decay", 0.0)
        # "unless the model uses batch-normalization, in which case the suggested value is 1e-4"
        first = 1e-4 if _has_batch_norm(problem.model) else 1e-6
        make = LDoG if layerwise else DoG
        parameters = problem.model.parameters()
        optimizer = make(parameters, lr=lr, reps_rel=first, weight_decay=decay)
        averager = PolynomialDecayAverager(problem.model)  # "must be combined with averaging"

        def rate() -> float:
            etas = optimizer.param_groups[0].get("eta")
            return (
                float(torch.stack([torch.as_tensor(e) for e in etas]).mean()) if etas else math.nan
            )

        def take_average() -> None:
            problem.model.load_state_dict(averager.averaged_model.state_dict())

        return Live(optimizer, rate, False, averager.step, take_average)

    return build


def _schedule_free(problem: Problem, base: str, lr: float) -> Live:
    import schedulefree

    sgd = base == "sgd"
    make = schedulefree.SGDScheduleFree if sgd else schedulefree.AdamWScheduleFree
    optimizer = make(
        problem.model.parameters(),
        lr=lr,
        warmup_steps=problem.steps // 20,  # "Using learning rate warmup is recommended"
        **hyperparameters(problem, "sgd" if sgd else "adamw"),
    )
    optimizer.train()

    def to_evaluate() -> None:
        optimizer.eval()
        if _has_batch_norm(problem.model):  # the README's remedy: statistics at x instead of y
            problem.model.train()
            with torch.no_grad():
                for batch in itertools.islice(problem.batches, 50):
                    problem.loss(batch)

    def rate() -> float:
        return float(optimizer.param_groups[0]["scheduled_lr"])

    return Live(optimizer, rate, scheduled=False, before_evaluation=to_evaluate)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


_ALL = (
    *(Method(base, "sweep", _sweep, (base,), package=package)
      for base, package in zip(BASES, ("torch", "torch", "lion-pytorch"), strict=True)),
    Method("mechanic", "mechanic", _mechanic()),
    Method("mechanic-paper", "mechanic", _mechanic(preset="paper")),
    Method("mechanic-optax", "mechanic", _mechanic(preset="optax")),
    Method("mechanic-pytorch-preset", "mechanic", _mechanic(preset="mechanic-pytorch")),
    # Table 2 of the paper has λ = 0.1 beside the usual 0.01.
    Method("mechanic-paper-lambda-0.1", "mechanic", _mechanic(preset="paper", s_decay=0.1),
           on_request=True),
    Method("mechanic-pytorch", "peer", _mechanic_pytorch, package="mechanic-pytorch"),
    Method("prodigy", "peer", _prodigy, ("",), package="prodigyopt"),
    Method("dadaptation", "peer", _dadaptation, ("sgd", "adamw"), package="dadaptation"),
    # "highly experimental", its README says: not to be held against the other two.
    Method("dadaptation-lion", "peer", _dadaptation, ("lion",), package="dadaptation"),
    Method("dog", "peer", _dog(layerwise=False), ("",), package="dog-optimizer"),
    Method("ldog", "peer", _dog(layerwise=True), ("",), package="dog-optimizer"),
    Method("schedulefree-adamw", "peer", _schedule_free, ("",), 0.0025, "schedulefree"),
    Method("schedulefree-sgd", "peer", _schedule_free, ("sgd",), 1.0, "schedulefree"),
)  # fmt: skip
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, method in METHODS.items() if method.kind == kind)
    for group, kind in {"sweeps": "sweep", "presets": "mechanic", "peers": "peer"}.items()
}


def choose(task: Task, asked: tuple[str, ...]) -> list[Method]:
    """The methods to run on a task: those asked for, else all that it and they allow."""
    names = asked or tuple(task.only_methods)
    if names:
        return [METHODS[name] for name in names]
    extra = set(task.extra_methods)
    return [method for name, method in METHODS.items() if not method.on_request or name in extra]
