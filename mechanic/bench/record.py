"""What a run leaves behind: the contract between the study, which writes it, and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["sweep", "mechanic", "peer"]
Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class Curve:
    """The course of a run: at most some hundred points, each the mean over the steps before it."""

    step: Sequence[int]
    loss: Sequence[float]
    """Of the batches, in train mode."""
    lr: Sequence[float]
    """In force, schedule included: as typed in a sweep, as learned otherwise; NaN if unknown."""


@dataclass(frozen=True)
class Run:
    """One trial that has ended."""

    suite: str
    task: str
    budget: str
    method: str
    """Of a sweep the base's name: "adamw". Of Mechanic "mechanic" or "mechanic-paper" and the like,
    of a peer its own name."""
    kind: Kind
    base: str
    """The base that is swept or wrapped: "sgd", "adamw", "lion". A peer's is "", it runs once for
    all bases of the task."""
    lr: float
    """Typed; of a peer what its README recommends."""
    seed: int
    status: Status
    reason: str = ""
    """Why it diverged or failed, for people to read."""
    start_loss: float = float("nan")
    """Train loss before the first step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """At the end: "train_loss", and others by task."""
    metric: str = ""
    """The one of them to show beside the train loss; better high unless it ends in "loss"."""
    curve: Curve = Curve((), (), ())
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """device, operators (on a GPU), python, torch, mechanic, packages of peers, date (ISO)."""
