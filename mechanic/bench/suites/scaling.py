"""What Mechanic learns as the batch or the model grows: the paper's first figure, on `mlm`."""

from functools import partial

from mechanic.bench.data import Data
from mechanic.bench.suites import mlm
from mechanic.bench.task import Task

BATCHES = (0.125, 0.5, 2, 8)  # of the usual one: 16, 64, 256 and 1,024 in `short`
WIDTHS = (0.5, 1, 2)  # likewise: 128, 256 and 512


def tasks(data: Data) -> list[Task]:
    """Each differs from `mlm` in one number."""
    return [
        *(_task(data, "batch", part) for part in BATCHES),
        *(_task(data, "width", part) for part in WIDTHS),
    ]


def _task(data: Data, what: str, part: float) -> Task:
    name = data.corpus_name()
    return Task(
        "scaling",
        f"bert-{name}-{what}-x{part:g}",
        {"adamw": mlm.GRIDS["adamw"]},
        partial(mlm.build, batch=part) if what == "batch" else partial(mlm.build, width=part),
        "test_accuracy",
        f"the BERT of mlm on {name}, with {part:g} times its {what}",
        ("text", name),
        mlm.missing(data),
        only_methods=("mechanic", "mechanic-paper"),
    )
