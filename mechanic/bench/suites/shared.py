"""What several suites need: evaluating a classifier, and naming what is not installed."""

import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CHUNK = 2048  # examples to evaluate at once


def not_installed(package: str) -> str:
    """Why a task cannot run without a package; empty if it is there."""
    if importlib.util.find_spec(package):
        return ""
    return f"{package} is not installed: pip install {package}."


def bfloat16(device: torch.device, wanted: bool = True) -> torch.autocast:
    """The precision that training has, for evaluation; a CPU keeps to its own."""
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and device.type == "cuda")


def classification(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    autocast: bool = False,
) -> Callable[[], Mapping[str, float]]:
    """Loss and accuracy on train and test examples."""

    def evaluate() -> Mapping[str, float]:
        with bfloat16(train[0].device, autocast):
            logits, test_logits = predict(model, train[0]), predict(model, test[0])
        return {**measures("train", logits, train[1]), **measures("test", test_logits, test[1])}

    return evaluate


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Logits of all examples."""
    return torch.cat([model(part).float() for part in torch.split(x, CHUNK)])


def measures(name: str, logits: Tensor, y: Tensor) -> dict[str, float]:
    """Mean loss and accuracy, named after the part of the data that they are of."""
    accuracy = (logits.argmax(-1) == y).double().mean()
    return {f"{name}_loss": float(cross_entropy(logits, y)), f"{name}_accuracy": float(accuracy)}
