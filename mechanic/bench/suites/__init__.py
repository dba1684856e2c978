"""The suites, one file each: `tasks(data)` lists what it holds."""

import importlib
from collections.abc import Callable
from functools import partial

from mechanic.bench.data import Data
from mechanic.bench.task import Task


def _tasks(module: str, data: Data) -> list[Task]:
    """Those of a suite, whose file and its libraries are imported only now."""
    found: list[Task] = importlib.import_module(f"{__name__}.{module}").tasks(data)
    return found


SUITES: dict[str, Callable[[Data], list[Task]]] = {
    name: partial(_tasks, name)
    for name in (
        "convex",
        "vision",
        "mlm",
        "lm",
        "translation",
        "finetune",
        "scaling",
        "dropout",
    )
}
