"""A short run on a plateau: a perceptron that learns sin(XW), with AdamW and a cosine.

    python research/sine.py            # some three minutes on one core

For 300 and 1,500 steps: the train loss at the end with each fixed learning rate, the mean of ten
seeds, and the excess over the best of them for each seed of Mechanic, `preset="paper"` and Prodigy.
"""

from dataclasses import replace
from functools import partial
from statistics import fmean

import held_out
import torch
from torch.nn import functional as F  # noqa: N812

from mechanic.bench.methods import METHODS
from mechanic.bench.task import BuildSettings, Problem, Task, cosine, half_decades
from mechanic.bench.train import train

SEEDS, LENGTHS, RATES = range(10), (300, 1500), half_decades(-3, 0)
COMPARED = ("mechanic", "mechanic-paper", "prodigy")


def sine(steps: int, settings: BuildSettings) -> Problem:
    torch.manual_seed(settings.seed)
    x = torch.randn(1024, 8)
    y = torch.sin(x @ torch.randn(8, 1))
    model = held_out.layers(8, 32, 1)
    draws = iter(lambda: torch.randint(len(x), (32,)), None)
    pairs = ((x[index], y[index]) for index in draws)
    problem = held_out.problem(
        model, lambda p: F.mse_loss(model(p[0]), p[1]), pairs, {"train_loss": (x, y)}, cosine()
    )
    return replace(problem, steps=steps)


def run(method: str, lr: float, seed: int, steps: int) -> tuple[float, float]:
    """The train loss before and after."""
    task = Task("plateau", "sine", {"adamw": RATES}, partial(sine, steps), "train_loss", "", None)
    settings = BuildSettings("short", seed, held_out.CPU, held_out.Data(None))
    outcome = train(task, METHODS[method], "adamw", lr, settings)
    return outcome.start_loss, outcome.metrics["train_loss"]


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    for steps in LENGTHS:
        fixed = {lr: [run("adamw", lr, seed, steps) for seed in SEEDS] for lr in RATES}
        means = {lr: fmean(after for _, after in runs) for lr, runs in fixed.items()}
        print(f"{steps} steps: " + ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in means.items()))
        start = fmean(before for before, _ in fixed[RATES[0]])
        best = min(means.values())
        for method in COMPARED:
            ends = [run(method, METHODS[method].lr, seed, steps)[1] for seed in SEEDS]
            found = [100 * (end - best) / (start - best) for end in ends]
            lost = sum(value > 20 for value in found)
            each = ", ".join(f"{value:+.0f}" for value in found)
            print(f"  {method}: {fmean(found):+.1f} ({each}), {lost} lost", flush=True)


if __name__ == "__main__":
    main()
