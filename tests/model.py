"""A mechanized optimizer in float64 NumPy, for whatever its user does between two steps.

`reference.run` is one trajectory: every parameter has a gradient at each step, and nothing else
happens. Here there are groups, parameters that are idle, frozen scales and weights that someone
overwrites, after the README and `docs/algorithm.md`. The rules and the bases are the reference's.
"""

import copy
import math
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import adamw, algorithm1, default, sgd

Array = NDArray[np.float64]

RULES = {"default": default, "paper": algorithm1}
BASES = {"sgd": sgd, "adamw": adamw}
FIRST, RISE = 10, 1.1  # docs/algorithm.md, "The norm of the update, known in time"


class Weights:
    """One parameter: x = x_ref + S·Δ at any time."""

    def __init__(self, x: Array, group: int) -> None:
        self.x, self.x_ref, self.delta = x, x, np.zeros_like(x)
        self.group = group
        self.memory: dict[str, Any] = {}
        """The base's state"""
        self.is_known = False
        """Whether it has had a gradient in a step"""


class Model:
    """All that an optimizer and its tuner know."""

    def __init__(
        self,
        base: str,
        hyper: dict[str, Any],
        *,
        rule: str = "default",
        decay: float | None = None,
        cap: float = math.inf,
    ) -> None:
        self.base, self.hyper = BASES[base], hyper
        self.rule, self.cap, self.decay = rule, cap, decay
        self.params: list[Weights] = []
        self.lrs: list[float] = []
        """The lr that is typed, for each group"""
        self.skipped = 0
        self.forget()

    def forget(self) -> None:
        """The tuner begins anew; the weights and the base's state stay."""
        self.tuner: dict[str, Any] = {"x1": np.zeros(0), "t": 0}
        self.measured: list[float] = []
        self.learned, self.skipped, self.frozen = 0, 0, False
        for own in self.params:
            own.x_ref, own.delta, own.is_known = own.x, np.zeros_like(own.x), False

    def copy(self) -> "Model":
        return copy.deepcopy(self)

    @property
    def scale(self) -> float:
        return float(np.sum(self.tuner.get("s", 0.0)))

    def add_group(self, xs: list[Array], lr: float) -> None:
        self.params += [Weights(x, len(self.lrs)) for x in xs]
        self.lrs.append(lr)

    def overwrite(self, index: int, x: Array) -> None:
        """The weights are moved by someone else, and x_ref with them."""
        own = self.params[index]
        own.x, own.x_ref = x, x - self.scale * own.delta

    def skip(self) -> None:
        self.skipped += 1

    def run_base(self, grads: list[Array | None]) -> list[Array]:
        """The updates u; 0 for parameters without a gradient, whose state stays."""
        return [
            np.zeros_like(own.x)
            if g is None
            else self.base(g, own.x, own.memory, self.lrs[own.group], **self.hyper)
            for own, g in zip(self.params, grads, strict=True)
        ]

    def step(self, grads: list[Array | None]) -> None:
        if all(g is None for g in grads):
            return
        us = self.run_base(grads)
        rows = list(zip(self.params, grads, us, strict=True))
        new = [own for own, g, _ in rows if g is not None and not own.is_known]
        if new:
            # Elements 1,000 times above the typical one have no part in ‖x_1‖.
            most = 1e3 * max(0.1, median_low([median_low(abs(np.ravel(own.x))) for own in new]))
        for own in new:
            own.is_known = True
            self.tuner["x1"] = np.append(self.tuner["x1"], np.where(abs(own.x) <= most, own.x, 0))
        # Groups at lr 0 have no part in the sums, and neither have parameters without a gradient.
        moves = [g is not None and self.lrs[own.group] > 0 for own, g, _ in rows]
        if any(moves):
            q = self._tune(rows, moves)
            self.learned += 1
            for own, is_moved in zip(self.params, moves, strict=True):
                if q > 0:
                    own.delta = q * own.delta
                elif is_moved:  # Δ is forgotten, and x stays; parameters that rest keep theirs
                    own.x_ref, own.delta = own.x, 0 * own.delta
        for (own, _, u), is_moved in zip(rows, moves, strict=True):
            if is_moved:
                own.delta = own.delta + u
                own.x = own.x_ref + self.scale * own.delta
            else:
                own.x_ref = own.x - self.scale * own.delta

    def _tune(self, rows: list[Any], moves: list[bool]) -> float:
        """Set the next scales; returns the share of Δ that stays."""
        known = [(*row, is_moved) for row, is_moved in zip(rows, moves, strict=True)]
        known = [row for row in known if row[0].is_known]

        def flat(part: Any) -> Array:
            return np.concatenate([np.ravel(part(*row)) for row in known])

        delta = flat(lambda own, g, u, _: own.delta)
        gradient = flat(lambda own, g, u, is_moved: g if is_moved else 0 * u)
        update = flat(lambda own, g, u, is_moved: u if is_moved else 0 * u)
        # The decay (line 10) is along all weights with a gradient, those at lr 0 among them.
        x = flat(lambda own, g, u, _: 0 * u if g is None else own.x)
        takes_part = {own.group for (own, g, _) in rows if g is not None}
        has_risen = self._look_at_rates(takes_part)
        if self.frozen:
            self.tuner["D"] = np.linalg.norm(delta)
            return 1.0
        self.tuner.update(t=self.learned + 1, rise=math.inf if has_risen else 1.0, rate=None)
        options = {} if self.decay is None else {"decay": self.decay}
        if self.rule == "default":
            options["cap"] = self.cap
        s, q = RULES[self.rule](self.tuner, delta, gradient, x, update, **options)
        self.tuner["s"] = s * min(1.0, self.cap / s.sum()) if s.sum() > 0 else s
        return float(q)

    def _look_at_rates(self, takes_part: set[int]) -> bool:
        """Whether an lr has risen since the update was last measured, or a group is new. Of a group
        that is idle or at lr 0 there is nothing to measure."""
        last = [*self.measured, *[0.0] * (len(self.lrs) - len(self.measured))]
        rates = enumerate(zip(self.lrs, last, strict=True))
        typed = [lr if lr and i in takes_part else had for i, (lr, had) in rates]
        pairs = zip(typed, last, strict=True)
        has_risen = len(self.lrs) > len(self.measured) or any(lr > RISE * had for lr, had in pairs)
        if has_risen or self.learned < FIRST:
            self.measured = typed
        return has_risen
