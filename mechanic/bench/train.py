"""One run: a method trains a problem from the initial weights to the last step."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.course import Course, DivergedError, require_finite
from mechanic.bench.methods import Method, RunningMethod
from mechanic.bench.record import Curve, Outcome
from mechanic.bench.task import BuildSettings, OptaxProblem, Problem, Task

__all__ = ["DivergedError", "Outcome", "train"]


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
    if isinstance(problem, OptaxProblem):
        from mechanic.bench import optax_run

        return optax_run.train(problem, method, base, lr, settings, report)
    start_loss = _evaluate(problem)["train_loss"]
    players = [
        _Player(part, method.build(part, base, lr), settings.device) for part in problem.players
    ]
    start = time.perf_counter()
    curve = _run(problem, players, report)
    seconds = time.perf_counter() - start
    for player in players:
        player.finish()
    metrics = _evaluate(problem)
    require_finite(metrics, problem.steps)
    return Outcome(start_loss, metrics, curve, seconds)


def _evaluate(problem: Problem) -> Mapping[str, float]:
    problem.model.eval()
    with torch.no_grad():
        metrics = problem.evaluate()
    problem.model.train()
    return metrics


class _Player:
    """A model and the optimizer that trains it."""

    def __init__(self, problem: Problem, running: RunningMethod, device: torch.device) -> None:
        self.problem, self.running = problem, running
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, problem.autocast and device.type == "cuda"
        )
        self.parameters = problem.parameters()
        self.average = None
        if problem.ema is not None and not running.averages:
            self.average = _MovingAverage(self.parameters, problem.ema)
        # Taken at the middle of each step, so that no step of a warm-up or a decay has an lr of 0.
        schedule = problem.schedule if running.scheduled else lambda done: 1.0
        steps = problem.steps
        self.scheduler = LambdaLR(
            running.optimizer, lambda k: schedule(min((k + 0.5) / steps, 1.0))
        )

    def step(self, batch: Any) -> Tensor:
        """Make one step, all but that of the schedule. Returns the loss of the batch."""
        with self.autocast:
            loss = self.problem.loss(batch)
        self.running.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.problem.clip is not None and self.running.clipped:
            clip_grad_norm_(self.parameters, self.problem.clip)
        self.running.optimizer.step()
        self.running.after_step()
        if self.average is not None:
            self.average.update()
        return loss.detach()

    def finish(self) -> None:
        """Put the weights to evaluate into the model."""
        self.running.before_evaluation()
        if self.average is not None:
            self.average.take()


class _MovingAverage:
    """An exponential moving average of the weights, at first over a tenth of the steps so far."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self.weights: list[Tensor] = list(parameters)
        self.mean = [weights.detach().clone() for weights in parameters]
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.mean, self.weights, 1 - decay)

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self.weights, self.mean)


def _run(problem: Problem, players: list[_Player], report: Callable[[int, int], None]) -> Curve:
    course = Course(problem.steps, lambda losses: torch.stack(losses).tolist(), report)
    for player in players:
        player.problem.model.train()
    for _ in range(problem.steps):
        batch = next(problem.batches)
        losses = [player.step(batch) for player in players]
        course.add(losses[-1], players[-1].running.rate)
        for player in players:
            player.scheduler.step()
    return course.curve
