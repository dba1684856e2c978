"""A short run on a plateau: a perceptron that learns sin(XW), with AdamW and a cosine.

    python research/sine.py            # a minute on one core

For 300 and 1,500 steps: the train loss at the end with each fixed learning rate, the mean of ten
seeds, and the excess over the best of them for each seed of Mechanic, `preset="paper"` and Prodigy.
"""

from statistics import fmean

import torch
from prodigyopt import Prodigy
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.bench.task import half_decades
from mechanic.torch import mechanize

SEEDS, LENGTHS, RATES = range(10), (300, 1500), half_decades(-3, 0)
METHODS = {
    "Mechanic": lambda params: mechanize(AdamW(params, lr=1.0, weight_decay=0.0)),
    "paper": lambda params: mechanize(AdamW(params, lr=1.0, weight_decay=0.0), preset="paper"),
    "Prodigy": lambda params: Prodigy(params, lr=1.0),
}


def run(make, seed: int, steps: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """The train loss before and after."""
    torch.manual_seed(seed)
    x = torch.randn(1024, 8)
    y = torch.sin(x @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer: Optimizer = make(model.parameters())
    schedule = CosineAnnealingLR(optimizer, T_max=steps)

    def loss() -> float:
        with torch.no_grad():
            return float(mse_loss(model(x), y))

    before = loss()
    for _ in range(steps):
        chosen = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        mse_loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    return before, loss()


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    for steps in LENGTHS:
        fixed = {
            lr: [
                run(lambda p, lr=lr: AdamW(p, lr=lr, weight_decay=0.0), seed, steps)
                for seed in SEEDS
            ]
            for lr in RATES
        }
        means = {lr: fmean(after for _, after in runs) for lr, runs in fixed.items()}
        print(f"{steps} steps: " + ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in means.items()))
        start = fmean(before for before, _ in next(iter(fixed.values())))
        best = min(means.values())
        for name, make in METHODS.items():
            found = [100 * (run(make, s, steps)[1] - best) / (start - best) for s in SEEDS]
            lost = sum(value > 20 for value in found)
            each = ", ".join(f"{value:+.0f}" for value in found)
            print(f"  {name}: {fmean(found):+.1f} ({each}), {lost} lost", flush=True)


if __name__ == "__main__":
    main()
