"""Runs with hardly any noise at a constant learning rate, beside fixed rates.

    python research/little_noise.py --jobs 2 --output runs.csv     # some 25 minutes on two cores
    python research/little_noise.py --jobs 2 --methods mechanic \
        --beside research/results/little_noise_cpu.csv             # some 3 minutes

Perceptrons, a convnet and an autoencoder on what comes with scikit-learn, a few hundred examples
that can be learned by heart, in batches of all of them or of a part, with six bases and 500 steps.
Excess is that of the training loss over the best of ten half decades, the mean of its seeds, in
percent of what training gained; lost is what is above 20 %. `digits` is the task on which this was
seen, the others had played no part in any rule.
"""

import argparse
import csv
import math
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import held_out
import torch
from held_out import Pair, layers
from sklearn.datasets import load_diabetes, load_wine
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from mechanic.bench.task import half_decades
from mechanic.torch import mechanize

STEPS, SEEDS = 500, range(3)
RATES = half_decades(-4, 1)[1:]
BASES: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "nesterov": lambda params, lr: SGD(params, lr=lr, momentum=0.9, nesterov=True),
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
}


class Given(NamedTuple):
    """A model, and what it is to learn by heart."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    part: int
    """The size of the smaller batches"""


def images(count: int) -> Pair:
    x, y = held_out.digits()
    return x[:count], y[:count]


def digits() -> Given:
    return Given(layers(64, 64, 64, 10), *images(512), F.cross_entropy, 32)


def wine() -> Given:
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    model = layers(13, 64, 64, 3, activation=nn.Tanh)
    return Given(model, x, torch.tensor(y), F.cross_entropy, 64)


def diabetes() -> Given:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None]
    return Given(layers(10, 64, 64, 1, activation=nn.GELU), x, y, F.mse_loss, 64)


def convnet() -> Given:
    x, y = images(300)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    return Given(model, x.view(-1, 1, 8, 8), y, F.cross_entropy, 64)


def autoencoder() -> Given:
    x, _ = images(400)
    return Given(layers(64, 64, 16, 64, 64), x, x, F.mse_loss, 64)


TASKS = {task.__name__: task for task in (digits, wine, diabetes, convnet, autoencoder)}


class Case(NamedTuple):
    task: str
    batch: str
    """`whole` or `part`"""
    base: str
    method: str
    """`mechanic`, or a fixed rate"""
    seed: int


class Ended(NamedTuple):
    start: float
    """The loss of all examples before training"""
    loss: float
    """The median of that loss over the last 20 steps"""


def train(case: Case) -> Ended:
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    given = TASKS[case.task]()
    params = list(given.model.parameters())
    is_tuned = case.method == "mechanic"
    optimizer = BASES[case.base](params, lr=1.0 if is_tuned else float(case.method))
    if is_tuned:
        mechanize(optimizer)
    draw = torch.Generator().manual_seed(case.seed)
    count = len(given.x)

    def loss_of_all() -> float:
        with torch.no_grad():
            return float(given.loss(given.model(given.x), given.y))

    start, lasts = loss_of_all(), []
    for step in range(STEPS):
        batch = torch.arange(count)
        if case.batch == "part":
            batch = torch.randint(count, (given.part,), generator=draw)
        optimizer.zero_grad()
        given.loss(given.model(given.x[batch]), given.y[batch]).backward()
        optimizer.step()
        if step >= STEPS - 20:
            lasts.append(loss_of_all())
    found = median(lasts)
    return Ended(start, found if math.isfinite(found) else start)


def report(runs: dict[Case, Ended]) -> None:
    """The excess of each row, and of all."""
    seeds = sorted({case.seed for case in runs if case.method == "mechanic"})
    rates = sorted({case.method for case in runs if case.method[0].isdigit()}, key=float)
    shown: dict[str, list[float]] = {}
    for task, batch, base in dict.fromkeys(case[:3] for case in runs):
        at = {rate: [runs[Case(task, batch, base, rate, s)] for s in seeds] for rate in rates}
        best = min(fmean(run.loss for run in found) for found in at.values())
        tuned = [runs[Case(task, batch, base, "mechanic", s)] for s in seeds]
        gained = fmean(run.start for run in tuned) - best
        excess = [100 * (run.loss - best) / gained for run in tuned]
        shown.setdefault("digits" if task == "digits" else "the others", []).extend(excess)
        print(task, batch, base, "best", f"{best:.3g}", "excess", *(f"{e:+.2f}" for e in excess))
    for name, excess in shown.items():
        above = [sum(e > limit for e in excess) for limit in (5, 20)]
        mean = fmean(excess)
        print(f"{name}: mean {mean:+.2f}, {above[0]} above 5 %, {above[1]} of {len(excess)} lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", default=("mechanic", *map("{:.0e}".format, RATES)))
    parser.add_argument("--output", type=Path, help="write every run to this CSV file")
    parser.add_argument("--beside", type=Path, help="runs of the other methods, from such a file")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {STEPS} steps", file=sys.stderr)
    cases = [
        Case(*names)
        for names in product(asked.tasks, ("whole", "part"), BASES, asked.methods, asked.seeds)
    ]
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = dict(zip(cases, pool.map(train, cases, chunksize=8), strict=True))
    if asked.beside:
        with asked.beside.open(encoding="utf-8") as file:
            for kept in csv.DictReader(file):
                case = Case(*(kept[name] for name in Case._fields[:4]), int(kept["seed"]))
                if case.method not in asked.methods and case.task in asked.tasks:
                    runs[case] = Ended(float(kept["start"]), float(kept["loss"]))
    if asked.output:
        with asked.output.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Case._fields + Ended._fields)
            for case, ended in runs.items():
                writer.writerow([*case, *(f"{number:.6g}" for number in ended)])
    if "mechanic" in asked.methods:
        report(runs)


if __name__ == "__main__":
    main()
