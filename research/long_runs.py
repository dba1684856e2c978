"""Runs of more than 10,000 steps beside fixed learning rates and Prodigy, on one GPU.

    nvidia-cuda-mps-control -d          # first, where it is there: runs then share the GPU
    python research/long_runs.py --data DIR --output runs.jsonl --checkpoints DIR --minutes 9

Two tasks of `mechanic bench`, made long: the GPT of suite `lm` for 10,000 steps, and the ResNet-18
of suite `vision` for 30 epochs of all images of CIFAR-10. After `--minutes` each run saves a
checkpoint, and the same command goes on from there. One line of JSON is written for each run as it
ends, and the learning rate in force at a few moments is in it.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import SUITES, corpus, lm, vision
from mechanic.bench.task import BuildSettings, Problem
from mechanic.bench.train import _evaluate, _Player

GPT, RESNET = "lm/gpt-novels/adamw", "vision/resnet18-cifar10/sgd"
GPT_STEPS, EPOCHS = 10_000, 30
MOMENTS = 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Job(NamedTuple):
    """One run."""

    row: str
    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """A name for its files."""
        return f"{self.row.replace('/', '-')}-{self.method}-{self.lr:g}-{self.seed}"


JOBS = [
    *(Job(row, "mechanic", 1.0, seed) for seed in (0, 1) for row in (GPT, RESNET)),
    *(Job(GPT, "adamw", lr, seed) for lr, seed in ((1e-3, 0), (3e-3, 0), (1e-3, 1))),
    *(Job(RESNET, "sgd", lr, seed) for lr, seed in ((0.1, 0), (0.03, 0), (0.1, 1))),
    *(Job(row, "prodigy", 1.0, 0) for row in (GPT, RESNET)),
]


class Place(NamedTuple):
    """Where a run reads and writes."""

    data: Path
    output: Path
    checkpoints: Path
    deadline: float


def build(job: Job, folder: Path) -> Problem:
    """The problem of a row, made long."""
    lm.SIZES["short"] = replace(lm.SIZES["short"], steps=GPT_STEPS)
    corpus.MAX_CHARACTERS["short"] = corpus.MAX_CHARACTERS["full"]
    vision.MAX_IMAGES["short"], vision.EPOCHS["short"] = None, EPOCHS
    suite, name, _ = job.row.split("/")
    data = Data(folder)
    task = next(task for task in SUITES[suite](data) if task.name == name)
    problem = task.build(BuildSettings("short", job.seed, DEVICE, data))
    assert isinstance(problem, Problem)
    return problem


def run(job: Job, place: Place) -> None:
    """Train until the end or the deadline, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    problem = build(job, place.data)
    running = METHODS[job.method].build(problem, job.row.split("/")[2], job.lr)
    player = _Player(problem, running, DEVICE)
    parts = {"model": problem.model, "optimizer": running.optimizer, "schedule": player.scheduler}
    file = place.checkpoints / f"{job.name}.pt"
    if file.exists():
        saved = torch.load(file, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        progress = saved["progress"]
        for _ in range(progress["done"]):
            next(problem.batches)
    else:
        progress = {"done": 0, "start_loss": _evaluate(problem)["train_loss"], "rates": []}
    while progress["done"] < problem.steps:
        if progress["done"] % (problem.steps // MOMENTS) == 0:
            progress["rates"].append(float(running.rate()))
            print(job.name, progress, flush=True)
        player.step(next(problem.batches))
        player.scheduler.step()
        progress["done"] += 1
        if time.time() > place.deadline and progress["done"] % 20 == 0:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved | {"progress": progress}, file)
            print(job.name, "saved after", progress["done"], flush=True)
            return
    player.finish()
    line = {**job._asdict(), **progress, **_evaluate(problem)}
    with place.output.open("a") as output:
        output.write(json.dumps(line) + "\n")
    print(line, flush=True)


def main() -> None:
    """Train all at once."""
    parser = argparse.ArgumentParser(description="Long runs beside fixed rates and Prodigy.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of runs")
    args = parser.parse_args()
    args.checkpoints.mkdir(exist_ok=True, parents=True)
    place = Place(args.data, args.output, args.checkpoints, time.time() + 60 * args.minutes)
    context = multiprocessing.get_context("spawn")
    jobs = [job for job in JOBS if any(part in job.name for part in args.only)]
    processes: list[Any] = [context.Process(target=run, args=(job, place)) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
