"""Twelve logistic regressions, after the convex experiments of the D-Adaptation paper."""

from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data
from mechanic.bench.suites.shared import classification
from mechanic.bench.task import BuildSettings, Problem, Task, half_decades, shuffled, step_decay

# The last two replace Aloi and smallNORB of that paper, which are hard to obtain.
PROBLEMS = (
    *("iris", "wine", "glass", "vehicle", "vowel", "dna", "letter", "pendigits", "usps"),
    *("sensorless_2200", "svmguide2", "coil20"),
)
EMBEDDED = ("iris", "wine", "breast_cancer", "digits8x8")
BATCH = {"smoke": 64, "short": 64, "full": 16}
STEPS = {"smoke": 20, "short": 300}
EPOCHS = 100
# The best lr lies inside the grid for each problem except wine and coil20. Their classes can be
# separated without error, so that a larger learning rate only brings the loss to 0 sooner.
GRIDS = {
    "sgd": half_decades(-2, 2),
    "adamw": half_decades(-3, 1),
    "lion": half_decades(-4, 0),
}


def tasks(data: Data) -> list[Task]:
    """The problems of the paper if the folder adds to the embedded ones; else the embedded ones."""
    has_more = any(not data.missing("tabular", name) for name in set(PROBLEMS) - set(EMBEDDED))
    return [
        Task(
            "convex",
            f"logistic-{name}",
            GRIDS,
            partial(_build, name),
            "test_accuracy",
            f"multinomial logistic regression on {name}; lr x 0.1 at 60, 80 and 95 %",
            ("tabular", name),
            data.missing("tabular", name),
        )
        for name in (PROBLEMS if has_more else EMBEDDED)
    ]


def _build(name: str, settings: BuildSettings) -> Problem:
    x, y, x_test, y_test = _tensors(settings.data, name, settings.device)
    # A convex problem starts from 0, so that the weights do not depend on the seed.
    model = nn.Linear(x.shape[1], int(y.max()) + 1, device=settings.device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    batch = BATCH[settings.budget]
    indices = shuffled(len(x), batch, settings.seed, settings.device)
    return Problem(
        model,
        batches=((x[index], y[index]) for index in indices),
        loss=lambda pair: cross_entropy(model(pair[0]), pair[1]),
        evaluate=classification(model, (x, y), (x_test, y_test)),
        steps=STEPS.get(settings.budget, EPOCHS * (len(x) // min(batch, len(x)))),
        schedule=step_decay(0.1, (0.6, 0.8, 0.95)),
    )


@cache
def _tensors(data: Data, name: str, device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in data.tabular(name)]
