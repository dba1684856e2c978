"""Denoising diffusion on CIFAR-10: a U-Net, a DiT, and LoRA fine-tuning of the DiT.

The recipe is the usual one of the field: Adam at a constant learning rate after a short warm-up,
gradients clipped to norm 1, and an average of the weights for evaluation. The fine-tuning has no
average, as usual there.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from mechanic.bench.data import Data, DataKind
from mechanic.bench.suites.denoisers import DiT, UNet, adapt
from mechanic.bench.suites.shared import Pixels, bfloat16, pixels, scaled
from mechanic.bench.task import (
    Budget,
    BuildSettings,
    Problem,
    Task,
    constant,
    cosine,
    half_decades,
    shuffled,
)


@dataclass(frozen=True)
class DenoiserSize:
    """The size of the models and of the runs."""

    unet: int
    """The width of the U-Net."""
    dit: tuple[int, int]
    """The width of the DiT, and the number of its layers."""
    images: int | None
    """The number of images to train on; None for all."""
    batch: int
    steps: int
    evaluated: int
    """The number of images to evaluate, of the train and of the test images each."""
    ema: float


SIZES: dict[Budget, DenoiserSize] = {
    "smoke": DenoiserSize(8, (16, 1), 128, batch=4, steps=8, evaluated=16, ema=0.9),
    "short": DenoiserSize(64, (256, 6), 20_000, batch=128, steps=1000, evaluated=1024, ema=0.99),
    "full": DenoiserSize(128, (384, 12), None, batch=128, steps=50_000, evaluated=5000, ema=0.9995),
}
WARMUP = 0.05
RANK = 8
CHUNK = 512  # images to evaluate at once
PRETRAINING_RATE = 1e-3  # of the DiT that is fine-tuned
CLASS = 1  # whose images it is fine-tuned on, in inverted colours, which it has not seen
MakeDenoiser = Callable[[DenoiserSize], nn.Module]


def tasks(data: Data) -> list[Task]:
    """Two denoisers, and the fine-tuning of one of them."""
    recipe = "constant lr with 5 % warm-up, clip 1"
    return [
        _task(data, "unet-cifar10", partial(_build, _unet), f"U-Net that denoises; {recipe}, EMA"),
        _task(data, "dit-cifar10", partial(_build, _dit), f"DiT that denoises; {recipe}, EMA"),
        _task(
            data,
            "dit-lora-cifar10",
            _build_lora,
            f"LoRA of rank {RANK} on a trained DiT, for one class in inverted colours; {recipe}",
        ),
    ]


def _task(data: Data, name: str, build: Callable[[BuildSettings], Problem], about: str) -> Task:
    grids = {"adamw": half_decades(-5, -1)}
    uses: tuple[DataKind, str] = ("images", "cifar10")
    return Task("diffusion", name, grids, build, "test_loss", about, uses, data.missing(*uses))


def _unet(size: DenoiserSize) -> nn.Module:
    return UNet(size.unet)


def _dit(size: DenoiserSize) -> nn.Module:
    return DiT(*size.dit)


def _build(net: MakeDenoiser, settings: BuildSettings) -> Problem:
    size = SIZES[settings.budget]
    images = pixels(settings.data, "cifar10", size.images, settings.device)
    torch.manual_seed(settings.seed)
    model = net(size).to(settings.device)
    return _problem(model, size, images, settings.seed, size.ema)


def _build_lora(settings: BuildSettings) -> Problem:
    size = SIZES[settings.budget]
    images = pixels(settings.data, "cifar10", size.images, settings.device)
    trained = _pretrained(settings.data, settings.budget, settings.device)
    torch.manual_seed(settings.seed)
    model = adapt(copy.deepcopy(trained), RANK).to(settings.device)
    chosen, tested = images.y == CLASS, images.y_test == CLASS
    inverted = Pixels(
        255 - images.x[chosen], images.y[chosen], 255 - images.x_test[tested], images.y_test[tested]
    )
    return _problem(model, size, inverted, settings.seed, None)


@cache
def _pretrained(data: Data, budget: Budget, device: torch.device) -> nn.Module:
    """A DiT after a run of the usual length, the same in every process."""
    problem = _build(_dit, BuildSettings(budget, 0, device, data))
    steps, factor = problem.steps, cosine(WARMUP)
    optimizer = torch.optim.AdamW(problem.parameters(), lr=PRETRAINING_RATE, weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda k: factor(min((k + 0.5) / steps, 1.0)))
    for batch in islice(problem.batches, steps):
        with bfloat16(device):
            loss = problem.loss(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    return problem.model


def _problem(
    model: nn.Module, size: DenoiserSize, images: Pixels, seed: int, ema: float | None
) -> Problem:
    samples = {
        "train_loss": _sample(images.x, size.evaluated),
        "test_loss": _sample(images.x_test, size.evaluated),
    }
    return Problem(
        model,
        batches=_batches(images.x, size.batch, seed),
        loss=partial(_loss, model),
        evaluate=partial(_evaluate, model, samples),
        steps=size.steps,
        schedule=constant(WARMUP),
        clip=1.0,
        autocast=True,
        ema=ema,
    )


class NoisyBatch(NamedTuple):
    """Images from -1 to 1, their noise, and its share from 0 for none to 1 for nothing else."""

    clean: Tensor
    time: Tensor
    noise: Tensor


def _batches(x: Tensor, batch: int, seed: int) -> Iterator[NoisyBatch]:
    generator = torch.Generator(x.device).manual_seed(seed)
    for index in shuffled(len(x), batch, seed, x.device):
        time = torch.rand(len(index), generator=generator, device=x.device)
        yield _with_noise(x[index], time, generator)


def _sample(x: Tensor, count: int) -> NoisyBatch:
    """Images to evaluate with noise that is always the same, at times that are spread evenly."""
    generator = torch.Generator(x.device).manual_seed(0)
    x = x[:count]
    time = (torch.arange(len(x), device=x.device) + 0.5) / len(x)
    return _with_noise(x, time, generator)


def _with_noise(x: Tensor, time: Tensor, generator: torch.Generator) -> NoisyBatch:
    clean = scaled(x)
    noise = torch.randn(clean.shape, generator=generator, device=x.device)
    return NoisyBatch(clean, time, noise)


def _loss(model: nn.Module, batch: NoisyBatch) -> Tensor:
    """The squared error of the noise that the model sees (Nichol and Dhariwal's cosine)."""
    angle = (batch.time * math.pi / 2)[:, None, None, None]
    noisy = angle.cos() * batch.clean + angle.sin() * batch.noise
    return mse_loss(model(noisy, batch.time).float(), batch.noise)


def _evaluate(model: nn.Module, samples: Mapping[str, NoisyBatch]) -> dict[str, float]:
    def mean(sample: NoisyBatch) -> float:
        parts = zip(*(torch.split(part, CHUNK) for part in sample), strict=True)
        with bfloat16(sample.clean.device):
            losses = [len(part[0]) * _loss(model, NoisyBatch(*part)) for part in parts]
        return float(torch.stack(losses).sum()) / len(sample.time)

    return {name: mean(sample) for name, sample in samples.items()}
