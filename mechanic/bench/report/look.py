"""How methods and numbers look: each method has one colour, safe for the colour-blind."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from mechanic.bench.score import ScoredMethod

SWEEP = "best of sweep"

# Okabe and Ito's palette, then Tol's "muted". Mechanic has warm colours, the peers cold ones.
_DEFAULT = "#D55E00"
_OURS = ("#E69F00", "#882255", "#CC6677", "#8C510A")
_PEERS = ("#0072B2", "#009E73", "#56B4E9", "#332288", "#AA4499", "#117733", "#999933", "#44AA99")
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Look:
    """The style of a line."""

    colour: str
    width: float = 1.6
    dash: str = "solid"


SWEEP_LOOK = Look("#2B2B2B", 2.2)
Looks = Mapping[str, Look]
"""The look of each label."""


def choose_looks(methods: Iterable[ScoredMethod], defaults: Iterable[ScoredMethod | None]) -> Looks:
    """Choose a look for each label. When the colours are used up, they return with other dashes."""
    looks = {SWEEP: SWEEP_LOOK}
    defaults = set(defaults)
    ours, peers = count(len(_OURS)), count()  # Mechanic's other presets begin with dashed lines
    for method in methods:
        if method.label in looks:
            continue
        if method in defaults:
            looks[method.label] = Look(_DEFAULT, 3.2)
            continue
        palette, index = (_OURS, next(ours)) if method.kind == "mechanic" else (_PEERS, next(peers))
        dash = _DASHES[index // len(palette) % len(_DASHES)]
        looks[method.label] = Look(palette[index % len(palette)], 1.6, dash)
    return looks


def percent(value: float) -> str:
    """A percentage with its sign and about two digits: +0.31 %, −4.2 %, +57 %."""
    size = abs(value)
    digits = 2 if size < 0.995 else 1 if size < 9.95 else 0
    rounded = f"{size:.{digits}f}"
    sign = "" if float(rounded) == 0 else "−" if value < 0 else "+"
    return f"{sign}{rounded}\u00a0%"  # a space that does not break


def number(value: float) -> str:
    """A number with four digits; an en dash for NaN or infinity."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def stretch(excess: float) -> float:
    """The scale of colours and of the overall chart: a square root, so that 1 % is visible."""
    return math.copysign(math.sqrt(abs(excess)), excess)


def shade(excess: float) -> str:
    """The background of a cell: white at 0 %, orange at 100 %, blue where better than the sweep."""
    end = (5, 113, 176) if excess < 0 else (230, 97, 1)
    depth = 0.75 * min(1.0, abs(stretch(excess)) / 10)  # 3/4, so that black text stays readable
    red, green, blue = (round(255 + depth * (part - 255)) for part in end)
    return f"#{red:02x}{green:02x}{blue:02x}"


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 within one decade."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last > first:
        return [10.0**power for power in range(first, last + 1, (last - first) // 6 + 1)]
    ticks = [digit * 10.0**power for power in (first - 1, first) for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def count_of(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
