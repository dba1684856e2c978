"""The rules, over a population: what each makes of the base's updates.

x is the parameters, g the gradient, u the base's update, D the walk from the first parameters, S
the scale, U the largest ‖u‖. An option is a number for each variant. What is kept between steps is
changed in place, for CUDA graphs.
"""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

Options = Mapping[str, Any]

BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)  # Algorithm 1's


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1).double()


def divide(a: Tensor, b: Tensor) -> Tensor:
    """0 where b is not above 0."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return divide(dot(a, b), (a.norm(dim=1) * b.norm(dim=1)).double())


def add(x: Tensor, factor: Tensor, direction: Tensor) -> None:
    x.add_(factor.float()[:, None] * direction)


class Fixed:
    """The base at learning rates that are typed: a sweep."""

    def __init__(self, lrs: Sequence[float]) -> None:
        self.lrs = lrs
        self.names = [f"{lr:.3g}" for lr in lrs]

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        self.lr = torch.tensor(self.lrs, device=x.device).repeat_interleave(seeds)

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        add(x, self.lr, u)
        return self.lr


class Tuned:
    """What the tuners share: their options, and the start relative to the problem."""

    defaults: ClassVar[dict[str, Any]]

    def __init__(self, variants: Mapping[str, Options]) -> None:
        self.names = list(variants)
        self.variants = [{**self.defaults, **options} for options in variants.values()]
        unknown = {key for options in self.variants for key in options} - set(self.defaults)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no options {sorted(unknown)}.")

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        def column(key: str) -> Tensor:
            values = [float(options[key]) for options in self.variants]
            wide = torch.tensor(values, dtype=torch.float64, device=x.device)
            return wide.repeat_interleave(seeds)

        numbers = (key for key, value in self.defaults.items() if not isinstance(value, tuple))
        self.c = SimpleNamespace(**{key: column(key) for key in numbers})
        self.size = torch.maximum(x.double().norm(dim=1), self.c.floor * math.sqrt(x.shape[1]))
        self.S, self.U = torch.zeros_like(self.size), torch.zeros_like(self.size)
        self.D = torch.zeros_like(x)

    def grow(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """U with this update, and the scale to start from."""
        U = torch.maximum(self.U, u.norm(dim=1).double())
        return U, divide(self.c.start * self.size, U)

    def move(self, x: Tensor, u: Tensor, S: Tensor, U: Tensor, past: Tensor) -> Tensor:
        """The walk so far is multiplied by `past`, and goes on by S·u."""
        add(x, past - 1, self.D)
        add(x, S, u)
        self.D.mul_(past.float()[:, None])
        add(self.D, S, u)
        self.S.copy_(S)
        self.U.copy_(U)
        return self.S


class Before(Tuned):
    """The default before: Algorithm 1 with a relative start, clipped, halving, forgetting.

    Here D is the sum of the updates, so that x is the first parameters + S·D."""

    defaults: ClassVar[dict[str, Any]] = {
        "start": 1e-4,  # the first step, relative to the parameters
        "floor": 0.01,  # the least that a parameter is taken to be, for that
        "betas": BETAS,  # a tuner for each
        "clip": 3.0,  # h counts at most so many times the largest before
        "optimism": 1.0,  # times h where it lowers the scale
        "shrink": 0.5,  # the most by which the scale falls in a step
        "grow": math.inf,  # the most by which it rises
        "forget": 0.05,  # the most by which the past is amplified as the scale grows
        "rescale": 1.0,  # 0: the past is left where it is when the scale changes
        "smooth": 0.0,  # of the scale, over steps
        "factor": 1.0,  # times the scale of new updates
        "recent": 1.0,  # the weight in h of the updates of late
        "window": 0.9,  # how late
    }

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        super().begin(x, seeds, steps)
        most = max(len(options["betas"]) for options in self.variants)
        rows = [[*v["betas"], *[math.nan] * (most - len(v["betas"]))] for v in self.variants]
        beta = torch.tensor(rows, dtype=torch.float64, device=x.device).repeat_interleave(seeds, 0)
        self.on = beta.isnan().logical_not().double()
        self.beta = beta.nan_to_num()
        self.m, self.v, self.r, self.s = (torch.zeros_like(beta) for _ in range(4))
        self.M = torch.zeros_like(self.S)
        self.R = torch.zeros_like(x)  # the updates of late

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        c = self.c
        S, keep = self.tune(dot(self.D, g) - (1 - c.recent) * dot(self.R, g), u)
        S = (1 - c.smooth) * S + c.smooth * torch.where(self.S > 0, self.S, S)
        add(x, c.rescale * (S * keep - self.S), self.D)
        add(x, c.factor * S, u)
        self.D.mul_(keep.float()[:, None]).add_(u)
        self.R.mul_((keep * c.window).float()[:, None]).add_(u)
        self.S.copy_(S)
        return self.S

    def tune(self, signal: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The next scale, and what is kept of the past."""
        c, before = self.c, self.s.sum(1)
        U, sigma = self.grow(u)
        rebase = 1 / divide(U, c.clip * self.U).clamp(min=1.0)
        h = torch.where(signal > 0, c.optimism * signal, signal)[:, None]
        limit = c.clip[:, None] * self.m
        h = torch.where(self.m > 0, torch.minimum(torch.maximum(h, -limit), limit), h)
        m = torch.maximum(self.beta * self.m, h.abs())
        v = self.beta**2 * self.v + h**2
        r = rebase[:, None] * (self.beta * self.r - self.s * h).clamp(min=0)
        share = sigma[:, None] / self.on.sum(1, keepdim=True)
        s = torch.where(v > 0, divide(share * m + r, v.sqrt()), share) * self.on
        s = s * divide(c.shrink * rebase * before, s.sum(1)).clamp(min=1.0)[:, None]
        most = torch.where(before > 0, c.grow * before, math.inf)
        s = s * (most / s.sum(1).clamp(min=1e-300)).clamp(max=1.0)[:, None]
        M = torch.maximum(s.sum(1), rebase * self.M)
        keep = 1 / divide(M, (1 + c.forget) * rebase * self.M).clamp(min=1.0)
        for kept, new in zip(
            (self.m, self.v, self.r, self.s, self.M, self.U), (m, v, r, s, M, U), strict=True
        ):
            kept.copy_(new)
        return s.sum(1), keep


class Multiplied(Tuned):
    """On the way: the log of the scale follows −⟨D, g⟩, slower with every adverse step."""

    defaults: ClassVar[dict[str, Any]] = {
        "start": 1e-4,  # the first step, relative to the parameters
        "floor": 0.01,  # the least that a parameter is taken to be, for that
        "gain": 0.7,  # the most that the log moves in a step
        "power": 1.0,  # of the adverse steps, in the gain
        "patience": 1.0,  # so many adverse steps halve the gain
        "least": 0.0,  # the gain does not fall below
        "memory": 1.0,  # of adverse steps
        "cosine": 0.0,  # 1: of D and −g, in place of their product
        "window": 0.99,  # over which the signal is brought to size 1
        "weight": 0.0,  # a power of ‖u‖ that weighs steps up, so that they fade with a schedule
        "down": 1.0,  # the weight of steps down
        "bias": 0.0,  # added to the signal
        "early": 0.0,  # the same, over the root of the steps
        "past": 0.0,  # the power of the change by which the walk so far is multiplied
        "unit": 1.0,  # 1: the scale falls as updates grow
    }

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        super().begin(x, seeds, steps)
        self.adverse, self.squares, self.counts, self.steps, self.late, self.peak = (
            torch.zeros_like(self.S) for _ in range(6)
        )

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        c = self.c
        U, start = self.grow(u)
        signal = self.normalised(g)
        gain = c.gain / (c.patience + self.adverse) ** c.power * c.patience**c.power
        z = torch.maximum(gain, c.least)
        z = z * torch.where(signal > 0, self.fading(u) * signal, c.down * signal)
        self.adverse.mul_(c.memory).add_((-signal).clamp(min=0))
        unit = torch.where(c.unit > 0, divide(self.U, U), 1.0)
        S = torch.where(self.S > 0, self.S * torch.exp(z) * unit, start)
        changed = S / self.S.clamp(min=1e-300)
        past = torch.where((c.past > 0) & (self.S > 0), changed**c.past, 1.0)
        return self.move(x, u, S, U, past)

    def normalised(self, g: Tensor) -> Tensor:
        """The signal over its root mean square, within ±1."""
        c = self.c
        signal = torch.where(c.cosine == 1, -cosine(self.D, g), -dot(self.D, g))
        self.squares.mul_(c.window).add_((1 - c.window) * signal**2)
        self.counts.mul_(c.window).add_((1 - c.window) * (signal != 0))
        size = (self.squares / self.counts.clamp(min=1e-12)).sqrt()
        self.steps += 1
        bias: Tensor = c.bias + c.early / self.steps.sqrt()
        return (divide(signal, size).clamp(-1, 1) + bias).clamp(-1, 1)

    def fading(self, u: Tensor) -> Tensor:
        """How large updates are of late, beside their largest."""
        size = u.norm(dim=1).double()
        self.late.copy_(torch.where(self.late > 0, 0.9 * self.late + 0.1 * size, size))
        self.peak.copy_(torch.maximum(self.peak, self.late))
        weight: Tensor = self.c.weight
        return divide(self.late, self.peak).clamp(max=1.0) ** weight


class Cosine(Tuned):
    """The first default of the kind: the scale is multiplied or divided each step, by the cosine of
    D and −g over the largest of late, less so with every adverse step."""

    defaults: ClassVar[dict[str, Any]] = {
        "start": 1e-4,  # the first step, relative to the parameters
        "floor": 0.1,  # the least that a parameter is taken to be, for that
        "gain": 1.0,  # the scale at most doubles
        "soft": 1.0,  # a power of the signal, in steps up
        "down": 1.0,  # the weight of steps down
        "back": 0.5,  # the first step down is more: the ramp ends
        "patience": 1.0,  # so many adverse steps halve the gain
        "memory": 0.98,  # of adverse steps
        "largest": 1.0,  # 0: the cosine is divided by its root mean square of late
        "window": 0.99,  # how late
        "past": 0.5,  # the power of the change by which the walk so far is multiplied
    }

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        super().begin(x, seeds, steps)
        self.adverse, self.squares, self.counts, self.most = (
            torch.zeros_like(self.S) for _ in range(4)
        )

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        c = self.c
        U, start = self.grow(u)
        signal = self.normalised(g)
        gain = c.gain / (1 + self.adverse / c.patience)
        up = 1 + gain * signal.clamp(min=0) ** c.soft
        by = torch.where(signal >= 0, up, 1 / (1 + c.down * gain * (-signal).clamp(min=0)))
        by = torch.where((self.adverse == 0) & (signal < 0), c.back * by, by)
        self.adverse.mul_(c.memory).add_((-signal).clamp(min=0))
        S = torch.where(self.S > 0, self.S * by * divide(self.U, U), start)
        return self.move(x, u, S, U, torch.where(self.S > 0, by, 1.0) ** c.past)

    def normalised(self, g: Tensor) -> Tensor:
        """The cosine of D and −g over its size of late, within ±1."""
        signal, window = -cosine(self.D, g), self.c.window
        self.squares.mul_(window).add_(signal**2)
        self.counts.mul_(window).add_((signal != 0).double())
        self.most.copy_(torch.maximum(window * self.most, signal.abs()))
        rms = (self.squares / self.counts.clamp(min=1e-12)).sqrt()
        return divide(signal, torch.where(self.c.largest > 0, self.most, rms)).clamp(-1, 1)


class Now(Tuned):
    """The default (`_default` in mechanic/tuner.py)."""

    defaults: ClassVar[dict[str, Any]] = {
        "start": 1e-4,  # the first step, relative to the parameters
        "floor": 0.1,  # the least that a parameter is taken to be, for that
        "ramp": 0.0,  # the gain in the ramp; 0: (1 + cosine)/2
        "patience": 2.0,  # so many adverse steps halve the gain
        "back": 0.5,  # the first step down is more: the ramp ends
        "undo": 0.0,  # 1: and the walk so far is taken back
        "window": 0.99,  # how long a largest cosine counts
        "rises": 0.25,  # the power of a change by which the walk so far is multiplied
        "falls": 0.5,
        "late": 0.95,  # how long a largest fall counts for the brake, and falls in a row
        "counted": 0.25,  # the part of a rise that counts as one
        "guarded": 1.0,  # 0: also where g lies along D and little is at stake
        "weighed": 1.0,  # 0: adverse steps count as much after a fall larger than any before
        "blown": 4.0,  # a rise counts in the largest as so many times what it was at most
        "in_a_row": 2.0,  # how much the falls in a row count, against the adverse steps
        "noisy": 1.0,  # 0: a large cosine counts against S alone, and falls in a row do nothing
        "bias": 0.0,  # on the signal, after the ramp
    }

    def begin(self, x: Tensor, seeds: int, steps: int) -> None:
        super().begin(x, seeds, steps)
        self.adverse, self.most, self.usual, self.largest, self.steady, self.fallen = (
            torch.zeros_like(self.S) for _ in range(6)
        )

    def step(self, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        c, one, begun = self.c, torch.ones_like(self.S), self.S > 0
        U, start = self.grow(u)
        toward, fall = -cosine(self.D, g), -(self.D * g).sum(1).double()
        self.most.copy_(torch.maximum(c.window * self.most, toward.abs()))
        less = torch.where(fall > self.largest, divide(self.largest, fall), one)
        self.adverse.mul_(torch.where(c.weighed > 0, less, one))
        self.largest.copy_(torch.maximum(self.largest, fall.abs()))
        rise = torch.where(self.steady > 0, torch.minimum(-fall, c.blown * self.steady), -fall)
        self.steady.copy_(torch.maximum(self.steady, torch.maximum(fall, rise)))
        size = divide(fall.abs(), self.usual)
        record = divide(fall.abs(), self.largest)
        brake = torch.where(fall < 0, 1 + record**2 * ((size / 4).clamp(1, 2) - 1), one)
        at_stake = torch.where(self.usual > 0, size.clamp(0, 1), one)
        self.usual.copy_(torch.maximum(c.late * self.usual, torch.max(fall, -c.counted * fall)))

        rest = 1 - c.guarded * toward**2 * (1 - at_stake)
        signal = rest * divide(toward, self.most)
        signal = torch.where(self.adverse > 0, (signal + c.bias).clamp(-1, 1), signal)
        ramp = torch.where(c.ramp > 0, c.ramp, (1 + toward.clamp(min=0)) / 2)
        noise, large = c.noisy * (1 - self.most**2), at_stake * toward**2
        self.fallen.copy_(torch.where((fall > 0) & begun, c.late * self.fallen + fall, 0.0))
        slow = self.adverse / (1 + (c.in_a_row * noise**4 * divide(self.fallen, self.steady)) ** 2)
        gain = torch.where(self.adverse > 0, c.patience / (c.patience + slow), ramp)
        worth = (divide(fall.abs(), self.steady) / 0.01).clamp(0, 1)
        up = gain * signal + torch.where(self.adverse > 0, noise**2 * large, 0.0)
        down = gain * signal.abs() + (1 - noise) * large
        by = torch.where(signal > 0, 1 + worth**2 * up, 1 / (1 + worth * down))
        ends = begun & (self.adverse == 0) & (signal < 0)
        by = torch.where(ends, c.back * by, by)
        self.adverse.copy_(torch.where(begun, self.adverse + (-signal).clamp(min=0), 0.0))
        S = torch.where(begun, self.S * by / brake * divide(self.U, U), start)
        past = 1 + rest * (by ** torch.where(by > 1, c.rises, c.falls) - 1)
        past = torch.where(ends & (c.undo > 0), 0.0, past)
        return self.move(x, u, S, U, torch.where(begun, past, one))
