"""The problems by name, as a study takes them: NAME/BASE."""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial

from mechanic.bench.task import cosine, linear, step_decay

from .population import Problem, run
from .problems import Source, constant, gpt, logistic, lstm, perceptron, resnet
from .rules import Fixed

Tasks = dict[str, Callable[[Source], Problem]]

BASES = ("sgd", "adamw", "lion")
FEW = ("letter", "vehicle", "dna", "usps", "glass")
OTHERS = ("iris", "wine", "vowel", "pendigits", "sensorless_2200", "svmguide2", "coil20")
TABLES = (*FEW, *OTHERS)


def small() -> Tasks:
    """36 convex ones and a perceptron with each base."""
    tasks: Tasks = {}
    for base in BASES:
        for name in TABLES:
            tasks[f"{name}/{base}"] = partial(logistic, name=name, base=base)
        tasks[f"digits/{base}"] = partial(perceptron, base=base)
    return tasks


def few() -> Tasks:
    """18 of the small ones."""
    return {name: task for name, task in small().items() if name.split("/")[0] in (*FEW, "digits")}


def networks() -> Tasks:
    """These want a GPU."""
    return {
        "gpt/adamw": partial(gpt, base="adamw"),
        "gpt/lion": partial(gpt, base="lion"),
        "gptconst/adamw": partial(gpt, base="adamw", schedule=constant, steps=400),
        "ft/adamw": finetuned,
        "lstm/adamw": lstm,
        "resnet/sgd": partial(resnet, base="sgd", schedule=step_decay(0.2, (0.3, 0.6, 0.8))),
        "resnetcos/sgd": partial(resnet, base="sgd", schedule=cosine(0.05)),
        "resnet/adamw": partial(resnet, base="adamw", schedule=cosine(0.05)),
    }


def finetuned(source: Source) -> Problem:
    """A GPT that has learned novels is taught Shakespeare."""
    weights = run(gpt(source, "adamw"), Fixed([1e-3]), [7]).weights[0].cpu()
    return gpt(
        source,
        "adamw",
        text="tinyshakespeare",
        steps=300,
        schedule=linear(0.06),
        decay=False,
        clip=math.inf,
        first=weights,
    )


def settings() -> Tasks:
    """The perceptron with other schedules, lengths, batch sizes, dropout and bases."""
    schedules = {"cosine": cosine(), "warmcos": cosine(0.1), "const": constant, "linear": linear()}
    tasks: Tasks = {}
    for base in BASES:
        for name, schedule in schedules.items():
            for steps in (300, 2000):
                task = partial(perceptron, base=base, steps=steps, schedule=schedule)
                tasks[f"{name}{steps}/{base}"] = task
    for base in BASES[:2]:
        for batch in (8, 32, 128, 1024):
            tasks[f"batch{batch}/{base}"] = partial(perceptron, base=base, batch=batch)
        for dropout in (0.2, 0.5):
            task = partial(perceptron, base=base, steps=600, dropout=dropout)
            tasks[f"dropout{dropout}/{base}"] = task
    for base in ("rmsprop", "adagrad"):
        tasks[f"base/{base}"] = partial(perceptron, base=base)
    return tasks


GROUPS = {"small": small, "few": few, "networks": networks, "settings": settings}


def choose(wanted: Iterable[str]) -> Tasks:
    """Those of a group, or those whose names match a pattern: `few`, `letter/*`."""
    every = {name: task for group in GROUPS.values() for name, task in group().items()}
    chosen: Tasks = {}
    for name in wanted:
        named = {key: task for key, task in every.items() if fnmatch(key, name)}
        matched = GROUPS[name]() if name in GROUPS else named
        if not matched:
            groups = ", ".join(GROUPS)
            raise ValueError(f"No task is called {name!r}: give NAME/BASE, or one of {groups}.")
        chosen |= matched
    return chosen
