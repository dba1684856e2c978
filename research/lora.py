"""Mechanic beside a sweep, with LoRA on the encoder of `mechanic bench`.

    python research/lora.py --data DIR        # SST-2, CoLA and RTE; minutes on one GPU

Adapters of rank 8 beside the queries and values of each layer and a new head are trained; the rest
is frozen. Methods, schedule and score are those of the suite `finetune`.
"""

import argparse
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import finetune
from mechanic.bench.task import BuildSettings, Problem, Task, half_decades
from mechanic.bench.train import DivergedError, train

RANK = 8
GRID = half_decades(-4, -1)


class Adapter(nn.Module):
    """A linear layer that stays, and a product of low rank beside it that starts at 0."""

    def __init__(self, layer: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        down = torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features)
        self.down = nn.Parameter(down.to(layer.weight))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank).to(layer.weight))

    def forward(self, x: Tensor) -> Tensor:
        stays: Tensor = self.layer(x)
        return stays + x @ self.down.T @ self.up.T


def build(task: Task, setting: BuildSettings) -> Problem:
    """The problem of the suite, with adapters."""
    problem = task.build(setting)
    encoder: Any = problem.model.encoder
    encoder.requires_grad_(False)
    for layer in encoder.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = Adapter(attention.query), Adapter(attention.value)
    return problem


def run(
    name: str, data: Path, device: str, lr: float | None, seed: int
) -> tuple[float, float, list[float]]:
    """The train loss before and after, and the rates on the way."""
    setting = BuildSettings("short", seed, torch.device(device), Data(data))
    task = next(task for task in finetune.tasks(setting.data) if task.name == name)
    if task.missing:
        raise SystemExit(f"{name}: {task.missing}")
    task = replace(task, build=partial(build, task))
    method = METHODS["mechanic" if lr is None else "adamw"]
    try:
        outcome = train(task, method, "adamw", 1.0 if lr is None else lr, setting)
    except DivergedError:
        return 0.0, math.inf, []
    return outcome.start_loss, outcome.metrics["train_loss"], list(outcome.curve.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mechanic beside a sweep, with LoRA.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", default=["minilm-sst2", "minilm-cola", "minilm-rte"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    print(f"{where}, torch {torch.__version__}, AdamW, rank {RANK}, {options.seeds} seeds\n")
    print(
        "| task | " + " | ".join(f"{lr:g}" for lr in GRID) + " | Mechanic | excess | lr in force |"
    )
    print("|---|" + "---|" * (len(GRID) + 3))
    spawn = multiprocessing.get_context("spawn")  # a GPU is not for forks
    with ProcessPoolExecutor(options.jobs, spawn) as pool:
        cells = {
            (name, lr, seed): pool.submit(run, name, options.data, options.device, lr, seed)
            for name in options.tasks
            for lr in (*GRID, None)
            for seed in range(options.seeds)
        }
        for name in options.tasks:
            of = {
                lr: [cells[name, lr, seed].result() for seed in range(options.seeds)]
                for lr in (*GRID, None)
            }
            losses = {lr: mean(after for _, after, _ in runs) for lr, runs in of.items()}
            best = min(losses[lr] for lr in GRID)
            start = max(before for runs in of.values() for before, _, _ in runs)
            excess = [100 * (after - best) / (start - best) for _, after, _ in of[None]]
            found = of[None][0][2]
            rates = " ".join(f"{found[len(found) * k // 10]:.2g}" for k in (1, 3, 6, 9) if found)
            swept = " | ".join(f"{losses[lr]:.4f}" for lr in GRID)
            each = ", ".join(f"{value:+.1f}" for value in excess)
            print(f"| {name} | {swept} | {losses[None]:.4f} | {each} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
