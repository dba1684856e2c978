"""Measure which optimizers Mechanic tunes, and write the table of docs/optimizers.md.

    python benchmarks/optimizers.py                          # all, into the page
    python benchmarks/optimizers.py torch.optim.SGD lion     # these alone, to the screen
    python benchmarks/optimizers.py --steps 480 tam adan     # in longer runs

Each optimizer of torch.optim and of the package `pytorch_optimizer` trains a small network: plain
at eight learning rates, and mechanized with three typed ones. The learning rate falls to 0 along a
line. The *excess* of a mechanized run is what it lacks of the fall of the loss that the best plain
run reaches, in percent of that fall.
"""

import argparse
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic.torch import mechanize

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
STEPS, ROWS, BATCH = 120, 256, 64
SWEEP = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
TYPED = (1e-4, 1e-2, 1.0)
GOOD = 10.0
"""A run is tuned well if its excess is at most this, in percent."""

HEAD = "| optimizer | verdict | loss of the best lr | at 1e-4 | at 1e-2 | at 1 | why |"
VERDICTS = ("tuned", "depends", "weak", "refused", "not run")


class Row(NamedTuple):
    """A row of the table."""

    name: str
    """`torch.optim.X`, or the name by which `pytorch_optimizer` knows the optimizer"""
    verdict: str
    best: float
    """The loss after a plain run at the best lr of the sweep"""
    excesses: tuple[float, ...]
    """At each lr of `TYPED`, in percent; NaN where there was no run"""
    why: str

    def __str__(self) -> str:
        best = "–" if math.isnan(self.best) else f"{self.best:.4f}"
        numbers = ("–" if math.isnan(e) else f"{min(e, 999):+.0f} %" for e in self.excesses)
        shown = (number.replace("-", "−") for number in numbers)
        return f"| {' | '.join((self.name, self.verdict, best, *shown, self.why))} |"


class Task:
    """A small network that learns which of four random directions is the largest; one label in
    five is drawn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
        self.inputs = torch.randn(ROWS, 20)
        scores = self.inputs @ torch.randn(20, 4) + 0.3 * torch.randn(ROWS, 4)
        is_drawn = torch.rand(ROWS) < 0.2
        self.targets = torch.where(is_drawn, torch.randint(4, (ROWS,)), scores.argmax(1))
        self.draw = torch.Generator().manual_seed(0)

    def loss(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The loss of some rows, by default of all."""
        return nn.functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows])

    def batch(self) -> Tensor:
        """The rows of the next batch."""
        return torch.randint(ROWS, (BATCH,), generator=self.draw)


# How those optimizers are made that do not take (params, lr) alone.

Maker = Callable[[nn.Module, float], Optimizer]


def _package(name: str, **options: Any) -> Maker:
    def make(net: nn.Module, lr: float) -> Optimizer:
        import pytorch_optimizer

        made: Optimizer = pytorch_optimizer.load_optimizer(name)(net.parameters(), lr=lr, **options)
        return made

    return make


def _without_lr(name: str) -> Maker:
    def make(net: nn.Module, lr: float) -> Optimizer:
        import pytorch_optimizer

        made: Optimizer = pytorch_optimizer.load_optimizer(name)(net.parameters())
        return made

    return make


def _created(name: str, **options: Any) -> Maker:
    """By the package's own function, which sorts the parameters into groups."""

    def make(net: nn.Module, lr: float) -> Optimizer:
        import pytorch_optimizer

        made: Optimizer = pytorch_optimizer.create_optimizer(net, name, lr=lr, **options)
        return made

    return make


def _few_iterations(net: nn.Module, lr: float) -> Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=lr, max_iter=4, history_size=10)


def _matrices(net: nn.Module, lr: float) -> Optimizer:
    return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=lr)


SPECIAL: dict[str, Maker] = {
    "torch.optim.LBFGS": _few_iterations,
    "torch.optim.Muon": _matrices,
    "lbfgs": _few_iterations,
    "alig": _without_lr("alig"),
    "sara": _package("sara", threshold=10.0),  # by default it trains the smallest weights alone
    "bsam": _package("bsam", num_data=ROWS, foreach=False),
    "ranger21": _package("ranger21", num_iterations=STEPS),
} | {
    name: _created(name)
    for name in ("adago", "adalomo", "adammini", "adamuon", "lomo", "muon", "muonclip", "normuon")
}
NOT_RUN = {"demo", "distributedmuon", "spectralsphere"}
"""They need processes that talk to each other, or a second for each step."""
WITH_CLOSURE = {"torch.optim.LBFGS", "lbfgs", "bsam"}
TWICE_DIFFERENTIATED = {"adahessian", "sophiah"}


def names() -> list[str]:
    """All optimizers, those of torch first."""
    import pytorch_optimizer

    own = (
        f"torch.optim.{name}"
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    )
    return [*sorted(own), *sorted(pytorch_optimizer.get_supported_optimizers())]


def make(name: str, net: nn.Module, lr: float) -> Optimizer:
    """An optimizer by its name in the table."""
    if name in SPECIAL:
        return SPECIAL[name](net, lr)
    if name.startswith("torch.optim."):
        cls: Any = getattr(torch.optim, name.rsplit(".", 1)[1])
        made: Optimizer = cls(net.parameters(), lr=lr)
        return made
    return _package(name)(net, lr)


def train(name: str, lr: float, *, mechanized: bool, steps: int = STEPS) -> float:
    """The loss over all rows after training; what an optimizer raises is raised."""
    task = Task()
    optimizer: Any = make(name, task.net, lr)
    if mechanized:
        mechanize(optimizer)
    typed = [group.get("lr") for group in optimizer.param_groups]
    for step in range(steps):
        for group, top in zip(optimizer.param_groups, typed, strict=True):
            if top is not None:
                group["lr"] = top * (1 - step / steps)
        _step(name, task, optimizer, lr)
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
    with torch.no_grad():
        return float(task.loss())


def _step(name: str, task: Task, optimizer: Any, lr: float) -> None:
    rows = task.batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(rows)
        loss.backward(create_graph=name in TWICE_DIFFERENTIATED)
        return loss

    if hasattr(optimizer, "fused_backward"):  # LOMO steps in the backward pass
        optimizer.fused_backward(task.loss(rows), lr)
        return
    loss = closure()
    if name in WITH_CLOSURE:
        optimizer.step(closure)
        return
    if name == "alig":  # it asks for the loss alone
        optimizer.step(lambda: float(loss.detach()))
        return
    if name == "torch.optim.SparseAdam":
        for param in task.net.parameters():
            param.grad = param.grad.to_sparse() if param.grad is not None else None
    optimizer.step()


@functools.cache
def first_loss() -> float:
    """The loss before training."""
    with torch.no_grad():
        return float(Task().loss())


def best_plain(name: str, steps: int = STEPS) -> float:
    """The lowest loss of a plain run at a lr of the sweep."""
    losses = []
    for lr in SWEEP:
        try:
            losses.append(train(name, lr, mechanized=False, steps=steps))
        except (RuntimeError, ValueError, AssertionError):  # a lr at which the base itself fails
            continue
    return min((loss for loss in losses if math.isfinite(loss)), default=math.nan)


def excess(name: str, lr: float, best: float, steps: int = STEPS) -> float:
    """What a mechanized run lacks of the best plain run's fall, in percent."""
    loss = train(name, lr, mechanized=True, steps=steps)
    return 100 * (loss - best) / (first_loss() - best) if math.isfinite(loss) else math.inf


def verdict_of(excesses: tuple[float, ...], good: float = GOOD) -> str:
    """What the excesses say."""
    if max(excesses) <= good:
        return "tuned"
    return "depends" if min(excesses) <= good else "weak"


def measure(name: str, why: str, steps: int = STEPS) -> Row:
    """A row of the table. `why` is what the table says now."""
    none = (math.nan,) * len(TYPED)
    if name in NOT_RUN:
        return Row(name, "not run", math.nan, none, why)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = best_plain(name, steps)
        try:
            excesses = tuple(excess(name, lr, best, steps) for lr in TYPED)
        except Exception as error:
            said = str(error).split(". ")[0].rstrip(".")
            return Row(name, "refused", best, none, why or f"{type(error).__name__}: {said}")
    verdict = verdict_of(excesses)
    return Row(name, verdict, best, excesses, "" if verdict == "tuned" else why)


def as_number(text: str) -> float:
    """A number of percent, as the table shows it."""
    return float(text.removesuffix("%").replace("−", "-"))


def rows_of(page: str) -> Iterator[Row]:
    """The rows of the table of a page."""
    table = page.split(HEAD)[1].split("\n\n")[0] if HEAD in page else ""
    for line in table.splitlines()[2:]:
        name, verdict, best, *numbers, why = (cell.strip() for cell in line.split("|")[1:-1])
        values = (math.nan if n == "–" else as_number(n) for n in numbers)
        yield Row(name, verdict, math.nan if best == "–" else float(best), tuple(values), why)


def table_of(rows: list[Row]) -> str:
    """The table of the page, the best first."""
    ordered = sorted(rows, key=lambda row: VERDICTS.index(row.verdict))  # names stay in order
    return "\n".join([HEAD, "|---|---|---:|---:|---:|---:|---|", *map(str, ordered)])


def write(page: str, rows: list[Row]) -> str:
    """The page with another table, and the counts above it."""
    old = page.split(HEAD)[1].split("\n\n")[0]
    counts = {v: sum(row.verdict == v for row in rows) for v in VERDICTS}
    page = page.replace(HEAD + old, table_of(rows) + ("\n" if page.endswith(old) else ""))
    for verdict, count in counts.items():
        page = re.sub(rf"(\| \*\*{verdict}\*\* \| )\d+", rf"\g<1>{count}", page)
    return page


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="optimizers; all of them, if none is named")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run, to the screen alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    reasons = {row.name: row.why for row in rows_of(page)}
    rows = []
    for name in asked.names or names():
        rows.append(measure(name, reasons.get(name, ""), asked.steps))
        print(rows[-1], flush=True)
    if not asked.names and asked.steps == STEPS:
        PAGE.write_text(write(page, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
