"""Generative adversarial networks: two networks, each with an optimizer of its own.

The losses of the two say little about the pictures. What is scored is the Fréchet distance between
pictures of the generator and of the data, in the features of a fixed random network. As usual, the
generator is evaluated with an average of its weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, leaky_relu, softplus

from mechanic.bench.data import Data
from mechanic.bench.suites.denoisers import doubled
from mechanic.bench.suites.shared import pixels, scaled
from mechanic.bench.task import (
    Budget,
    BuildSettings,
    Opponent,
    Problem,
    Task,
    constant,
    half_decades,
    shuffled,
)


@dataclass(frozen=True)
class GanSize:
    """The size of the networks and of the run."""

    width: int
    images: int | None
    """The number of images to train on; None for all."""
    batch: int
    steps: int
    evaluated: int
    """The number of pictures to evaluate, of each kind."""
    ema: float


SIZES: dict[Budget, GanSize] = {
    "smoke": GanSize(8, 128, batch=16, steps=8, evaluated=64, ema=0.9),
    "short": GanSize(64, 20_000, batch=128, steps=1500, evaluated=4096, ema=0.99),
    "full": GanSize(128, None, batch=128, steps=50_000, evaluated=10_000, ema=0.999),
}
NARROWER = 2  # the networks for digits, which have a sixteenth of the pixels
CODE = 64  # numbers that a picture is made from
SLOPE = 0.2
FEATURES = 32  # for each quarter of a picture
CHUNK = 1024  # pictures to evaluate at once
HYPERPARAMETERS = {"adamw": {"betas": (0.5, 0.999)}}  # as in DCGAN


def tasks(data: Data) -> list[Task]:
    """Small DCGANs on CIFAR-10 and on scikit-learn's digits."""
    return [_task(data, "cifar10", "CIFAR-10"), _task(data, "digits8x8", "1,442 digits of 8x8")]


def _task(data: Data, name: str, images: str) -> Task:
    return Task(
        "gan",
        f"dcgan-{name}",
        {"adamw": half_decades(-5, -1)},
        partial(_build, name),
        "test_loss",
        f"DCGAN on {images}, two optimizers; Fréchet distance is scored; constant lr, EMA",
        ("images", name),
        data.missing("images", name),
    )


def _build(name: str, settings: BuildSettings) -> Problem:
    size, device = SIZES[settings.budget], settings.device
    images = pixels(settings.data, name, size.images, device)
    width = size.width if name.startswith("cifar") else size.width // NARROWER
    channels, side = images.x.shape[1], images.x.shape[2]
    real = {
        "train_loss": features([scaled(images.x[: size.evaluated])]),
        "test_loss": features([scaled(images.x_test[: size.evaluated])]),
    }
    torch.manual_seed(settings.seed)
    generator = Generator(width, channels, side).to(device)
    critic = Critic(width, channels, side).to(device)
    return Problem(
        generator,
        batches=_batches(images.x, size.batch, settings.seed),
        loss=lambda batch: softplus(-critic(generator(batch.codes))).mean(),
        evaluate=partial(_evaluate, generator, size.evaluated, real, device),
        steps=size.steps,
        schedule=constant(),
        hyperparameters=HYPERPARAMETERS,
        ema=size.ema,
        opponent=Opponent(critic, partial(_critics_loss, critic, generator)),
    )


def _critics_loss(critic: nn.Module, generator: nn.Module, batch: "GanBatch") -> Tensor:
    with torch.no_grad():
        made = generator(batch.codes)
    return softplus(-critic(batch.real)).mean() + softplus(critic(made)).mean()


class Generator(nn.Module):
    """Makes pictures from codes: each layer doubles height and width."""

    def __init__(self, width: int, channels: int, side: int) -> None:
        super().__init__()
        self.first_side, layers = _smallest(side), _layers(side)
        widths = [width * 2**k for k in reversed(range(layers + 1))]
        self.entry = nn.Linear(CODE, widths[0] * self.first_side**2)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for channels in widths[:-1])
        self.exit = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, codes: Tensor) -> Tensor:
        """Pictures with pixels from -1 to 1."""
        x = self.entry(codes).unflatten(1, (-1, self.first_side, self.first_side))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(doubled(norm(x).relu()))
        pictures: Tensor = self.exit(x.relu()).tanh()
        return pictures


class Critic(nn.Module):
    """Tells pictures of the data from those of the generator: positive for the data."""

    def __init__(self, width: int, channels: int, side: int) -> None:
        super().__init__()
        widths = [channels, *(width * 2**k for k in range(_layers(side)))]
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.exit = nn.Linear(widths[-1] * _smallest(side) ** 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each picture."""
        for layer in self.layers:
            x = leaky_relu(layer(x), SLOPE)
        verdict: Tensor = self.exit(x.flatten(1))
        return verdict


def _layers(side: int) -> int:
    """How often a picture is halved: three times one of 32, twice one of 8."""
    return 3 if side >= 32 else 2


def _smallest(side: int) -> int:
    return int(side // 2 ** _layers(side))


class GanBatch(NamedTuple):
    """Pictures of the data, and codes for as many others."""

    real: Tensor
    codes: Tensor


def _batches(x: Tensor, batch: int, seed: int) -> Iterator[GanBatch]:
    generator = torch.Generator(x.device).manual_seed(seed)
    for index in shuffled(len(x), batch, seed, x.device):
        yield GanBatch(scaled(x[index]), _codes(len(index), generator))


def _codes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, CODE, generator=generator, device=generator.device)


def _evaluate(
    generator: nn.Module, count: int, real: Mapping[str, Tensor], device: torch.device
) -> Mapping[str, float]:
    codes = _codes(count, torch.Generator(device).manual_seed(0))
    made = features([generator(part) for part in torch.split(codes, CHUNK)])
    return {name: frechet(made, known) for name, known in real.items()}


def features(pictures: Sequence[Tensor]) -> Tensor:
    """The features of pictures in a random network: for each quarter of the picture, the means of
    what the last layer finds there."""
    layers = _random_layers(pictures[0].shape[1], pictures[0].device)
    found = []
    for x in pictures:
        for weights, stride in layers:
            x = leaky_relu(conv2d(x, weights, stride=stride, padding=1), SLOPE)
        half = x.shape[-1] // 2
        quarters = x.reshape(len(x), FEATURES, 2, half, 2, half)
        found.append(quarters.mean((3, 5)).flatten(1))
    return torch.cat(found)


@cache
def _random_layers(channels: int, device: torch.device) -> list[tuple[Tensor, int]]:
    """Weights that keep the scale, the same in every process, and the stride of each layer."""
    generator, layers = torch.Generator().manual_seed(0), []
    for inputs, stride in ((channels, 1), (FEATURES, 2), (FEATURES, 1)):
        weights = torch.randn(FEATURES, inputs, 3, 3, generator=generator)
        layers.append((weights.to(device) / math.sqrt(4.5 * inputs), stride))
    return layers


def frechet(a: Tensor, b: Tensor) -> float:
    """The squared Fréchet distance of two normal distributions that have the means and covariances
    of these samples; NaN if they are not finite."""
    a, b = a.double().cpu(), b.double().cpu()
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.nan
    first, second = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    overlap = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0).sqrt().sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return float(apart + first.trace() + second.trace() - 2 * overlap)
