"""How methods and numbers look: a colour a method in all plots, safe for the colour-blind."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from mechanic.bench.score import Method

SWEEP = "best of sweep"

# Okabe and Ito's palette, then Tol's "muted". Mechanic's own are warm, the peers cold.
_DEFAULT = "#D55E00"
_OURS = ("#E69F00", "#882255", "#CC6677", "#8C510A")
_PEERS = ("#0072B2", "#009E73", "#56B4E9", "#332288", "#AA4499", "#117733", "#999933", "#44AA99")
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Look:
    """Of a line."""

    colour: str
    width: float = 1.6
    dash: str = "solid"


SWEEP_LOOK = Look("#2B2B2B", 2.2)
Looks = Mapping[str, Look]  # by label


def choose_looks(methods: Iterable[Method], defaults: Iterable[Method | None]) -> Looks:
    """One look a label; methods beyond the palette take its colours again in another dash."""
    looks = {SWEEP: SWEEP_LOOK}
    defaults = set(defaults)
    ours, peers = count(len(_OURS)), count()  # Mechanic's others are dashed from the first
    for method in methods:
        if method.label in looks:
            continue
        if method in defaults:
            looks[method.label] = Look(_DEFAULT, 3.2)
            continue
        palette, place = (_OURS, next(ours)) if method.kind == "mechanic" else (_PEERS, next(peers))
        dash = _DASHES[place // len(palette) % len(_DASHES)]
        looks[method.label] = Look(palette[place % len(palette)], 1.6, dash)
    return looks


def percent(value: float) -> str:
    """With its sign; two digits or so: +0.31 %, −4.2 %, +57 %."""
    size = abs(value)
    digits = 2 if size < 0.995 else 1 if size < 9.95 else 0
    rounded = f"{size:.{digits}f}"
    sign = "" if float(rounded) == 0 else "−" if value < 0 else "+"
    return f"{sign}{rounded}\u00a0%"  # does not break


def number(value: float) -> str:
    """Four digits, an en dash where there is none."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def stretch(excess: float) -> float:
    """The scale of colours and of the overall chart: a square root, for 1 % should be seen."""
    return math.copysign(math.sqrt(abs(excess)), excess)


def shade(excess: float) -> str:
    """A cell's background: white at 0 %, orange at 100 %, blue where better than the sweep."""
    end = (5, 113, 176) if excess < 0 else (230, 97, 1)
    depth = 0.75 * min(1.0, abs(stretch(excess)) / 10)  # 3/4: black is to be read on it
    red, green, blue = (round(255 + depth * (part - 255)) for part in end)
    return f"#{red:02x}{green:02x}{blue:02x}"


def log_ticks(low: float, high: float) -> list[float]:
    """Some of the powers of ten, or within a decade 1, 2 and 5."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last > first:
        return [10.0**power for power in range(first, last + 1, (last - first) // 6 + 1)]
    places = [part * 10.0**power for power in (first - 1, first) for part in (1, 2, 5)]
    return [place for place in places if low <= place <= high]


def count_of(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
