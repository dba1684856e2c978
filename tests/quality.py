"""Small tasks on data that comes with Python and scikit-learn, and the best of a sweep on each.

    python tests/quality.py          writes quality.csv: sweeps every task anew, some five minutes

The sweep is made with the base alone: it has to be made again only if a task is changed.
"""

import csv
import math
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import convex, corpus, lm
from mechanic.bench.suites.shared import classification
from mechanic.bench.task import BuildSettings, Problem, Task, cosine, half_decades, shuffled
from mechanic.bench.train import DivergedError, train

STORED = Path(__file__).with_name("quality.csv")
SEEDS = (0, 1)
GPT = lm.GptSize(layers=2, width=64, context=32, batch=16, steps=200, evaluated=64)
MOST = 400_000  # characters of the Python manual


class Row(NamedTuple):
    """A task with a base."""

    task: Task
    base: str

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.base}"


def rows() -> list[Row]:
    """All of them."""
    data = Data()
    wanted = {"logistic-iris", "logistic-breast_cancer", "logistic-digits8x8"}
    tasks = [task for task in convex.tasks(data) if task.name in wanted]
    text = lm.tasks(data)[0]
    grids = {"sgd": half_decades(-3, 1), "adamw": half_decades(-4, 0), "lion": half_decades(-5, -1)}
    tasks += [
        Task("", "perceptron-digits8x8", grids, _perceptron, "", "", ("images", "digits8x8")),
        Task("", text.name, text.grids, _gpt, "", "", text.uses, text.missing),
    ]
    return [Row(task, base) for task in tasks for base in task.grids]


def _perceptron(setting: BuildSettings) -> Problem:
    x, y, *test = (torch.from_numpy(array) for array in setting.data.tabular("digits8x8"))
    torch.manual_seed(setting.seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 10))
    indices = shuffled(len(x), 32, setting.seed, setting.device)
    return Problem(
        model,
        batches=((x[index], y[index]) for index in indices),
        loss=lambda pair: cross_entropy(model(pair[0]), pair[1]),
        evaluate=classification(model, (x, y), (test[0], test[1])),
        steps=300,
        schedule=cosine(0.0),
    )


def _gpt(setting: BuildSettings) -> Problem:
    """The suite's, of another size."""
    sizes, most = lm.SIZES["short"], corpus.MAX_CHARACTERS["short"]
    lm.SIZES["short"], corpus.MAX_CHARACTERS["short"] = GPT, MOST
    try:
        return lm.tasks(setting.data)[0].build(setting)
    finally:
        lm.SIZES["short"], corpus.MAX_CHARACTERS["short"] = sizes, most


def losses(row: Row, method: str, lr: float) -> list[tuple[float, float]]:
    """Before and after training, for each seed; infinite where it diverged."""
    found = []
    for seed in SEEDS:
        setting = BuildSettings("short", seed, torch.device("cpu"), Data())
        try:
            outcome = train(row.task, METHODS[method], row.base, lr, setting)
            found.append((outcome.start_loss, outcome.metrics["train_loss"]))
        except DivergedError:
            found.append((math.inf, math.inf))
    return found


def sweep(row: Row) -> tuple[float, float, float]:
    """The best lr, the loss it ends at and the loss that training began with, means over seeds."""
    ends = {lr: losses(row, row.base, lr) for lr in row.task.grids[row.base]}
    best = min(ends, key=lambda lr: mean(end for _, end in ends[lr]))
    starts = [start for pairs in ends.values() for start, _ in pairs if math.isfinite(start)]
    return best, mean(end for _, end in ends[best]), mean(starts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with STORED.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["row", "lr", "best", "start"])
        for row in rows():
            table.writerow([row.name, *sweep(row)])
            file.flush()
            print(row.name, flush=True)
