"""Runs of one method on rows of `mechanic bench`, many at once on one device, without Optuna.

    nvidia-cuda-mps-control -d          # first, where it is there: runs then share the GPU
    python research/rows.py --data DIR --output runs.jsonl --jobs 16 \\
        lm/gpt-novels/adamw mlm/bert-novels/adamw vision/resnet18-cifar10/sgd

The method is the default preset, or for example `--method sgd --lrs 0.01 0.03`. For a rule that is
being tried, put its `mechanic` first on PYTHONPATH. One line of JSON is written for each run as it
ends. With `--trace FOLDER` the runs take the plain path, and what the tuner was told and knew in
each step is kept there as a NumPy file.
"""

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mechanic import tuner
from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import SUITES
from mechanic.bench.task import BuildSettings, linear
from mechanic.bench.train import train
from mechanic.torch import step as dispatcher

SUMS = ("dg", "gg", "dd", "uu")
STATE = (
    "s",
    "hesitation",
    "largest_cosine",
    "recent_slope",
    "recent_fall",
    "stake",
    "last_factor",
    "U",
)


class Job(NamedTuple):
    """One run."""

    row: str
    seed: int
    method: str
    lr: float
    data: Path
    device: str
    falls: bool
    trace: Path | None


def run(job: Job) -> dict[str, Any]:
    """Train, and say where it ended."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    suite, name, base = job.row.split("/")
    data, began = Data(job.data), time.time()
    traced = _trace() if job.trace is not None else []
    try:
        task = next(task for task in SUITES[suite](data) if task.name == name)
        settings = BuildSettings("short", job.seed, torch.device(job.device), data)
        if job.falls:
            built = task.build
            task = replace(task, build=lambda s: replace(built(s), schedule=linear()))
        outcome = train(task, METHODS[job.method], base, job.lr, settings)
        found: dict[str, Any] = {"start_loss": outcome.start_loss, **outcome.metrics}
    except Exception as error:  # a run that fails must not end the others
        found = {"error": repr(error)[:300]}
    if job.trace is not None and traced:
        file = f"{name}_{base}_{job.seed}.npy"
        np.save(job.trace / file, torch.stack(traced).cpu().numpy())
    seconds = round(time.time() - began, 1)
    told = {"row": job.row, "method": job.method, "lr": job.lr, "seed": job.seed}
    return {**told, "seconds": seconds, **found}


def _trace() -> list[torch.Tensor]:
    """Have the rule write down what it was told and what it knew: `SUMS`, `STATE`, and what is
    retained of the displacement."""
    rows: list[torch.Tensor] = []
    rule = tuner.RULES["default"]

    def update(options: Any, state: Any, sums: Any) -> Any:
        new, retained = rule.update(options, state, sums)
        values = [getattr(sums, name) for name in SUMS] + [getattr(state, name) for name in STATE]
        rows.append(torch.stack([torch.as_tensor(v).double().sum() for v in [*values, retained]]))
        return new, retained

    tuner.RULES["default"] = rule._replace(update=update)
    dispatcher.fast.begin = lambda call: None  # type: ignore[attr-defined]
    return rows


def main() -> None:
    """Run all rows with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", metavar="SUITE/TASK/BASE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--method", default="mechanic")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1.0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--falls", action="store_true", help="let the lr fall linearly to 0")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    if asked.trace is not None:
        asked.trace.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(row, seed, asked.method, lr, asked.data, asked.device, asked.falls, asked.trace)
        for row, lr, seed in product(asked.rows, asked.lrs, asked.seeds)
    ]
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(asked.jobs, maxtasksperchild=1) as pool,
        asked.output.open("a", encoding="utf-8") as file,
    ):
        for found in pool.imap_unordered(run, jobs):
            print(json.dumps(found), file=file, flush=True)
            print(found, flush=True)


if __name__ == "__main__":
    main()
