"""When several scales pay: one for all parameters beside one for each part and each tensor.

    python research/scopes.py --seeds 5 --output research/results/scopes_cpu.csv

Four small tasks on scikit-learn's digits, AdamW, a cosine after a warm-up of 5 %: a network from
its start; a trained trunk with a new head, both trained; LoRA on a trained network; and a network
one of whose layers is multiplied by 100, so that its parts want learning rates far apart. Beside
the tuned runs, a sweep of plain AdamW with one learning rate for all parameters.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from mechanic.torch import mechanize

STEPS, BATCH = 600, 64
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]


class Lora(nn.Module):
    """A linear layer that stays, and a correction of low rank that is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(rank))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, with the correction."""
        return self.layer(x) + x @ self.lora_a.T @ self.lora_b.T  # type: ignore[no-any-return]


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return x * self.factor


class Task(NamedTuple):
    """A model to train, and the scopes that suit it."""

    make: Callable[[], nn.Module]
    scope: dict[str, str]
    is_upright: bool = True
    """Whether the digits are as they are, and not turned by 90 degrees"""


def digits(*, is_upright: bool) -> tuple[Tensor, Tensor]:
    """All digits, as they are or turned."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    images = images if is_upright else images.rot90(1, (1, 2))
    return images.flatten(1), torch.tensor(found.target)


def network(factor: float = 1.0) -> nn.Sequential:
    """Three layers, the first one's output multiplied by a factor."""
    return nn.Sequential(
        nn.Linear(64, 64), Times(factor), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def trained() -> nn.Sequential:
    """A network that knows upright digits."""
    model = network()
    train(model, AdamW(model.parameters(), lr=3e-3), digits(is_upright=True))
    return model


def with_new_head() -> nn.Sequential:
    """A trained trunk, and a head that knows nothing."""
    model = trained()
    model[5] = nn.Linear(64, 10)
    return model


def with_lora() -> nn.Sequential:
    """A trained network with a correction of each layer."""
    model = trained()
    for place in (0, 3, 5):
        model[place] = Lora(model[place])  # type: ignore[arg-type]
    return model


TASKS = {
    "from its start": Task(network, {"first": "0.*", "head": "5.*"}),
    "trained trunk, new head": Task(with_new_head, {"head": "5.*"}, is_upright=False),
    "LoRA": Task(with_lora, {"A": "*lora_a", "B": "*lora_b"}, is_upright=False),
    "a layer times 100": Task(lambda: network(100.0), {"first": "0.*"}),
}


def train(model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor]) -> float:
    """The loss over all digits at the end."""
    images, labels = data
    warm_up = STEPS // 20

    def shape(step: int) -> float:
        rest = max(step - warm_up, 0) / (STEPS - warm_up)
        return min((step + 1) / warm_up, 1.0) * (1 + math.cos(math.pi * rest)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(cross_entropy(model(images), labels))


def run(task: Task, method: str, seed: int) -> float:
    """One run: a fixed learning rate, or a scope by its name."""
    torch.manual_seed(seed)
    model = task.make()
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if method.startswith("lr "):
        optimizer: Any = AdamW(params, lr=float(method.removeprefix("lr ")))
    else:
        scope: Any = task.scope if method == "parts" else method
        optimizer = mechanize(AdamW(params, lr=1.0), scope=scope)
    return train(model, optimizer, digits(is_upright=task.is_upright))


def rows(seeds: int) -> Iterator[dict[str, Any]]:
    """All runs, one after the other."""
    methods = ["all", "parts", "tensor", *(f"lr {rate:g}" for rate in RATES)]
    for name, task in TASKS.items():
        for seed in range(seeds):
            for method in methods:
                loss = run(task, method, seed)
                print(f"{name:24} {seed} {method:10} {loss:.5f}", flush=True)
                yield {"task": name, "seed": seed, "method": method, "loss": f"{loss:.6g}"}


def main() -> None:
    """Run everything, and write a row for each run as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("task", "seed", "method", "loss"))
        writer.writeheader()
        for row in rows(options.seeds):
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
