"""One run: a method trains a problem from the initial weights to the last step."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.methods import Method, RunningMethod
from mechanic.bench.record import Curve
from mechanic.bench.task import BuildSettings, Problem, Task

_POINTS = 100  # of a curve, or up to twice as many


class DivergedError(Exception):
    """The loss has become NaN or infinite."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run that did not diverge or fail."""

    start_loss: float
    metrics: Mapping[str, float]
    curve: Curve
    seconds: float


def train(
    task: Task,
    method: Method,
    base: str,
    lr: float,
    settings: BuildSettings,
    report: Callable[[int, int], None] = lambda done, steps: None,
) -> Outcome:
    """Train, and call `report` with the number of steps done and of all steps.

    Raises:
        DivergedError: if the loss becomes NaN or infinite.
    """
    torch.manual_seed(settings.seed)  # for dropout, and whatever else is random during training
    problem = task.build(settings)
    start_loss = _evaluate(problem)["train_loss"]
    running = method.build(problem, base, lr)
    start = time.perf_counter()
    curve = _run(problem, running, settings.device, report)
    seconds = time.perf_counter() - start
    running.before_evaluation()
    metrics = _evaluate(problem)
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise DivergedError(f"{name} is {value} at the end, after {problem.steps} steps")
    return Outcome(start_loss, metrics, curve, seconds)


def _evaluate(problem: Problem) -> Mapping[str, float]:
    problem.model.eval()
    with torch.no_grad():
        metrics = problem.evaluate()
    problem.model.train()
    return metrics


def _run(
    problem: Problem,
    running: RunningMethod,
    device: torch.device,
    report: Callable[[int, int], None],
) -> Curve:
    steps, optimizer = problem.steps, running.optimizer
    # Taken at the middle of each step, so that no step of a warm-up or a decay has an lr of 0.
    schedule = problem.schedule if running.scheduled else lambda done: 1.0
    scheduler = LambdaLR(optimizer, lambda k: schedule(min((k + 0.5) / steps, 1.0)))
    parameters = list(problem.model.parameters())
    every = max(1, steps // _POINTS)
    losses: list[Tensor] = []
    points: list[tuple[int, float, float]] = []
    problem.model.train()
    for step in range(1, steps + 1):
        with torch.autocast(
            device.type, torch.bfloat16, problem.autocast and device.type == "cuda"
        ):
            loss = problem.loss(next(problem.batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if problem.clip is not None:
            clip_grad_norm_(parameters, problem.clip)
        optimizer.step()
        running.after_step()
        losses.append(loss.detach())
        if step % every == 0 or step == steps:
            # Only here does the host wait for the device, and only here can it see a NaN.
            point = float(torch.stack(losses).float().mean())
            if not math.isfinite(point) and not torch.stack(losses).isfinite().any():
                raise DivergedError(f"the loss is {point} at step {step} of {steps}")
            points.append((step, point, running.rate()))
            losses.clear()
            report(step, steps)
        scheduler.step()
    return Curve(*(list(column) for column in zip(*points, strict=True)))
