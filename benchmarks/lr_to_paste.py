"""What is lost by pasting the lr that Mechanic suggests, beside the best of a sweep.

    python benchmarks/lr_to_paste.py        # six minutes on one core

Each lr is given to the plain optimizer: 600 steps of 64 examples, a network with one hidden layer,
scikit-learn's digits and diabetes. The loss is the final one over all data, the mean of 3 seeds.
"""

import platform
from collections.abc import Callable
from functools import partial
from statistics import fmean

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import mechanize, tuner

STEPS, BATCH, WIDTH, SEEDS = 600, 64, 64, range(3)
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


def train(data: Data, base: Base, falls: bool, seed: int, lr: float) -> tuple[float, Optimizer]:
    """The loss at the end, and the optimizer. Mechanic trains where the lr is 0."""
    x, y, criterion = data
    torch.manual_seed(seed)
    outputs = 10 if y.dim() == 1 else 1
    model = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
    optimizer = base(model.parameters(), lr=lr or 1.0)
    if not lr:
        mechanize(optimizer)
    schedule = CosineAnnealingLR(optimizer, STEPS) if falls else None
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        criterion(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return float(criterion(model(x), y).detach()), optimizer


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {len(SEEDS)} seeds\n")
    print("| problem, base, schedule | Mechanic | suggested lr, loss | last scale, loss | sweep |")
    print("|---|---:|---:|---:|---:|")
    bases: dict[str, Base] = {"AdamW": AdamW, "SGD": partial(SGD, momentum=0.9)}
    for name, data in problems().items():
        for base, make in bases.items():
            for falls in (False, True):
                own, cells = [], {"suggested": [], "last": []}
                for seed in SEEDS:
                    loss, optimizer = train(data, make, falls, seed, 0.0)
                    own.append(loss)
                    (suggested,) = tuner(optimizer).suggest_lr()
                    for key, lr in (
                        ("suggested", suggested),
                        ("last", float(tuner(optimizer).scale)),
                    ):
                        cells[key].append((lr, train(data, make, falls, seed, lr)[0]))
                swept = {
                    lr: fmean(train(data, make, falls, seed, lr)[0] for seed in SEEDS) for lr in LRS
                }
                best = min(swept, key=swept.__getitem__)
                means = [tuple(map(fmean, zip(*pairs, strict=True))) for pairs in cells.values()]
                shown = [f"{lr:.2g}, {loss:.2g}" for lr, loss in [*means, (best, swept[best])]]
                row = f"{name}, {base}, {'cosine' if falls else 'constant'} | {fmean(own):.2g}"
                print(f"| {row} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
