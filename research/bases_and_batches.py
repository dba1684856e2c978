"""Mechanic beside a sweep, with bases, batch sizes and starts that the bench does not have.

    python research/bases_and_batches.py                # some minutes on one core
    python research/bases_and_batches.py Muon "batch *"  # these rows alone

A perceptron on scikit-learn's digits, with

- Schedule-Free at a constant lr;
- LoRA on a network that has learned half of the digits;
- batches of 8 examples up to all of them, and of 4,096 with noisy pixels;
- RMSprop, Adagrad and Muon;
- a task whose first gradients are noise: is a digit odd or bright, but not both?
- a constant lr for 2,000 steps.

Excess is that of the training loss over the best of a sweep in half decades, in percent of what
training gained, as a mean over three seeds.
"""

import math
import platform
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from statistics import mean
from typing import NamedTuple

import numpy as np
import schedulefree
import torch
from lora import Adapter
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer, RMSprop

from mechanic.torch import mechanize, tuner

SEEDS = range(3)
STEPS = 300


def perceptron(classes: int = 10, bias: bool = True) -> nn.Sequential:
    linear = partial(nn.Linear, bias=bias)
    return nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64), nn.ReLU(), linear(64, classes))


def odd_or_bright(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Neither tells anything alone."""
    light = data[0].mean(1)
    return data[0], data[1] % 2 ^ (light > light.median()).long()


def adapted(data: tuple[Tensor, Tensor]) -> nn.Sequential:
    """Trained on the digits below 5, with adapters in place of its layers."""
    model, low = perceptron(), data[1] < 5
    x, y = (part[low] for part in data)
    optimizer = AdamW(model.parameters(), 3e-3)
    for step in range(200):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:32]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.Sequential(
        *(Adapter(part, rank=4) if isinstance(part, nn.Linear) else part for part in model)
    )


class Row(NamedTuple):
    make: Callable[..., Optimizer]
    grid: tuple[float, float]
    """The powers of ten between which the sweep goes, four apart: nine half decades."""
    batch: int = 32
    is_constant: bool = False
    has_adapters: bool = False
    is_hard: bool = False
    steps: int = STEPS
    has_biases: bool = True
    noise: float = 0.0
    """Added to the pixels, anew in each batch, which may then be larger than the data."""


momentum = partial(SGD, momentum=0.9)
ROWS = {
    "Schedule-Free AdamW, no schedule": Row(
        schedulefree.AdamWScheduleFree, (-4, 0), is_constant=True
    ),
    "Schedule-Free SGD, no schedule": Row(schedulefree.SGDScheduleFree, (-2, 2), is_constant=True),
    "LoRA, AdamW": Row(AdamW, (-4, 0), has_adapters=True),
    "LoRA, SGD": Row(momentum, (-4, 0), has_adapters=True),
    **{
        f"batch {batch}, {name}": Row(make, grid, batch)
        for batch in (8, 128, 1797)
        for name, make, grid in (("SGD", momentum, (-3.5, 0.5)), ("AdamW", AdamW, (-4, 0)))
    },
    "batch 4,096, SGD": Row(momentum, (-3.5, 0.5), 4096, noise=0.3),
    "batch 4,096, AdamW": Row(AdamW, (-4, 0), 4096, noise=0.3),
    "Muon": Row(partial(Muon, weight_decay=0.0), (-4, 0), has_biases=False),  # matrices alone
    "RMSprop": Row(RMSprop, (-4.5, -0.5)),
    "Adagrad": Row(Adagrad, (-3, 1)),
    "odd or bright, AdamW": Row(AdamW, (-4, 0), 16, is_hard=True, steps=600),
    "odd or bright, SGD": Row(momentum, (-3.5, 0.5), 16, is_hard=True, steps=600),
    "no schedule, 2,000 steps of 8, AdamW": Row(AdamW, (-4, 0), 8, is_constant=True, steps=2000),
    "no schedule, 2,000 steps of 8, SGD": Row(
        momentum, (-3.5, 0.5), 8, is_constant=True, steps=2000
    ),
}


def train(
    row: Row, seed: int, data: tuple[Tensor, Tensor], lr: float | None
) -> tuple[float, float, str]:
    """The loss over all data before and after, and the learned rate on the way."""
    torch.manual_seed(seed)
    classes = 2 if row.is_hard else 10
    model = adapted(data) if row.has_adapters else perceptron(classes, row.has_biases)
    x, y = odd_or_bright(data) if row.is_hard else data
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = row.make(params, lr=1.0 if lr is None else lr)
    if lr is None:
        mechanize(optimizer)
    schedule = None
    averages = hasattr(optimizer, "train")  # Schedule-Free
    if averages:
        optimizer.train()  # type: ignore[attr-defined]
    if not row.is_constant:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, row.steps)
    order, rates = torch.Generator().manual_seed(seed), []
    start = float(F.cross_entropy(model(x), y).detach())
    for step in range(row.steps):
        if row.noise:
            rows = torch.randint(len(x), (row.batch,), generator=order)
            pixels = x[rows] + row.noise * torch.randn(row.batch, 64, generator=order)
        else:
            rows = torch.randperm(len(x), generator=order)[: row.batch]
            pixels = x[rows]
        loss = F.cross_entropy(model(pixels), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if lr is None and step in (15, row.steps // 5, row.steps // 2, row.steps - 10):
            rates.append(f"{float(tuner(optimizer).scale):.2g}")
    if averages:
        optimizer.eval()  # type: ignore[attr-defined]
    end = float(F.cross_entropy(model(x), y).detach())
    return start, end if math.isfinite(end) else 1e9, " ".join(rates)


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {platform.machine()}, seeds 0 to 2, {STEPS} steps or as said\n"
    )
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    print(
        "| | best lr | its loss | Mechanic | excess, each seed | learned at 15, 1/5, 1/2, the end |"
    )
    print("|---|---|---|---|---|---|")
    wanted = sys.argv[1:] or ["*"]
    for name, row in ROWS.items():
        if not any(fnmatch(name, pattern) for pattern in wanted):
            continue
        lrs = np.logspace(*row.grid, 9).tolist()
        swept = {lr: [train(row, seed, data, lr) for seed in SEEDS] for lr in lrs}
        lr, runs = min(swept.items(), key=lambda item: mean(end for _, end, _ in item[1]))
        best, start = mean(end for _, end, _ in runs), mean(first for first, _, _ in runs)
        own = [train(row, seed, data, None) for seed in SEEDS]
        excess = [100 * (end - best) / (start - best) for _, end, _ in own]
        edge = " (edge)" if lr in (min(swept), max(swept)) else ""
        each = ", ".join(f"{value:+.2f}" for value in excess)
        found = f"{lr:.2g}{edge} | {best:.4f} | {mean(excess):+.2f} %"
        print(f"| {name} | {found} | {each} | {own[0][2]} |", flush=True)


if __name__ == "__main__":
    main()
