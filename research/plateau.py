"""The signal on BERT's plateau: the cosine of Δ and −g along runs at fixed learning rates.

    python research/plateau.py --data DIR --jobs 2        # some 20 minutes on two cores

The model is the BERT of `mechanic bench` with a width of 64 and 2,048 words, trained for 400 steps
with batches of 32. It learns the frequencies of words first, and stays there for long or for ever
if the lr is too large. A fixed lr is the default rule with S held there, so Δ and h are what the
tuner would see. The table has 1,000 times the mean cosine over ranges of steps, ± the standard
error, as if the steps were independent.
"""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from mechanic import tuner
from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import mlm
from mechanic.bench.task import BuildSettings
from mechanic.bench.train import train
from mechanic.options import Options

SIZE = mlm.BertSize(4, 64, 2048, length=64, batch=32, steps=400, evaluated=256)
LRS = (5e-4, 1e-3, 2e-3, 3e-3, 1e-2)
SEEDS = range(3)
PARTS = ((30, 60), (60, 100), (100, 160), (160, 240), (240, 320), (320, 400))  # steps


class Trained(NamedTuple):
    loss: float
    cosines: list[float]
    rates: list[float]
    """The lr in force, over the run"""


def run(data: Path, case: tuple[float | None, int]) -> Trained:
    """Train at a fixed lr, or with the default rule."""
    lr, seed = case
    torch.set_num_threads(1)
    mlm.SIZES["short"] = SIZE
    cosines: list[float] = []
    default = tuner.RULES["default"]

    def update(
        options: Options, state: tuner.State, sums: tuner.Sums
    ) -> tuple[tuner.State, tuner.Array]:
        norms = math.sqrt(float(sums.dd * sums.gg))
        cosines.append(-float(sums.dg) / norms if norms else 0.0)
        state, keep = default.update(options, state, sums)
        if lr is None:
            return state, keep
        return state._replace(s=0 * state.s + lr), 0 * keep + 1

    tuner.RULES["default"] = default._replace(update=update)
    setting = BuildSettings("short", seed, torch.device("cpu"), Data(data))
    (task,) = mlm.tasks(setting.data)
    outcome = train(task, METHODS["mechanic"], "adamw", 1.0, setting)
    tuner.RULES["default"] = default  # for the next run of this process
    return Trained(outcome.metrics["train_loss"], cosines, list(outcome.curve.lr))


def show(name: str, seeds: Sequence[Trained]) -> str:
    """A row: the loss of each seed, and 1,000 times the mean cosine in each part."""
    losses = [trained.loss for trained in seeds]
    cells = [name, ", ".join(f"{loss:.3f}" for loss in losses), f"{fmean(losses):.3f}"]
    for start, end in PARTS:
        found = [1000 * cosine for one in seeds for cosine in one.cosines[start:end]]
        cells.append(f"{fmean(found):+.1f} ± {stdev(found) / math.sqrt(len(found)):.1f}")
    rates = (
        fmean(one.rates[len(one.rates) * percent // 100] for one in seeds)
        for percent in (10, 30, 50, 70)
    )
    return f"| {' | '.join([*cells, ', '.join(f'{rate:.1e}' for rate in rates)])} |"


def rows(data: Path, jobs: int) -> Iterator[str]:
    head = ("lr", "train loss", "mean", *(f"steps {start} to {end}" for start, end in PARTS))
    yield f"| {' | '.join(head)} | lr in force at 10, 30, 50, 70 % |"
    yield "|" + "---|" * (len(head) + 1)
    fixed: tuple[float | None, ...] = (*LRS, None)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(run, data), product(fixed, SEEDS))
        for lr in fixed:
            seeds = list(islice(found, len(SEEDS)))
            yield show("the default" if lr is None else f"{lr:g}", seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of `mechanic bench`")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args()
    for row in rows(arguments.data, arguments.jobs):
        print(row, flush=True)


if __name__ == "__main__":
    main()
