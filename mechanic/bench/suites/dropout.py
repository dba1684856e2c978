"""A limitation that the paper names: Mechanic beside a tuned learning rate as dropout grows."""

from functools import partial

from mechanic.bench.data import Data
from mechanic.bench.suites import mlm, vision
from mechanic.bench.task import Task

RATES = (0.0, 0.1, 0.2, 0.3)


def tasks(data: Data) -> list[Task]:
    """A BERT and a ResNet, each with dropout in all its layers."""
    return [_bert(data, rate) for rate in RATES] + [_resnet(data, rate) for rate in RATES]


def _bert(data: Data, rate: float) -> Task:
    name = data.corpus_name()
    return Task(
        "dropout",
        f"bert-{name}-dropout-{rate}",
        {"adamw": mlm.GRIDS["adamw"]},
        partial(mlm.build, dropout=rate),
        "test_accuracy",
        f"the BERT of mlm on {name}, with dropout {rate} of activations and attention",
        ("text", name),
        mlm.missing(data),
        only_methods=("adamw", "mechanic", "mechanic-paper"),
    )


def _resnet(data: Data, rate: float) -> Task:
    images = "digits8x8" if data.missing("images", "cifar10") else "cifar10"
    return Task(
        "dropout",
        f"resnet18-{images}-dropout-{rate}",
        {"sgd": vision.SGD_GRID},
        partial(vision.build, vision.residual_net(images, rate), images),
        "test_accuracy",
        f"ResNet-18 on {images}, with dropout {rate} between convolutions and before the head",
        ("images", images),
        only_methods=("sgd", "mechanic", "mechanic-paper"),
    )
