"""One run: a method trains a problem from its first weights to its last step."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.methods import Live, Method
from mechanic.bench.record import Curve
from mechanic.bench.task import Problem, Setting, Task

_POINTS = 100  # of a curve


class DivergedError(Exception):
    """The loss is not a number any more, and does not come back."""


@dataclass(frozen=True)
class Outcome:
    """What a run that ended well has to tell."""

    start_loss: float
    metrics: Mapping[str, float]
    curve: Curve
    seconds: float


def train(
    task: Task,
    method: Method,
    base: str,
    lr: float,
    setting: Setting,
    tick: Callable[[int, int], None] = lambda done, steps: None,
) -> Outcome:
    """Train, telling `tick` of steps done out of all; `DivergedError` if the loss is lost."""
    torch.manual_seed(setting.seed)  # for dropout and whatever else draws as it goes
    problem = task.build(setting)
    start_loss = _evaluate(problem)["train_loss"]
    live = method.build(problem, base, lr)
    began = time.perf_counter()
    curve = _run(problem, live, setting.device, tick)
    seconds = time.perf_counter() - began
    live.before_evaluation()
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
    problem: Problem, live: Live, device: torch.device, tick: Callable[[int, int], None]
) -> Curve:
    steps, optimizer = problem.steps, live.optimizer
    # At the middle of each step, so that neither a warm-up nor a decay spends a step at lr 0.
    schedule = problem.schedule if live.scheduled else lambda done: 1.0
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
        live.after_step()
        losses.append(loss.detach())
        if step % every == 0 or step == steps:
            # The one place that waits for the device, and so the one that can see a NaN.
            point = float(torch.stack(losses).float().mean())
            if not math.isfinite(point) and not torch.stack(losses).isfinite().any():
                raise DivergedError(f"the loss is {point} at step {step} of {steps}")
            points.append((step, point, live.rate()))
            losses.clear()
            tick(step, steps)
        scheduler.step()
    return Curve(*(list(column) for column in zip(*points, strict=True)))
