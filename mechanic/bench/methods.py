"""What trains a problem: the bases of a sweep, Mechanic over each base, and the peers.

The peers are other learning-rate-free methods. Each is set up as its README recommends, and follows
the task's schedule unless its authors say that it needs none. Each method is one row of `METHODS`.
"""

import contextlib
import importlib.metadata
import io
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.bench.record import MethodKind
from mechanic.bench.task import Library, OptaxProblem, Problem, Task
from mechanic.torch import mechanize, tuner

BASES = ("sgd", "adamw", "lion")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class RunningMethod:
    """A method that trains a problem."""

    optimizer: Optimizer
    rate: Callable[[], float]
    """The lr in force now, schedule included; NaN if the method has none to report."""
    scheduled: bool = True
    """Whether the optimizer follows the schedule of the task."""
    after_step: Callable[[], None] = _do_nothing
    before_evaluation: Callable[[], None] = _do_nothing
    """Puts the final weights of the method into the model, for example their average."""
    averages: bool = False
    """Whether these are an average, so that the task's own average is not taken."""
    clipped: bool = True
    """Whether gradients are clipped where the task says so."""


BuildMethod = Callable[[Problem, str, float], RunningMethod]
"""Starts a method on a problem, given the name of a base and the lr that is typed."""


@dataclass(frozen=True)
class Method:
    """A way to train, by name."""

    name: str
    kind: MethodKind
    build: BuildMethod
    bases: tuple[str, ...] = BASES
    """The bases that it can wrap, or that it has a variant of; ("",) for a method that has no base
    and runs once for each task."""
    lr: float = 1.0
    """The lr to type; those of a sweep come from the task."""
    package: str = "torch"
    """The distribution that it comes from."""
    on_request: bool = False
    """Whether it runs only where a task or the user names it."""
    libraries: tuple[Library, ...] = ("torch",)
    """What it exists for; `optax_run` has it for optax."""

    def typed_rates(self, task: Task, typed: tuple[float, ...]) -> Mapping[str, tuple[float, ...]]:
        """The learning rates to type on a task, for each base; none if it cannot train it."""
        if task.library not in self.libraries:
            return {}
        if self.bases == ("",):
            return {"": (self.lr,)}
        bases = [base for base in task.grids if base in self.bases]
        if self.kind == "sweep":
            return {base: tuple(task.grids[base]) for base in bases}
        return dict.fromkeys(bases, typed if self.kind == "mechanic" else (self.lr,))


def hyperparameters(problem: Problem | OptaxProblem, base: str) -> dict[str, Any]:
    """The hyperparameters of a base on a problem, without the lr."""
    return {**_DEFAULTS[base], **problem.hyperparameters.get(base, {})}


def make_base(
    problem: Problem, base: str, lr: float, wrap: Callable[[Any], Any] = lambda cls: cls
) -> Any:
    """Make the base optimizer of a problem. `wrap` may replace its class."""
    options = hyperparameters(problem, base)
    parameters = problem.parameters()
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


def _sweep(problem: Problem, base: str, lr: float) -> RunningMethod:
    optimizer = make_base(problem, base, lr)
    return RunningMethod(optimizer, _group_rate(optimizer))


def _mechanic(**options: Any) -> BuildMethod:
    def build(problem: Problem, base: str, lr: float) -> RunningMethod:
        optimizer = mechanize(make_base(problem, base, lr), **options)
        return RunningMethod(optimizer, lambda: float(tuner(optimizer).effective_lr[0]))

    return build


def _mechanic_pytorch(problem: Problem, base: str, lr: float) -> RunningMethod:
    from mechanic_pytorch import mechanize as mechanize_peer

    optimizer = make_base(problem, base, lr, mechanize_peer)

    def rate() -> float:
        scales = optimizer.state.get("_mechanic", {}).get("s")
        return math.nan if scales is None else float(scales.sum()) * optimizer.param_groups[0]["lr"]

    return RunningMethod(optimizer, rate)


def _quietly(make: Callable[..., Optimizer], *args: Any, **options: Any) -> Optimizer:
    """Make an optimizer whose constructor prints, without the print."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make(*args, **options)


def _prodigy(problem: Problem, base: str, lr: float) -> RunningMethod:
    from prodigyopt import Prodigy

    # "To avoid issues with warm-up, use option safeguard_warmup=True"
    optimizer = _quietly(
        Prodigy,
        problem.parameters(),
        lr=lr,
        safeguard_warmup=problem.schedule(0.0) < problem.schedule(0.1),
        **hyperparameters(problem, "adamw"),
    )
    return RunningMethod(optimizer, _group_rate(optimizer, "d"))


def _dadaptation(problem: Problem, base: str, lr: float) -> RunningMethod:
    import dadaptation

    options = hyperparameters(problem, base)
    options.pop("nesterov", None)
    if base == "adamw":
        options["decouple"] = True  # "set decouple=True" for AdamW's weight decay
    makers = {"sgd": "DAdaptSGD", "adamw": "DAdaptAdam", "lion": "DAdaptLion"}
    make = getattr(dadaptation, makers[base])
    optimizer = _quietly(make, problem.parameters(), lr=lr, **options)
    rate = _group_rate(optimizer, "d")
    if base != "sgd":
        return RunningMethod(optimizer, rate)
    # DAdaptSGD divides its steps by the norm of the first gradient, and its momentum is an average.
    group, weight = optimizer.param_groups[0], 1 - options["momentum"]
    return RunningMethod(optimizer, lambda: rate() * weight / group.get("g0_norm", math.nan))


def _dog(layerwise: bool) -> BuildMethod:
    def build(problem: Problem, base: str, lr: float) -> RunningMethod:
        from dog import DoG, LDoG, PolynomialDecayAverager

        decay = hyperparameters(problem, "sgd").get("weight_decay", 0.0)
        # "unless the model uses batch-normalization, in which case the suggested value is 1e-4"
        first_step = 1e-4 if _has_batch_norm(problem.model) else 1e-6
        make = LDoG if layerwise else DoG
        parameters = problem.parameters()
        optimizer = make(parameters, lr=lr, reps_rel=first_step, weight_decay=decay)
        averager = PolynomialDecayAverager(problem.model)  # "must be combined with averaging"

        def rate() -> float:
            etas = optimizer.param_groups[0].get("eta")
            return (
                float(torch.stack([torch.as_tensor(e) for e in etas]).mean()) if etas else math.nan
            )

        def take_average() -> None:
            problem.model.load_state_dict(averager.averaged_model.state_dict())

        return RunningMethod(optimizer, rate, False, averager.step, take_average, averages=True)

    return build


def _schedule_free(problem: Problem, base: str, lr: float) -> RunningMethod:
    import schedulefree

    sgd = base == "sgd"
    make = schedulefree.SGDScheduleFree if sgd else schedulefree.AdamWScheduleFree
    optimizer = make(
        problem.parameters(),
        lr=lr,
        warmup_steps=problem.steps // 20,  # "Using learning rate warmup is recommended"
        **hyperparameters(problem, "sgd" if sgd else "adamw"),
    )
    optimizer.train()

    def rate() -> float:
        return float(optimizer.param_groups[0]["scheduled_lr"])

    before_evaluation = partial(_to_average, problem, optimizer)
    return RunningMethod(
        optimizer, rate, scheduled=False, before_evaluation=before_evaluation, averages=True
    )


def _prodigy_plus(problem: Problem, base: str, lr: float) -> RunningMethod:
    from prodigyplus.prodigy_plus_schedulefree import ProdigyPlusScheduleFree

    options = hyperparameters(problem, "adamw")
    optimizer: Any = _quietly(ProdigyPlusScheduleFree, problem.parameters(), lr=lr, **options)
    optimizer.train()
    # "a constant scheduler should be used", and "Do not use with gradient clipping"
    return RunningMethod(
        optimizer,
        _group_rate(optimizer, "d"),
        scheduled=False,
        before_evaluation=partial(_to_average, problem, optimizer),
        averages=True,
        clipped=False,
    )


def _to_average(problem: Problem, optimizer: Any) -> None:
    """Put the average of a Schedule-Free method into the model."""
    optimizer.eval()
    if _has_batch_norm(problem.model):  # as its README advises: take the statistics at x, not at y
        problem.model.train()
        with torch.no_grad():
            for batch in itertools.islice(problem.batches, 50):
                problem.loss(batch)


def _only_for_optax(problem: Problem, base: str, lr: float) -> RunningMethod:
    raise ValueError("this method is one of optax: it trains the tasks of the suite jax alone")


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


_BOTH: tuple[Library, ...] = ("torch", "optax")
_ALL = (
    Method("sgd", "sweep", _sweep, ("sgd",)),
    Method("adamw", "sweep", _sweep, ("adamw",), libraries=_BOTH),
    Method("lion", "sweep", _sweep, ("lion",), package="lion-pytorch"),
    Method("mechanic", "mechanic", _mechanic(), libraries=_BOTH),
    Method("mechanic-paper", "mechanic", _mechanic(preset="paper"), libraries=_BOTH),
    Method("mechanic-optax", "mechanic", _mechanic(preset="optax"), libraries=_BOTH),
    Method("mechanic-pytorch-preset", "mechanic", _mechanic(preset="mechanic-pytorch")),
    # Table 2 of the paper has λ = 0.1 as well as the usual 0.01.
    Method("mechanic-paper-lambda-0.1", "mechanic", _mechanic(preset="paper", s_decay=0.1),
           on_request=True),
    Method("mechanic-per-tensor", "mechanic", _mechanic(scope="tensor"), on_request=True),
    Method("mechanic-pytorch", "peer", _mechanic_pytorch, package="mechanic-pytorch"),
    Method("prodigy", "peer", _prodigy, ("",), package="prodigyopt"),
    Method("dadaptation", "peer", _dadaptation, ("sgd", "adamw"), package="dadaptation"),
    # A method of its own, because its README calls it "highly experimental".
    Method("dadaptation-lion", "peer", _dadaptation, ("lion",), package="dadaptation"),
    Method("dog", "peer", _dog(layerwise=False), ("",), package="dog-optimizer"),
    Method("ldog", "peer", _dog(layerwise=True), ("",), package="dog-optimizer"),
    Method("schedulefree-adamw", "peer", _schedule_free, ("",), 0.0025, "schedulefree"),
    Method("schedulefree-sgd", "peer", _schedule_free, ("sgd",), 1.0, "schedulefree"),
    Method("prodigy-plus-schedule-free", "peer", _prodigy_plus, ("",),
           package="prodigy-plus-schedule-free"),
    Method("optax-mechanize", "peer", _only_for_optax, ("adamw",), package="optax",
           libraries=("optax",)),
    Method("optax-prodigy", "peer", _only_for_optax, ("",), package="optax",
           libraries=("optax",)),
)  # fmt: skip
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, method in METHODS.items() if method.kind == kind)
    for group, kind in {"sweeps": "sweep", "presets": "mechanic", "peers": "peer"}.items()
}


def choose(task: Task, requested: tuple[str, ...]) -> list[Method]:
    """The methods to run on a task: the requested ones, or else the default ones of the task."""
    names = requested or tuple(task.only_methods)
    if names:
        return [METHODS[name] for name in names]
    extra = set(task.extra_methods)
    return [method for name, method in METHODS.items() if not method.on_request or name in extra]
