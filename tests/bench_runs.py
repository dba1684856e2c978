"""Runs as a bench would leave them, made up: what they should say is known."""

import math
import random
from collections.abc import Iterator
from typing import Any

from mechanic.bench.record import Curve, Run
from mechanic.bench.score import Comparison, Result, ScoreRow, compare

NASTY = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "_a|b $x$ %{y} `c`",
    "<b>&lt;</b> <a href='javascript:alert(3)'>x</a>",
)
ENVIRONMENT = {
    "device": "cpu",
    "cpu": "Some CPU, 2 cores",
    "python": "3.11.9",
    "torch": "2.13.0",
    "mechanic": "0.1.0",
    "date": "2026-03-01T12:00:00",
}
GRID = tuple(10.0**power for power in range(-5, 3))
# name, kind, its own base or None, excess as a fraction of what can be learned
METHODS: tuple[tuple[str, Any, bool, float], ...] = (
    ("mechanic", "mechanic", True, 0.01),
    ("mechanic-paper", "mechanic", True, 0.06),
    ("mechanic-optax", "mechanic", True, 0.08),
    ("mechanic-pytorch", "peer", True, 0.11),
    ("prodigy", "peer", False, 0.03),
    ("dadaptation", "peer", True, 0.15),
    ("dog", "peer", False, 0.22),
    ("schedulefree-adamw", "peer", False, -0.01),
)


def run(loss: float | None = 0.5, /, **changes: Any) -> Run:
    """One run that came through, or with no loss one that diverged."""
    fields: dict[str, Any] = {
        "suite": "suite", "task": "task", "budget": "short", "method": "sgd", "kind": "sweep",
        "base": "sgd", "lr": 0.1, "seed": 0, "status": "done", "start_loss": 1.0,
        "metrics": {"train_loss": loss}, "environment": ENVIRONMENT,
    }  # fmt: skip
    if loss is None:
        fields |= {"status": "diverged", "reason": "the loss is NaN", "metrics": {}}
    return Run(**(fields | changes))


def curve(start: float, end: float, peak: float, dice: random.Random, steps: int = 2000) -> Curve:
    """Down to the end with the schedule, with the noise of batches."""
    at = list(range(steps // 100, steps + 1, steps // 100))
    done = [step / steps for step in at]
    loss = [
        end + (start - end) * math.exp(-6 * d) + 0.02 * (start - end) * dice.random() for d in done
    ]
    ramp = [min(1.0, math.exp(40 * d - 4)) for d in done]
    lr = [peak * r * (0.5 + 0.5 * math.cos(math.pi * d)) for r, d in zip(ramp, done, strict=True)]
    return Curve(at, loss, lr)


def suite(
    name: str,
    tasks: tuple[str, ...],
    bases: tuple[str, ...] = ("adamw", "lion", "sgd"),
    seeds: int = 3,
    budget: str = "short",
) -> Iterator[Run]:
    """Sweeps that diverge at their upper end, and every method; some of it goes wrong."""
    for task in tasks:
        dice = random.Random(task)
        start, floor = dice.uniform(0.7, 9.0), dice.uniform(0.05, 0.5)
        best = dict(zip(bases, (1e-3, 1e-4, 1e-1), strict=False))
        for seed in range(seeds):
            luck = dice.gauss(0, 0.004)
            shared = {"suite": name, "task": task, "budget": budget, "seed": seed}

            def finish(share: float, peak: float, fields: dict[str, Any]) -> Run:
                share = share + luck + dice.gauss(0, 0.004)  # noqa: B023
                end = floor + (start - floor) * share  # noqa: B023
                return run(
                    end,
                    metric="test_accuracy",
                    metrics={"train_loss": end, "test_accuracy": 0.95 - 0.5 * share},
                    start_loss=start,  # noqa: B023
                    curve=curve(start, end, peak, dice),  # noqa: B023
                    seconds=dice.uniform(1, 3),  # noqa: B023
                    **shared,  # noqa: B023
                    **fields,
                )

            for base in bases:
                for lr in GRID:
                    fields = {"method": base, "base": base, "lr": lr}
                    away = math.log10(lr / best[base])
                    if away > 2.5 or (away > 1.5 and seed == 1):
                        yield run(
                            None, reason="the loss is nan at step 40 of 2000", **shared, **fields
                        )
                    else:
                        yield finish(1 - math.exp(-0.15 * away**2), lr, fields)
            for method, kind, based, share in METHODS:
                for base in bases if based else ("",):
                    fields = {"method": method, "kind": kind, "base": base, "lr": 1.0}
                    share_here = share + abs(dice.gauss(0, 0.01 + abs(share) / 2))
                    if method == "dog" and task == tasks[0] and seed > 0:
                        yield run(None, reason="the loss is inf at step 7", **shared, **fields)
                    elif method == "dadaptation" and base == "lion" and task == tasks[-1]:
                        reason = "OutOfMemoryError: 12 GiB asked for"
                        yield run(None, **shared, **fields | {"status": "failed", "reason": reason})
                    else:
                        yield finish(
                            share_here, best.get(base, 1e-3) * dice.uniform(0.5, 2), fields
                        )


def scaling(tasks: int = 6, seeds: int = 3) -> Iterator[Run]:
    """Tasks that have no sweep."""
    dice = random.Random(1)
    for place in range(tasks):
        for seed in range(seeds):
            yield run(
                3.0 + dice.random() / 10, suite="scaling", task=f"mlm-batch-{16 * 2**place}",
                method="mechanic", kind="mechanic", base="adamw", lr=1.0, seed=seed,
                start_loss=9.0, curve=curve(9.0, 3.0, 1e-4 * 1.4**place, dice),
            )  # fmt: skip


def everything() -> list[Run]:
    """Three suites, one without sweeps, two budgets, and names that are attacks."""
    runs = [*suite("convex", ("a9a", "vehicle")), *scaling(2)]
    runs += suite(NASTY[0], (NASTY[1], NASTY[2]), bases=("adamw",))
    runs += suite("convex", ("a9a",), bases=("sgd",), seeds=1, budget="full")
    peers = {"task": "a9a", "suite": "convex", "budget": "full", "kind": "peer", "base": ""}
    return runs + [run(0.3, method=name, **peers) for name in (NASTY[0], NASTY[3])]


# Runs of one row, from their losses alone.


def swept(losses: dict[float, list[float | None]], **changes: object) -> list[Run]:
    """A sweep: by lr the loss of each seed, None where it diverged."""
    return [
        run(loss, lr=lr, seed=seed, **changes)
        for lr, group in losses.items()
        for seed, loss in enumerate(group)
    ]


def free(name: str, losses: list[float | None], **changes: object) -> list[Run]:
    fields = {"method": name, "kind": "peer", "base": "", "lr": 1.0} | changes
    return [run(loss, seed=seed, **fields) for seed, loss in enumerate(losses)]


def ours(losses: list[float | None], **changes: object) -> list[Run]:
    return free("mechanic", losses, **({"kind": "mechanic", "base": "sgd"} | changes))


def only(runs: list[Run]) -> Comparison:
    (comparison,) = compare(runs)
    return comparison


def only_row(runs: list[Run]) -> ScoreRow:
    (row,) = only(runs).rows
    return row


def only_result(runs: list[Run]) -> Result:
    (result,) = only_row(runs).results
    return result


SWEEP = swept({0.01: [0.6, 0.6], 0.1: [0.2, 0.3], 1.0: [0.4, 0.4]})  # best 0.25, start 1.0
