"""Does a run come back: after a start that goes wrong, and where a step too far is hard to undo?

    python tests/recovery.py                 # sweeps every task, some ten minutes on two cores

Small tasks at a constant learning rate, each beside a sweep of fixed ones. Prints the excess over
the best of the sweep in percent of what training gained, for each seed: 0 is as good, 100 is where
the run began.

- wrong-5, wrong-20: the first updates of the base are turned around
- large: its first three are 1,000 times as large
- dead: eight layers of ReLU, clipped, in which a step too far leaves no gradient. They begin with
  He's weights: with those of torch SGD leaves the start at no learning rate
- rnn: a recurrent net of ReLU that explodes, clipped
- cliff: a loss of the fourth power, clipped, so that the gradient does not tell how far it is
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, Optimizer

from mechanic.torch import mechanize

RATES = {
    "sgd": [10 ** (k / 2) for k in range(-8, 0)],
    "adam": [10 ** (k / 2) for k in range(-8, -1)],
}
SPOILED = {"wrong-5": (5, -1.0), "wrong-20": (20, -1.0), "large": (3, 1000.0)}
TASKS = (*SPOILED, "dead", "rnn", "cliff")
STEPS, LENGTH = 800, 30
BEST = {
    ("wrong-5", "sgd"): 1e-1,
    ("wrong-5", "adam"): 1e-2,
    ("wrong-20", "sgd"): 1e-1,
    ("wrong-20", "adam"): 1e-2,
    ("large", "sgd"): 1e-1,
    ("large", "adam"): 1e-2,
    ("dead", "sgd"): 10**-1.5,
    ("dead", "adam"): 1e-3,
    ("rnn", "sgd"): 1e-3,
    ("rnn", "adam"): 10**-2.5,
    ("cliff", "sgd"): 1e-2,
    ("cliff", "adam"): 1e-2,
}
"""The best rate of the sweep for each task and base, as the last run of this script printed it."""


class Job(NamedTuple):
    """One run; without an lr, of Mechanic."""

    task: str
    base: str
    lr: float | None
    seed: int


class Recurrent(nn.Module):
    """A net of ReLU over time, whose weights begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)
        nn.init.eye_(dict(self.net.named_parameters())["weight_hh_l0"])

    def forward(self, x: Tensor) -> Tensor:
        """The last output."""
        return self.head(self.net(x)[0][:, -1])[:, 0]  # type: ignore[no-any-return]


def perceptron(depth: int, width: int, he: bool = False) -> nn.Sequential:
    """A net for the digits, with He's weights where `he` says so."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layer = nn.Linear(64 if i == 0 else width, width)
        if he:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Problem:
    """A model, and the loss of its next batch."""

    def __init__(self, task: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.clips = task not in SPOILED
        self.net: Any
        if task == "rnn":
            self.net, self.loss = Recurrent(), self._add
        elif task == "cliff":
            self.net, self.loss = nn.Linear(20, 1, bias=False), self._fourth_power
            nn.init.constant_(self.net.weight, 2.0)
        else:
            images, labels = load_digits(return_X_y=True)
            self.images, self.labels = torch.tensor(images / 8 - 1).float(), torch.tensor(labels)
            self.net = perceptron(8, 32, he=True) if task == "dead" else perceptron(2, 64)
            self.loss = self._classify

    def _classify(self) -> Tensor:
        rows = torch.randint(len(self.images), (64,), generator=self.generator)
        return cross_entropy(self.net(self.images[rows]), self.labels[rows])

    def _add(self) -> Tensor:
        numbers = torch.rand(32, LENGTH, generator=self.generator)
        marks = torch.zeros(32, LENGTH)
        for half in (0, LENGTH // 2):
            at = half + torch.randint(LENGTH // 2, (32, 1), generator=self.generator)
            marks.scatter_(1, at, 1.0)
        return mse_loss(self.net(torch.stack([numbers, marks], 2)), (numbers * marks).sum(1))

    def _fourth_power(self) -> Tensor:
        w = self.net.weight[0]
        noise = 0.3 * torch.randn(20, generator=self.generator)
        return (torch.linspace(1, 10, 20) * (w**2 + w**4) + noise * w).mean()


def make(job: Job, params: Any) -> Optimizer:
    """The optimizer of a run. Only Mechanic's has its first updates spoiled."""
    base: Any = SGD if job.base == "sgd" else Adam
    more = {"momentum": 0.9} if job.base == "sgd" else {}
    if job.lr is not None:
        return base(params, lr=job.lr, **more)  # type: ignore[no-any-return]
    count, times = SPOILED.get(job.task, (0, 1.0))

    class Spoiled(base):  # type: ignore[misc]
        taken = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.taken += 1
            params = [param for group in self.param_groups for param in group["params"]]
            before = [param.clone() for param in params]
            result = super().step(closure)
            if self.taken <= count:
                for param, was in zip(params, before, strict=True):
                    param.copy_(was + times * (param - was))
            return result

    return mechanize(Spoiled(params, lr=1.0, **more))


def train(job: Job) -> tuple[Job, float, float]:
    """The loss at the start, and its mean over the last tenth of the run."""
    torch.set_num_threads(1)
    problem = Problem(job.task, job.seed)
    optimizer = make(job, problem.net.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        if problem.clips:
            nn.utils.clip_grad_norm_(problem.net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    end = mean(losses[-STEPS // 10 :])
    return job, losses[0], end if math.isfinite(end) else math.inf


def excess(start: float, end: float, best: float) -> float:
    """What a loss is above the best of a sweep, in percent of what training gained."""
    return 100 * (end - best) / (start - best)


def main() -> None:
    """Sweep, run Mechanic, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    asked = parser.parse_args()
    rows = [(task, base) for task in asked.tasks for base in RATES]
    sweep = [Job(t, b, lr, seed) for t, b in rows for lr in RATES[b] for seed in range(2)]
    own = [Job(t, b, None, seed) for t, b in rows for seed in range(asked.seeds)]
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = list(pool.map(train, sweep + own))
    print("| task | base | best lr | its loss | excess of Mechanic |")
    print("|---|---|---|---|---|")
    for task, base in rows:
        here = [run for run in runs if run[0][:2] == (task, base)]
        means = {lr: mean(end for job, _, end in here if job.lr == lr) for lr in RATES[base]}
        best = min(means, key=lambda lr: means[lr])
        start = mean(first for _, first, _ in here)
        own_ends = [end for job, _, end in here if job.lr is None]
        each = ", ".join(f"{excess(start, end, means[best]):+.1f}" for end in own_ends)
        print(f"| {task} | {base} | {best:.0e} | {means[best]:.3g} | {each} |")


if __name__ == "__main__":
    main()
