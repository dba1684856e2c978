"""Muon for the matrices and AdamW for the rest: two tuners on one loss, beside a grid of rates.

    python research/two_optimizers.py --data DIR      # some 15 minutes on two cores

The GPT of `mechanic bench` on bytes, smaller; a cosine after a warm-up, clipped. Prints the loss
at the end (the mean of the last tenth of training) for each pair of fixed rates, and Mechanic's
with what it suggests to type.
"""

import argparse
import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.data import Data
from mechanic.bench.suites import lm
from mechanic.bench.task import BuildSettings
from mechanic.torch import mechanize, tuner

SIZE = lm.GptSize(layers=2, width=128, context=64, batch=24, steps=300, evaluated=1)
FOR_MUON = (3e-3, 5e-3, 1e-2, 2e-2)
FOR_ADAMW = (1e-3, 3e-3, 1e-2, 3e-2)


class Job(NamedTuple):
    """One run; without rates, of Mechanic."""

    data: Path
    seed: int
    rates: tuple[float, float] | None


def train(job: Job) -> tuple[Job, float, float, list[float]]:
    """The loss at the start and at the end, and which rates are suggested."""
    torch.set_num_threads(1)
    lm.SIZES["short"] = SIZE
    settings = BuildSettings("short", job.seed, torch.device("cpu"), Data(job.data))
    problem: Any = lm.tasks(settings.data)[0].build(settings)
    muon, adamw = job.rates or (1.0, 1.0)
    blocks = problem.model.transformer.h
    matrices = [param for param in blocks.parameters() if param.ndim == 2]
    known = set(map(id, matrices))
    others = [param for param in problem.parameters() if id(param) not in known]
    optimizers: list[Any] = [
        torch.optim.Muon(matrices, lr=muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adamw, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    if job.rates is None:
        optimizers = [mechanize(optimizer) for optimizer in optimizers]
    steps = problem.steps
    schedules = [
        LambdaLR(optimizer, lambda k: problem.schedule(min((k + 0.5) / steps, 1.0)))
        for optimizer in optimizers
    ]
    losses = []
    for _ in range(steps):
        loss = problem.loss(next(problem.batches))
        loss.backward()
        nn.utils.clip_grad_norm_(problem.parameters(), problem.clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
    suggested = [] if job.rates else [tuner(own).suggest_lr()[0] for own in optimizers]
    end = mean(losses[-steps // 10 :])
    return job, losses[0], end if math.isfinite(end) else math.inf, suggested


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    grid = list(itertools.product(FOR_MUON, FOR_ADAMW))
    jobs = [Job(asked.data, seed, rates) for seed in range(asked.seeds) for rates in (*grid, None)]
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = list(pool.map(train, jobs))
    print("| Muon \\ AdamW | " + " | ".join(f"{rate:g}" for rate in FOR_ADAMW) + " |")
    print("|---|" + "---:|" * len(FOR_ADAMW))
    means = {pair: mean(end for job, _, end, _ in runs if job.rates == pair) for pair in grid}
    for rate in FOR_MUON:
        row = " | ".join(f"{means[rate, other]:.4f}" for other in FOR_ADAMW)
        print(f"| {rate:g} | {row} |")
    best = min(means, key=lambda pair: means[pair])
    print(f"\nBest: Muon {best[0]:g}, AdamW {best[1]:g}: {means[best]:.4f}\n")
    print("| seed | Mechanic | excess | Muon to type | AdamW to type |\n|---:|---:|---:|---:|---:|")
    for job, start, end, suggested in runs:
        if job.rates is None:
            excess = 100 * (end - means[best]) / (start - means[best])
            typed = " | ".join(f"{rate:.2g}" for rate in suggested)
            print(f"| {job.seed} | {end:.4f} | {excess:+.1f} % | {typed} |")


if __name__ == "__main__":
    main()
