"""The lr that `mechanic run` suggests, beside two other suggestions and the best of a sweep.

    python benchmarks/lr_to_paste.py        # two minutes on one core

Each lr is given to the plain optimizer: 600 steps of 64 examples, a network with one hidden layer,
scikit-learn's digits and diabetes, seed 0. The loss is the final one over all data.
"""

import platform
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.run.advice import analyze
from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History
from mechanic.torch import mechanize, tuner

STEPS, BATCH, WIDTH = 600, 64, 64
LRS = np.logspace(-3, 0, 7).tolist()
Data = tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
Base = Callable[..., Optimizer]


def problems() -> dict[str, Data]:
    images, digits = load_digits(return_X_y=True)
    features, disease = load_diabetes(return_X_y=True)
    disease = StandardScaler().fit_transform(disease[:, None])
    features = StandardScaler().fit_transform(features)
    return {
        "digits": (torch.tensor(images / 16).float(), torch.tensor(digits), F.cross_entropy),
        "diabetes": (torch.tensor(features).float(), torch.tensor(disease).float(), F.mse_loss),
    }


def train(data: Data, base: Base, falls: bool, lr: float | None) -> tuple[float, History]:
    """The loss at the end, and what `mechanic run` would have noted."""
    x, y, criterion = data
    torch.manual_seed(0)
    outputs = 10 if y.dim() == 1 else 1
    model = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
    optimizer = base(model.parameters(), lr=1.0 if lr is None else lr)
    if lr is None:
        mechanize(optimizer)
    schedule = CosineAnnealingLR(optimizer, STEPS) if falls else None
    history = History("", 0, groups=[{"lr": 1.0, "initial_lr": 1.0}])
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        criterion(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if lr is None:
            rates = tuple(group["lr"] for group in optimizer.param_groups)
            scale = float(tuner(optimizer).scale)
            history.rows.append(HistoryRow(step, 0.0, scale, 0, rates, ()))
        if schedule is not None:
            schedule.step()
    return float(criterion(model(x), y).detach()), history


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}\n")
    print("| problem, base, schedule | Mechanic | suggested | plain median | final scale | sweep |")
    print("|---|---:|---:|---:|---:|---:|")
    bases: dict[str, Base] = {"AdamW": AdamW, "SGD": partial(SGD, momentum=0.9)}
    for name, data in problems().items():
        for base, make in bases.items():
            for falls in (False, True):
                own, history = train(data, make, falls, None)
                found = analyze(history)
                settled = [row.scale for row in history.rows if row.step >= (found.ramp or 0)]
                says = (found.suggested[0], median(settled), settled[-1])
                cells = [f"{lr:.2g}, {train(data, make, falls, lr)[0]:.2g}" for lr in says]
                loss, best = min((train(data, make, falls, lr)[0], lr) for lr in LRS)
                row = f"{name}, {base}, {'cosine' if falls else 'constant'} | {own:.2g}"
                print(f"| {row} | {' | '.join(cells)} | {best:.2g}, {loss:.2g} |", flush=True)


if __name__ == "__main__":
    main()
