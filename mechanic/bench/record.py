"""What is kept of a run: the study writes it, the report reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MethodKind = Literal["sweep", "mechanic", "peer"]
"""A base of a sweep, Mechanic over a base, or another learning-rate-free method."""
Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class Curve:
    """The course of a run, as at most 200 points."""

    step: Sequence[int]
    loss: Sequence[float]
    """The mean loss of the batches since the point before, in train mode."""
    lr: Sequence[float]
    """The lr in force, schedule included: typed in a sweep, learned otherwise; NaN if unknown."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run that did not diverge or fail."""

    start_loss: float
    metrics: Mapping[str, float]
    curve: Curve
    seconds: float


@dataclass(frozen=True)
class Run:
    """One run that has ended.

    It is a flat record, like a row of a database: its fields are the columns of `runs.csv`, except
    for the curve. The first eight identify the run.
    """

    suite: str
    task: str
    budget: str
    method: str
    """For a sweep the name of the base, for example "adamw"; for Mechanic "mechanic",
    "mechanic-paper" and the like; for a peer its own name."""
    kind: MethodKind
    base: str
    """The base that is swept or wrapped: "sgd", "adamw", "lion". Empty for a peer that runs only
    once for all bases of the task."""
    lr: float
    """The lr that is typed; for a peer, the one that its README recommends."""
    seed: int
    status: Status
    reason: str = ""
    """Why the run diverged or failed, in words."""
    start_loss: float = float("nan")
    """The train loss before the first step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics at the end: "train_loss", and others that depend on the task."""
    metric: str = ""
    """The metric to show beside the train loss. High is better unless the name ends in "loss"."""
    curve: Curve = Curve((), (), ())
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """The device, operators (on a GPU), versions of Python and of the packages, date (ISO)."""
