"""Train a small model for long, with faults at random, and look for what grows or drifts.

    make soak                                   # an hour
    python benchmarks/soak.py --minutes 5 --output FILE.md
    python benchmarks/soak.py --steps 1000000

Each base runs in a process of its own, side by side.

A fault comes in one step of fifty: a gradient with a NaN or an inf, one that is 1,000 times as
large, an exception or a Ctrl-C as the step begins, another learning rate, a checkpoint that is
loaded into a fresh optimizer, or a deep copy that goes on in place of the original. After each step
the weights have to be finite. At the end

- the memory of the process must not have grown since a tenth of the run,
- the weights must be where the displacement says, x = x_ref + S·Δ, within the bound below (x_ref is
  the point at which the displacement last began anew),
- and two runs of the same seed must give the same bits.
"""

import argparse
import contextlib
import copy
import datetime
import hashlib
import io
import platform
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import mechanize

FAULTS_IN = 1 / 50
DRIFT = 1e-3  # of the norm of the weights
GROWTH = 8 * 2**20  # bytes
DETERMINISTIC_STEPS = 2_000
BASES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=1.0),
    "SGD": lambda params: SGD(params, lr=1.0, momentum=0.9),
}


class TrippedError(Exception):
    """A fault that is injected."""


class Run:
    """A training run that can be made to fail."""

    def __init__(self, base: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.base, self.random = base, random.Random(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.first = [param.detach().clone() for param in self.net.parameters()]
        self.teacher = torch.randn(8, 2)
        self.noise = torch.Generator().manual_seed(seed)
        self.optimizer = self._make()
        self.faults: Counter[str] = Counter()
        self.steps = self.forgotten = 0

    def _make(self) -> Optimizer:
        return mechanize(BASES[self.base](self.net.parameters()))

    def step(self) -> None:
        """One step, with a fault or without one."""
        fault = self.random.choice(sorted(FAULTS)) if self.random.random() < FAULTS_IN else ""
        inputs = torch.randn(16, 8, generator=self.noise)
        self.optimizer.zero_grad()
        error = self.net(inputs) - (inputs @ self.teacher).tanh()
        error = error + 0.1 * torch.randn(16, 2, generator=self.noise)
        error.square().mean().backward()
        if fault:
            self.faults[fault] += 1
            FAULTS[fault](self)
        before, updates = [param.detach().clone() for param in self.net.parameters()], self._updates
        with contextlib.suppress(TrippedError, KeyboardInterrupt):
            self.optimizer.step()
        if self._updates > updates and self._has_forgotten:
            self.first = before
            self.forgotten += 1
        self.steps += 1
        if not all(bool(param.isfinite().all()) for param in self.net.parameters()):
            raise SystemExit(f"weights are not finite in step {self.steps}, {fault or 'no fault'}")

    @property
    def _updates(self) -> int:
        """The number of steps that the tuner has learned from."""
        return int(self.optimizer._mechanic.counts.read().updates)  # type: ignore[attr-defined]

    @property
    def _has_forgotten(self) -> bool:
        """Whether the displacement was found to be wrong, so that it began anew in this step."""
        state = self.optimizer._mechanic.scalars.read().state  # type: ignore[attr-defined]
        return bool(state.hesitation > 0) and bool(state.top == state.s.sum())

    def drift(self) -> float:
        """How far the weights are from where the displacement says, beside their norm."""
        numbers = self.optimizer._mechanic.scalars.read()  # type: ignore[attr-defined]
        moved = numbers.scale * numbers.share
        off = norm = 0.0
        for param, first in zip(self.net.parameters(), self.first, strict=True):
            state = self.optimizer.state[param]
            delta = state["mechanic_displacement"].double()
            off += float((param.detach() - first.double() - moved * delta).square().sum())
            norm += float(param.detach().double().square().sum())
        return float((off / norm) ** 0.5)

    def digest(self) -> str:
        """The weights and the tuner, as one number."""
        values: list[Tensor] = [*self.net.parameters()]
        values.append(self.optimizer._mechanic.scalars.packed)  # type: ignore[attr-defined]
        data = b"".join(value.detach().numpy().tobytes() for value in values)
        return hashlib.sha256(data).hexdigest()[:16]


def _poison(value: float) -> Any:
    def fault(run: Run) -> None:
        param = run.random.choice(list(run.net.parameters()))
        assert param.grad is not None
        param.grad.view(-1)[0] = value

    return fault


def _blow_up(run: Run) -> None:
    for param in run.net.parameters():
        assert param.grad is not None
        param.grad.mul_(1e3)


def _trip(error: type[BaseException]) -> Any:
    def fault(run: Run) -> None:
        def raise_(*_: object) -> None:
            handle.remove()
            raise error

        handle = run.optimizer.register_step_pre_hook(raise_)

    return fault


def _change_lr(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = run.random.choice([0.0, 0.1, 0.5, 1.0])


def _reload(run: Run) -> None:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    run.optimizer = run._make()
    run.optimizer.load_state_dict(torch.load(file, weights_only=True))


def _copy(run: Run) -> None:
    run.net, run.optimizer = copy.deepcopy((run.net, run.optimizer))


FAULTS: dict[str, Any] = {
    "NaN": _poison(float("nan")),
    "inf": _poison(float("inf")),
    "gradient times 1,000": _blow_up,
    "exception": _trip(TrippedError),
    "Ctrl-C": _trip(KeyboardInterrupt),
    "another lr": _change_lr,
    "checkpoint": _reload,
    "deep copy": _copy,
}


class Result(NamedTuple):
    """What a long run came to."""

    steps: int
    faults: int
    forgotten: int
    """How often the displacement began anew"""
    drift: float
    grown: int
    is_deterministic: bool


def memory() -> int:
    """Bytes of the process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def soak(base: str, seconds: float, steps: int) -> Result:
    """Run for so long, or for so many steps, whichever ends first."""
    torch.set_num_threads(1)
    run, began, before = Run(base, seed=0), time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds and run.steps < steps:
        run.step()
        if not before and (passed > seconds / 10 or run.steps > steps / 10):
            before = memory()
    faults, grown = sum(run.faults.values()), memory() - before
    return Result(run.steps, faults, run.forgotten, run.drift(), grown, is_deterministic(base))


def is_deterministic(base: str) -> bool:
    """Whether two runs of the same seed give the same bits."""
    digests = set()
    for _ in range(2):
        run = Run(base, seed=1)
        for _ in range(DETERMINISTIC_STEPS):
            run.step()
        digests.add(run.digest())
    return len(digests) == 1


def main() -> None:
    """Soak each base, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="how long to train: 60")
    length.add_argument("--steps", type=int, help="how many steps to train instead")
    parser.add_argument("--output", help="write the table there, too")
    asked = parser.parse_args()
    minutes = float("inf") if asked.steps else asked.minutes or 60.0
    lines = [
        "# Long runs with faults",
        "",
        "- command: `python benchmarks/soak.py "
        + (f"--steps {asked.steps}`" if asked.steps else f"--minutes {minutes:g}`"),
        f"- hardware: {platform.machine()}, 1 thread for each base; "
        f"Python {platform.python_version()}, torch {torch.__version__}",
        f"- date: {datetime.date.today()}; seed 0, and seed 1 for the comparison of two runs",
        f"- faults: {', '.join(FAULTS)}",
        "",
        "| base | steps | faults | begun anew | drift of the weights | memory grown | two runs |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    failed = False
    with ProcessPoolExecutor(len(BASES), get_context("spawn")) as pool:
        results = [
            pool.submit(soak, base, 60 * minutes, asked.steps or sys.maxsize) for base in BASES
        ]
    for base, result in zip(BASES, results, strict=True):
        found = result.result()
        same = found.is_deterministic
        failed = failed or found.drift > DRIFT or found.grown > GROWTH or not same
        lines.append(
            f"| {base} | {found.steps:,} | {found.faults:,} | {found.forgotten} "
            f"| {found.drift:.1e} | {found.grown / 2**20:.1f} MiB "
            f"| {'the same bits' if same else 'DIFFERENT'} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.output:
        with open(asked.output, "w", encoding="utf-8") as file:
            file.write(text)
    if failed:
        raise SystemExit(f"beyond the bounds: a drift of {DRIFT:g}, {GROWTH >> 20} MiB")


if __name__ == "__main__":
    main()
