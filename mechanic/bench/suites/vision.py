"""Image classification: ResNet-18 and ViT on CIFAR-10, WideResNet on CIFAR-100."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from mechanic.bench.data import Data, DataKind
from mechanic.bench.suites.residual import resnet18, wide_resnet
from mechanic.bench.suites.shared import classification, not_installed
from mechanic.bench.task import (
    Budget,
    BuildSettings,
    Problem,
    Task,
    constant,
    cosine,
    half_decades,
    shuffled,
    step_decay,
)

MakeNet = Callable[[Budget, int, int], nn.Module]
"""Makes a network for a budget, a number of channels and a number of classes."""

BATCH = 128
MAX_IMAGES = {"smoke": 128, "short": 20_000, "full": None}  # images to train on
EPOCHS = {"short": 5, "full": 200}
DIGITS_EPOCHS = {"short": 20, "full": 200}  # there are fewer digits than CIFAR images
SMOKE_BATCH, SMOKE_STEPS = 16, 8
SAMPLE = 5_000  # train images to evaluate on
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 5e-4},  # the paper found it best on CIFAR
    # As in the paper's pre-training of ViT.
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.1},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.3},
}
STEPPED = step_decay(0.2, (0.3, 0.6, 0.8))  # epochs 60, 120 and 160 of 200
SGD_GRID = half_decades(-2, 1)
CONSTANT_SGD_GRID = half_decades(-3, 0)  # a learning rate that does not fall has to be lower


def tasks(data: Data) -> list[Task]:
    """Networks on CIFAR. Without CIFAR-10 there is also a ResNet-18 on scikit-learn's digits."""
    stepped = "SGD, lr x 0.2 at 30, 60 and 80 %, clip 1"
    pictures = f"{_described(data, 'cifar10')}, cropped and flipped"
    cifar_tasks = [
        Task(
            "vision",
            "resnet18-cifar10",
            {"sgd": SGD_GRID},
            partial(build, residual_net("cifar10"), "cifar10"),
            "test_accuracy",
            f"ResNet-18 on {pictures}; {stepped}",
            ("images", "cifar10"),
            data.missing("images", "cifar10"),
            extra_methods=("mechanic-paper-lambda-0.1",),
        ),
        Task(
            "vision",
            "wrn40x10-cifar100",
            {"sgd": SGD_GRID},
            partial(build, _wide_resnet, "cifar100"),
            "test_accuracy",
            f"WideResNet-40-10 on CIFAR-100, cropped and flipped; {stepped}",
            ("images", "cifar100"),
            data.missing("images", "cifar100"),
        ),
        Task(
            "vision",
            "vit-cifar10",
            {"adamw": half_decades(-4, -1), "lion": half_decades(-5, -2)},
            _build_vit,
            "test_accuracy",
            f"ViT on {pictures}; cosine with 5 % warm-up, clip 1",
            ("images", "cifar10"),
            data.missing("images", "cifar10") or not_installed("transformers"),
        ),
    ]
    has_cifar = not cifar_tasks[0].missing
    if not has_cifar:
        cifar_tasks.append(_digits("resnet18-digits8x8", build, SGD_GRID, stepped))
    return [*cifar_tasks, *_constant_tasks(data, pictures, digits=not has_cifar)]


def _constant_tasks(data: Data, pictures: str, digits: bool) -> list[Task]:
    """The same networks at a learning rate that does not fall."""
    steady = "constant lr with 5 % warm-up, clip 1"
    uses: tuple[DataKind, str] = ("images", "cifar10")
    missing = data.missing(*uses)
    resnet = Task(
        "vision",
        "resnet18-cifar10-constant",
        {"sgd": CONSTANT_SGD_GRID},
        partial(_build_constant, residual_net("cifar10"), "cifar10"),
        "test_accuracy",
        f"ResNet-18 on {pictures}; SGD, {steady}",
        uses,
        missing,
    )
    vit = Task(
        "vision",
        "vit-cifar10-constant",
        {"adamw": half_decades(-4, -1)},
        partial(_build_constant, _vit, "cifar10"),
        "test_accuracy",
        f"ViT on {pictures}; {steady}",
        uses,
        missing or not_installed("transformers"),
    )
    name = "resnet18-digits8x8-constant"
    if not digits:
        return [resnet, vit]
    return [resnet, vit, _digits(name, _build_constant, CONSTANT_SGD_GRID, f"SGD, {steady}")]


def _digits(name: str, build_net: Callable[..., Problem], grid: list[float], schedule: str) -> Task:
    return Task(
        "vision",
        name,
        {"sgd": grid},
        partial(build_net, residual_net("digits8x8"), "digits8x8"),
        "test_accuracy",
        f"ResNet-18 of width 8 on 1,442 digits of 8x8, cropped; {schedule}",
        ("images", "digits8x8"),
    )


def build(
    net: MakeNet, name: str, settings: BuildSettings, schedule: Callable[[float], float] = STEPPED
) -> Problem:
    """Build the problem of a network on a data set of images."""
    budget, device = settings.budget, settings.device
    pictures = _pictures(settings.data, name, MAX_IMAGES[budget], device)
    torch.manual_seed(settings.seed)
    model = net(budget, pictures.padded.shape[-1], pictures.classes).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = SMOKE_BATCH if budget == "smoke" else BATCH
    epochs = EPOCHS if name.startswith("cifar") else DIGITS_EPOCHS
    steps = SMOKE_STEPS if budget == "smoke" else epochs[budget] * (len(pictures.y) // batch)
    return Problem(
        model,
        batches=_augmented(pictures, batch, name.startswith("cifar"), settings.seed),
        loss=lambda pair: cross_entropy(model(pair[0]), pair[1]),
        evaluate=classification(model, pictures.sample, pictures.test, autocast=True),
        steps=steps,
        schedule=schedule,
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=True,
    )


def _build_vit(settings: BuildSettings) -> Problem:
    return build(_vit, "cifar10", settings, cosine(0.05))


def _build_constant(net: MakeNet, name: str, settings: BuildSettings) -> Problem:
    return build(net, name, settings, constant(0.05))


class Pictures(NamedTuple):
    """A data set of images on the device."""

    padded: Tensor
    """The train images with a border, to crop from: uint8 (count, height, width, channels)."""
    y: Tensor
    mean: Tensor
    scale: Tensor
    sample: tuple[Tensor, Tensor]
    """Some of the train images, normalised, and their labels."""
    test: tuple[Tensor, Tensor]
    classes: int

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise images, and put the channels before height and width."""
        return ((x.float() - self.mean) * self.scale).permute(0, 3, 1, 2)


@cache
def _pictures(data: Data, name: str, limit: int | None, device: torch.device) -> Pictures:
    x, y, x_test, y_test = (torch.from_numpy(array) for array in data.images(name, limit))
    classes = int(max(y.max(), y_test.max())) + 1  # a small sample may lack some classes
    x_test, y_test = x_test[:limit], y_test[:limit]
    mean = x.double().mean((0, 1, 2)).float().to(device)
    scale = 1 / x.double().std((0, 1, 2)).float().to(device)
    border = x.shape[1] // 8  # 4 for an image of 32, as usual
    padded = pad(x, (0, 0, border, border, border, border)).to(device)
    none = (torch.empty(0), torch.empty(0))
    without_samples = Pictures(padded, y.to(device), mean, scale, none, none, classes)
    return without_samples._replace(
        sample=(without_samples.normalised(x[:SAMPLE].to(device)), y[:SAMPLE].to(device)),
        test=(without_samples.normalised(x_test.to(device)), y_test.to(device)),
    )


def _augmented(
    pictures: Pictures, batch: int, flips: bool, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random crops, made on the device. With `flips`, half of them are mirrored."""
    padded, device = pictures.padded, pictures.padded.device
    border = padded.shape[1] // 10  # two borders of an eighth make ten eighths of the image
    size = padded.shape[1] - 2 * border
    generator = torch.Generator(device).manual_seed(seed)
    positions = torch.arange(size, device=device)
    for index in shuffled(len(padded), batch, seed, device):
        shape = (2, len(index), 1)
        top, left = torch.randint(2 * border + 1, shape, generator=generator, device=device)
        mirrored = torch.rand(len(index), 1, generator=generator, device=device) < 0.5 * flips
        columns = left + torch.where(mirrored, size - 1 - positions, positions)
        rows = top + positions
        crops = padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        yield pictures.normalised(crops), pictures.y[index]


def _described(data: Data, name: str) -> str:
    files = data.shards(name)
    return "CIFAR-10" if files in (0, 5) else f"{files} of the 5 train files of CIFAR-10"


def residual_net(name: str, dropout: float = 0.0) -> MakeNet:
    """ResNet-18, which is narrow for digits."""
    return partial(_resnet18, width=64 if name.startswith("cifar") else 8, dropout=dropout)


def _resnet18(
    budget: Budget, channels: int, classes: int, *, width: int, dropout: float
) -> nn.Module:
    return resnet18(channels, classes, 4 if budget == "smoke" else width, dropout)


def _wide_resnet(budget: Budget, channels: int, classes: int) -> nn.Module:
    if budget == "smoke":
        return wide_resnet(channels, classes, blocks=1, wider=1)
    return wide_resnet(channels, classes)


class _Vit(nn.Module):
    """The ViT of transformers, which returns only the logits."""

    def __init__(self, channels: int, classes: int, width: int, layers: int, heads: int) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        config = ViTConfig(
            image_size=32,
            patch_size=4,
            num_channels=channels,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
        )
        config.num_labels = classes
        self.model = ViTForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def _vit(budget: Budget, channels: int, classes: int) -> nn.Module:
    sizes = {"smoke": (16, 2, 2), "short": (256, 6, 4), "full": (384, 12, 6)}
    return _Vit(channels, classes, *sizes[budget])
