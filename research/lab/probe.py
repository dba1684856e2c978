"""The probe: which number without a unit crosses one value at the best lr, on all tasks?

The members of a sweep measure candidates while they train. A number by which a rule could tell
whether its scale is too small or too large would be on one side of a value below the best learning
rate, on the other above it, and the value would be the same on every task.
"""

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .population import run
from .problems import Source
from .rules import Fixed, cosine, divide, dot
from .studies import markdown
from .tasks import Tasks

# D is the sum of the updates, G that of the gradients, u the update before, U the largest of its
# norms, h = ⟨D, g⟩, k = ⟨u, g⟩.
NAMES = (
    "‖D‖²/Σ‖u‖²",
    "cos(D, g)",
    "cos(u, g)",
    "Σ max(h, 0)/Σ abs h",
    "max −Σh/(‖G‖·U)",
    "max −Σh/(‖D‖·‖g‖)",
    "−Σh/(‖G‖·U)",
    "max −Σh/‖G‖₁",
    "cos(G, D)",
    "Σ k/Σ abs k",
    "−Σh/Σ abs h",
    "‖G‖²/Σ‖g‖²",
)
MOMENTS = (0.3, 0.58)  # of training; the numbers are means over the tenth before


class Probe(Fixed):
    """A sweep that measures."""

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        super().begin(x, seeds, steps)
        self.D, self.G, self.before = (torch.zeros_like(x) for _ in range(3))
        # Sums of h, max(h, 0), |h|, ⟨u before, g⟩ and its size, ‖u‖², ‖g‖².
        self.sums = torch.zeros(7, len(x), dtype=torch.float64, device=x.device)
        self.largest = torch.zeros(4, len(x), dtype=torch.float64, device=x.device)
        self.at = torch.zeros(1, dtype=torch.long, device=x.device)
        self.log = torch.zeros(steps, len(NAMES), len(x), device=x.device)

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        self.log.index_copy_(0, self.at, self.measure(g, u).float()[None])
        self.at.add_(1)
        self.D.add_(u)
        self.before.copy_(u)
        return super().step(x, g, u)

    def measure(self, g: Tensor, u: Tensor) -> Tensor:
        """The candidates, in the order of their names."""
        h, along = dot(self.D, g), dot(self.before, g)
        of_d, of_g, of_u = (a.norm(dim=1).double() for a in (self.D, g, u))
        parts = (h, h.clamp(min=0), h.abs(), along, along.abs(), of_u**2, of_g**2)
        self.sums.add_(torch.stack(parts))
        self.G.add_(g)
        total, positive, absolute, sum_along, size_along, squares_u, squares_g = self.sums
        of_walk = self.G.norm(dim=1).double()
        U = torch.maximum(self.largest[0], of_u)
        bounds = (
            divide(-total, of_walk * U),
            divide(-total, of_d * of_g),
            divide(-total, self.G.abs().sum(1).double()),
        )
        self.largest.copy_(torch.maximum(self.largest, torch.stack((U, *bounds))))
        return torch.stack(
            (
                divide(of_d**2, squares_u),
                divide(h, of_d * of_g),
                cosine(self.before, g),
                divide(positive, absolute),
                self.largest[1],
                self.largest[2],
                bounds[0],
                self.largest[3],
                cosine(self.G, self.D),
                divide(sum_along, size_along),
                divide(-total, absolute),
                divide(of_walk**2, squares_g),
            )
        )


def probe(tasks: Tasks, source: Source, seeds: Sequence[int]) -> str:
    """A table for each task, as Markdown."""
    tables = []
    for key, make in tasks.items():
        began, problem = time.monotonic(), make(source)
        rule = Probe(problem.lrs)
        outcome = run(problem, rule, seeds)
        losses = outcome.final.nan_to_num(1e9, 1e9, 1e9).mean(1)
        best = int(losses.argmin())
        excess = (losses - losses[best]) / (outcome.start - losses[best]) * 100
        rows = [["excess, %", *(f"{min(value, 999):.0f}" for value in excess.tolist())]]
        rows += measured(rule, problem.steps, len(seeds))
        head = [f"{name} (best)" if k == best else name for k, name in enumerate(rule.names)]
        tables.append(f"## {key}\n\n{markdown(['lr', *head], rows)}")
        print(f"{key}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return "\n\n".join(tables)


def measured(rule: Probe, steps: int, seeds: int) -> list[list[str]]:
    """Candidates against learning rates."""
    log = rule.log.cpu().view(steps, len(NAMES), -1, seeds).mean(3)
    rows = []
    for k, name in enumerate(NAMES):
        for moment in MOMENTS:
            last = int(moment * steps)
            values = log[max(0, last - steps // 10) : last, k].mean(0)
            rows.append([f"{name}, {moment:.0%}", *(f"{value:+.3f}" for value in values.tolist())])
    return rows
