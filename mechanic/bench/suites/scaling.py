"""What Mechanic learns as the batch or the model grows: Figure 1 of the paper, on `mlm`."""

from functools import partial

from mechanic.bench.data import Data
from mechanic.bench.suites import mlm
from mechanic.bench.task import Task

BATCHES = (0.125, 0.5, 2, 8)  # factors of the usual batch: 16, 64, 256 and 1,024 in `short`
WIDTHS = (0.5, 1, 2)  # factors of the usual width: 128, 256 and 512 in `short`


def tasks(data: Data) -> list[Task]:
    """The BERT of `mlm` with other batches, and with other widths."""
    return [
        *(_task(data, "batch", factor) for factor in BATCHES),
        *(_task(data, "width", factor) for factor in WIDTHS),
    ]


def _task(data: Data, varied: str, factor: float) -> Task:
    name = data.corpus_name()
    return Task(
        "scaling",
        f"bert-{name}-{varied}-x{factor:g}",
        {"adamw": mlm.GRIDS["adamw"]},
        partial(mlm.build, batch=factor) if varied == "batch" else partial(mlm.build, width=factor),
        "test_accuracy",
        f"the BERT of mlm on {name}, with {factor:g} times its {varied}",
        ("text", name),
        mlm.missing(data),
        only_methods=("mechanic", "mechanic-paper"),
    )
