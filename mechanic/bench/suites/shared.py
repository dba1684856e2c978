"""What several suites share: images, the evaluation of classifiers, the check for packages."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data

CHUNK = 2048  # examples to evaluate at once


def not_installed(package: str) -> str:
    """Why a task cannot run, if a package is not installed; empty if it is."""
    if importlib.util.find_spec(package):
        return ""
    return f"{package} is not installed: pip install {package}."


def bfloat16(device: torch.device, wanted: bool = True) -> torch.autocast:
    """Autocast to bfloat16 on a GPU, so that evaluation has the precision of training."""
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and device.type == "cuda")


def classification(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    autocast: bool = False,
) -> Callable[[], Mapping[str, float]]:
    """A function that evaluates the loss and the accuracy on train and test examples."""

    def evaluate() -> Mapping[str, float]:
        with bfloat16(train[0].device, autocast):
            logits, test_logits = predict(model, train[0]), predict(model, test[0])
        return {**measures("train", logits, train[1]), **measures("test", test_logits, test[1])}

    return evaluate


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of all examples."""
    return torch.cat([model(part).float() for part in torch.split(x, CHUNK)])


def measures(name: str, logits: Tensor, y: Tensor) -> dict[str, float]:
    """The mean loss and the accuracy, with `name` as a prefix: "train" or "test"."""
    accuracy = (logits.argmax(-1) == y).double().mean()
    return {f"{name}_loss": float(cross_entropy(logits, y)), f"{name}_accuracy": float(accuracy)}


class Pixels(NamedTuple):
    """Images as uint8 (count, channels, height, width) on the device, and their labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


@cache
def pixels(data: Data, name: str, limit: int | None, device: torch.device) -> Pixels:
    """Load images, at most `limit` of the train and of the test images each."""
    x, y, x_test, y_test = (torch.from_numpy(array)[:limit] for array in data.images(name, limit))
    x, x_test = (part.permute(0, 3, 1, 2).contiguous() for part in (x, x_test))
    return Pixels(*(part.to(device) for part in (x, y, x_test, y_test)))


def scaled(x: Tensor) -> Tensor:
    """The pixels of images from -1 to 1."""
    return x.float() / 127.5 - 1
