"""Mechanic beside sweeps and Prodigy, on tasks that only helped to choose between the last rules.

    python research/held_out.py --jobs 2        # some 20 minutes on two cores
    python research/held_out.py --jobs 2 --methods mechanic --beside research/results/held_out.csv
    python research/held_out.py --jobs 2 --constant --methods sweeps mechanic

With `--beside`, runs that are kept there stand for the methods that do not run. With `--constant`,
the learning rate is constant after a warm-up of 5 %, and gradients are clipped to a norm of 1.

Regression, an autoencoder, a convnet with batch norm, a VAE, a GRU, matrix completion, modular
addition, a curve without noise, character n-grams and a transformer that reverses sequences, each
with SGD, AdamW and Lion. The data comes with scikit-learn and Python, or is synthetic. One row, the
curve with SGD, did play a part: a guard in the rule was made for it. Excess is that of the training
loss over the best of nine half decades, in percent of what training gained, with three seeds. Test
losses are those of the same runs, where there is a test set.
"""

import argparse
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.record import Run
from mechanic.bench.report.text import read_runs, runs_csv
from mechanic.bench.score import compare, final_losses, gain, summarize
from mechanic.bench.task import (
    BuildSettings,
    Problem,
    Task,
    cosine,
    half_decades,
    linear,
    shuffled,
)
from mechanic.bench.train import DivergedError, train

SEEDS = range(3)
GRIDS = {"sgd": half_decades(-3, 1), "adamw": half_decades(-4, 0), "lion": half_decades(-5, -1)}
STEPS = 500
CPU = torch.device("cpu")
Pair = tuple[Tensor, Tensor]
Loss = Callable[[Pair], Tensor]


def problem(
    model: nn.Module,
    loss: Loss,
    pairs: Iterator[Pair],
    sets: Mapping[str, Pair],
    schedule: Callable[[float], float],
) -> Problem:
    """`sets` are those to evaluate on, by the name of the loss."""

    def evaluate() -> dict[str, float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # for a VAE's noise
            return {name: float(loss(pair)) for name, pair in sets.items()}

    return Problem(model, pairs, loss, evaluate, STEPS, schedule)


def of_a_set(
    model: nn.Module,
    loss: Loss,
    data: Pair,
    batch: int,
    seed: int,
    schedule: Callable[[float], float],
    tested: float = 0.25,
) -> Problem:
    """Batches of a set of which a part is kept for the test."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0))
    count = int(len(order) * (1 - tested))
    x, y = (part[order[:count]] for part in data)
    sets = {"train_loss": (x, y)}
    if tested:
        sets["test_loss"] = (data[0][order[count:]], data[1][order[count:]])
    pairs = ((x[index], y[index]) for index in shuffled(count, batch, seed, CPU))
    return problem(model, loss, pairs, sets, schedule)


def layers(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    parts = [nn.Linear(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*(m for part in parts for m in (part, activation())))[:-1]


def digits() -> Pair:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def regression(seed: int) -> Problem:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    model = layers(10, 64, 64, 1)
    return of_a_set(
        model, lambda p: F.mse_loss(model(p[0])[:, 0], p[1]), (x, y), 32, seed, cosine(0.05)
    )


def autoencoder(seed: int) -> Problem:
    x, _ = digits()
    model = layers(64, 64, 16, 64, 64)
    return of_a_set(model, lambda p: F.mse_loss(model(p[0]), p[1]), (x, x), 64, seed, linear())


def convnet(seed: int) -> Problem:
    x, y = digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    data = x.view(-1, 1, 8, 8), y
    return of_a_set(
        model, lambda p: F.cross_entropy(model(p[0]), p[1]), data, 64, seed, cosine(0.05)
    )


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(64, 64, 16), layers(8, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The evidence bound, in nats an image."""
        centre, log_variance = self.encoder(x).chunk(2, 1)
        code = centre + torch.randn_like(centre) * (log_variance / 2).exp()
        misfit = F.binary_cross_entropy_with_logits(self.decoder(code), x, reduction="sum")
        apart = 0.5 * (centre**2 + log_variance.exp() - log_variance - 1).sum()
        return (misfit + apart) / len(x)


def variational(seed: int) -> Problem:
    x, _ = digits()
    model = Variational()
    return of_a_set(model, lambda p: model(p[0]), (x, x), 64, seed, cosine())


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])[:, 0]


def adding(seed: int) -> Problem:
    """The sum of the two numbers of 15 that are marked."""

    def draw(count: int, generator: torch.Generator) -> Pair:
        values = torch.rand(count, 15, generator=generator)
        marks = torch.rand(count, 15, generator=generator).argsort(1) < 2
        return torch.stack([values, marks.float()], 2), (values * marks).sum(1)

    model, generator = Adder(), torch.Generator().manual_seed(seed)
    pairs = iter(lambda: draw(64, generator), None)
    fixed = draw(512, torch.Generator().manual_seed(99))
    return problem(
        model, lambda p: F.mse_loss(model(p[0]), p[1]), pairs, {"train_loss": fixed}, linear(0.05)
    )


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(200, 8), nn.Embedding(150, 8)
        for part in (self.rows, self.columns):
            nn.init.normal_(part.weight, std=0.1)

    def forward(self, index: Tensor) -> Tensor:
        return (self.rows(index[:, 0]) * self.columns(index[:, 1])).sum(1)


def completion(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 5, generator=generator) for size in (200, 150))
    full = left @ right.T / math.sqrt(5) + 0.1 * torch.randn(200, 150, generator=generator)
    index = torch.randperm(30_000, generator=generator)[:8000]
    index = torch.stack([index // 150, index % 150], 1)
    model, values = Factors(), full[index[:, 0], index[:, 1]]
    return of_a_set(
        model, lambda p: F.mse_loss(model(p[0]), p[1]), (index, values), 256, seed, linear()
    )


def modular(seed: int) -> Problem:
    a, b = torch.meshgrid(torch.arange(23), torch.arange(23), indexing="ij")
    x, y = torch.stack([a.flatten(), b.flatten()], 1), ((a + b) % 23).flatten()
    model = nn.Sequential(nn.Embedding(23, 32), nn.Flatten(), *layers(64, 128, 23))
    return of_a_set(
        model, lambda p: F.cross_entropy(model(p[0]), p[1]), (x, y), 64, seed, cosine(), tested=0.0
    )


def curve(seed: int) -> Problem:
    """All points in every batch: no noise."""
    x = torch.linspace(-1, 1, 256)[:, None]
    y = x * torch.sin(8 * x)
    model = layers(1, 64, 64, 1, activation=nn.Tanh)
    return of_a_set(
        model, lambda p: F.mse_loss(model(p[0]), p[1]), (x, y), 256, seed, cosine(), tested=0.0
    )


def characters(seed: int) -> Problem:
    """The next character after five, in Python's manual."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")[:100_000]
    codes = torch.tensor(np.frombuffer(text, np.uint8).astype(np.int64))
    windows = codes.unfold(0, 6, 5)
    model = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), *layers(80, 128, 128))
    data = windows[:, :5], windows[:, 5]
    return of_a_set(
        model, lambda p: F.cross_entropy(model(p[0]), p[1]), data, 128, seed, linear(0.05)
    )


class Reverser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(10, 32), nn.Linear(32, 10)
        self.places = nn.Parameter(0.1 * torch.randn(8, 32))
        self.block = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(x) + self.places)).transpose(1, 2)


def reversal(seed: int) -> Problem:
    def draw(count: int, generator: torch.Generator) -> Pair:
        x = torch.randint(10, (count, 8), generator=generator)
        return x, x.flip(1)

    model, generator = Reverser(), torch.Generator().manual_seed(seed)
    pairs = iter(lambda: draw(64, generator), None)
    fixed = draw(512, torch.Generator().manual_seed(99))
    return problem(
        model,
        lambda p: F.cross_entropy(model(p[0]), p[1]),
        pairs,
        {"train_loss": fixed},
        cosine(0.05),
    )


BUILDERS = {
    "regression, diabetes": regression,
    "autoencoder, digits": autoencoder,
    "convnet, digits": convnet,
    "VAE, digits": variational,
    "GRU, adding": adding,
    "matrix completion": completion,
    "modular addition": modular,
    "a curve, no noise": curve,
    "characters, manual": characters,
    "transformer, reversal": reversal,
}


def seeded(builder: Callable[[int], Problem], constant: bool, setting: BuildSettings) -> Problem:
    torch.manual_seed(setting.seed)
    built = builder(setting.seed)
    if constant:
        return replace(built, schedule=lambda part: min(1.0, part / 0.05 + 1 / STEPS), clip=1.0)
    return built


def tasks(constant: bool) -> dict[str, Task]:
    return {
        name: Task(
            "held out",
            name,
            GRIDS,
            partial(seeded, builder, constant),
            "test_loss",
            "",
            ("text", ""),
        )
        for name, builder in BUILDERS.items()
    }


class Cell(NamedTuple):
    task: str
    method: str
    base: str
    lr: float
    seed: int


def cells(methods: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(name, method, base, lr, seed)
        for name, task in tasks(constant=False).items()
        for seed in seeds
        for method in methods
        for base, lrs in METHODS[method].typed_rates(task, (1.0,)).items()
        for lr in lrs
    ]


def execute(constant: bool, cell: Cell) -> Run:
    torch.set_num_threads(1)
    task, method = tasks(constant)[cell.task], METHODS[cell.method]
    setting = BuildSettings("short", cell.seed, CPU, Data())
    about = (task.suite, task.name, setting.budget, method.name, method.kind, *cell[2:])
    try:
        outcome = train(task, method, cell.base, cell.lr, setting)
    except DivergedError as error:
        return Run(*about, "diverged", str(error))
    return Run(*about, "done", start_loss=outcome.start_loss, metrics=outcome.metrics)


def loss_and_test(runs: Sequence[Run]) -> str:
    losses = (final_losses(runs, metric) for metric in ("train_loss", "test_loss"))
    return ", ".join(f"{fmean(found.values()):.4g}" for found in losses if found)


def report(runs: Iterable[Run]) -> None:
    (comparison,) = compare(runs)
    print(
        "| task | base | best lr | its loss, test | Mechanic, test | excess, each seed | others |"
    )
    print("|---|---|---|---|---|---|---|")
    scores: dict[str, list[float]] = defaultdict(list)
    for row in comparison.scored:
        assert row.sweep is not None
        best, gained = fmean(final_losses(row.sweep.best).values()), gain(row.sweep)
        own, *peers = row.results
        for result in row.results:
            scores[result.method.label].append(result.counted)
        ends = final_losses(own.runs).values()
        each = ", ".join(f"{100 * (end - best) / gained:+.1f}" for end in ends)
        edge = " (edge)" if row.sweep.edge else ""
        print(
            f"| {row.task} | {row.base} | {row.sweep.best_lr:.0e}{edge} "
            f"| {loss_and_test(row.sweep.best)} | {loss_and_test(own.runs)} "
            f"| **{own.counted:+.1f}** ({each}) | "
            f"{', '.join(f'{peer.counted:+.1f}' for peer in peers)} |"
        )
    for summary in summarize(comparison):
        values = scores[summary.method.label]
        over = sum(value > 2 for value in values)
        print(
            f"\n{summary.method.label}: mean {summary.mean:+.2f} %, median {median(values):+.2f}, "
            f"worst {summary.worst:+.1f}; {over} of {summary.rows} rows above 2 %."
        )
    for label in [label for label in scores if label != "mechanic"]:
        lower = sum(a < b for a, b in zip(scores["mechanic"], scores[label], strict=True))
        print(f"\nMechanic ends lower than {label} on {lower} rows.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="write every run to this CSV file")
    parser.add_argument("--constant", action="store_true")
    every = ("sweeps", "mechanic", "prodigy")
    parser.add_argument("--methods", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--beside", type=Path, help="runs of the other methods, from a CSV file")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {STEPS} steps\n")
    methods = [m for name in asked.methods for m in (GRIDS if name == "sweeps" else (name,))]
    with ProcessPoolExecutor(asked.jobs) as pool:
        chosen = cells(methods, asked.seeds)
        runs = list(pool.map(partial(execute, asked.constant), chosen, chunksize=4))
    if asked.beside:
        runs += [run for run in read_runs(asked.beside) if run.method not in methods]
    if asked.runs:
        asked.runs.write_text(runs_csv(runs), encoding="utf-8")
    report(runs)


if __name__ == "__main__":
    main()
