"""The suites. Each is one file, whose function `tasks(data)` lists its tasks."""

import importlib
from collections.abc import Callable
from functools import partial

from mechanic.bench.data import Data
from mechanic.bench.task import Task


def _tasks(module: str, data: Data) -> list[Task]:
    """The tasks of a suite. Its file, and the libraries that it needs, are imported only now."""
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
        "diffusion",
        "rl",
        "gan",
        "jax",
        "scaling",
        "dropout",
    )
}
