"""The variants of each rule that were tried, in the order in which they were."""

from collections.abc import Sequence
from itertools import product

from .population import Rule
from .rules import Before, Cosine, Multiplied, Now, Options

Rules = dict[str, Rule]


def vary(*variants: Options, **common: float) -> dict[str, Options]:
    """Variants, named by what they have apart from what is common to all."""
    return {spelled(variant): {**common, **variant} for variant in variants}


def spelled(options: Options) -> str:
    def text(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key} {text(value)}" for key, value in options.items()) or "as it is"


def each(keys: str, *rows: Sequence[float]) -> list[Options]:
    """A variant for each row of numbers, in the order of the keys."""
    return [dict(zip(keys.split(), row, strict=True)) for row in rows]


def one(key: str, *values: float) -> list[Options]:
    """A variant for each value of one option."""
    return [{key: value} for value in values]


def before() -> Rules:
    """The old default, one part changed at a time."""
    return {
        "Before": Before(
            vary(
                {},
                {"rescale": 0.0},
                {"rescale": 0.0, "forget": 0.0},
                {"smooth": 0.9},
                *one("shrink", 0.9, 0.98, 0.995),
                *one("optimism", 0.8, 0.5, 0.2),
                *one("forget", 0.02, 0.1, 0.5, 1e9),
                {"betas": (0.9,)},
                {"betas": (0.99,)},
                {"betas": (0.999,)},
                {"betas": (0.99999,)},
                {"betas": (0.9, 0.99, 0.999)},
                *one("start", 1e-3, 1e-5, 1e-6),
                *one("clip", 10.0, 1.0),
                *one("recent", 0.5, 0.0),
                *each("recent window", (0.5, 0.99), (0.0, 0.99)),
                *one("factor", 2.0, 3.0),
                *one("grow", 1.5, 2.0),
            )
        )
    }


def first() -> Rules:
    """The scale multiplied: from what it follows to how fast it falls."""
    constants = vary(
        {},
        {"power": 0.5},
        *one("patience", 3.0, 10.0),
        *each("patience weight", (3.0, 1.0)),
        *each("patience power", (3.0, 0.7)),
        *each("patience past", (3.0, 0.3)),
        {"weight": 1.0},
        *one("gain", 0.5, 1.0),
        {"start": 1e-3},
        {"cosine": 1.0},
        *each("cosine weight", (1.0, 1.0)),
        *one("window", 0.9, 0.999),
        {"past": 0.5},
        *one("bias", 0.1, 0.2),
        {"down": 2.0},
        {"least": 0.02},
        *each("least weight", (0.02, 1.0)),
    )
    past = vary(
        *each("past bias patience", *product((0.2, 0.35, 0.5), (0.0, 0.1, 0.2, 0.3), (1.0, 3.0)))
    )
    signal = vary(
        *each("cosine past memory", *product((0.0, 1.0), (0.2, 0.5), (1.0, 0.98))),
        *each(
            "cosine past memory patience", *product((1.0,), (0.35,), (1.0, 0.98, 0.95), (1.0, 3.0))
        ),
        *each("cosine past gain memory", *product((1.0,), (0.35,), (0.35,), (1.0, 0.98))),
        *each("cosine past start memory", *product((1.0,), (0.35,), (1e-3,), (1.0, 0.98))),
        *each("cosine past unit", (1.0, 0.35, 0.0)),
        *each("cosine past memory weight", (1.0, 0.35, 0.98, 1.0)),
        *each("cosine past memory", (1.0, 0.0, 0.98)),
        *each("cosine past window", (1.0, 0.35, 0.9), (1.0, 0.35, 0.999)),
    )
    pushed = vary(
        *each("past memory", (0.35, 0.98), (0.2, 0.98), (0.2, 0.99)),
        *each("past memory bias", *product((0.35,), (0.98,), (0.05, 0.1, 0.15))),
        *each("past memory bias", (0.35, 0.99, 0.1), (0.35, 0.9, 0.1)),
        *each("past memory bias", (0.2, 0.98, 0.1), (0.5, 0.98, 0.1)),
        *each("past memory early", *product((0.35,), (0.98,), (1.0, 2.0, 3.0)), (0.2, 0.98, 1.0)),
        *each("past memory gain", (0.35, 0.98, 1.0)),
        *each("past memory gain bias", (0.35, 0.98, 1.0, 0.1), (0.35, 0.98, 0.5, 0.1)),
        *each("past memory power bias", (0.35, 0.98, 0.7, 0.1)),
        *each("past memory down", (0.35, 0.98, 0.7)),
        cosine=1.0,
        start=1e-3,
    )
    down = vary(
        *one("down", 0.7, 0.5, 0.35, 0.2),
        *each("down past", (0.7, 0.2), (0.5, 0.2), (0.35, 0.2), (0.5, 0.5)),
        *each("down memory", (0.5, 0.99), (0.5, 1.0), (0.5, 0.95), (0.35, 0.95)),
        *each("down past memory", (0.5, 0.2, 0.99)),
        *each("down gain", (0.5, 0.5), (0.5, 0.85)),
        *each("down window", (0.5, 0.9), (0.5, 0.97)),
        *each("down start", (0.5, 1e-4), (0.5, 3e-4)),
        *each("down patience", (0.5, 3.0)),
        **{"cosine": 1.0, "start": 1e-3, "past": 0.35, "memory": 0.98},
    )
    return {
        "Multiplied: its constants": Multiplied(constants),
        "Multiplied: the past, a bias, patience": Multiplied(past),
        "Multiplied: what it follows, and how long it remembers": Multiplied(signal),
        "Multiplied, cosine 1, start 1e-3: a bias": Multiplied(pushed),
        "Multiplied, cosine 1, start 1e-3, past 0.35, memory 0.98: slower down": Multiplied(down),
    }


def cosine() -> Rules:
    """The first default that goes by the cosine, and what was tried before it."""
    earlier = {"start": 1e-3, "floor": 0.01, "down": 0.7, "back": 1.0}
    soft = vary(
        {},
        *one("soft", 1.5, 2.0),
        {"gain": 0.7},
        *each("gain soft", (0.7, 1.5), (1.5, 2.0), (1.5, 1.5)),
        {"largest": 1.0},
        *each("largest gain", (1.0, 1.5)),
        *each("largest soft", (1.0, 0.7)),
        {"past": 0.25},
        *each("past soft", (0.25, 2.0)),
        *one("down", 1.0, 0.5),
        *each("down soft", (0.5, 2.0)),
        {"memory": 0.95},
        *each("memory soft", (0.95, 2.0), (0.9, 2.0)),
        {"start": 3e-4},
        *each("start gain soft", (3e-4, 1.5, 2.0)),
        *each("patience soft", (3.0, 2.0)),
        {"window": 0.999},
        *each("window soft", (0.999, 2.0)),
        **{**earlier, "largest": 0.0},
    )
    speed = vary(
        *each("past down", *product((0.5, 0.25, 0.0), (0.7, 0.5))),
        *each("past down", (0.25, 0.35), (0.25, 1.0), (0.125, 0.7)),
        *each("past down memory", (0.25, 0.7, 0.95), (0.25, 0.5, 0.95), (0.5, 0.5, 0.95)),
        *each("past down memory", (0.25, 0.35, 0.95)),
        *each("past down window", (0.25, 0.5, 0.97), (0.25, 0.5, 0.999), (0.25, 0.7, 0.95)),
        *each("past down gain", (0.25, 0.5, 1.3)),
        *each("past down floor", (0.25, 0.5, 0.1)),
        *each("past down start", (0.25, 0.5, 3e-3), (0.25, 0.5, 3e-4)),
        **earlier,
    )
    shipped = vary(
        {},
        earlier,
        *one("back", 1.0, 0.25),
        {"down": 0.7},
        *each("down memory", (0.7, 0.95)),
        *one("memory", 0.95, 0.9),
        *one("past", 0.25, 0.7, 1.0),
        {"window": 0.95},
    )
    return {
        f"Cosine, {spelled(earlier)}, largest 0: softer up": Cosine(soft),
        f"Cosine, {spelled(earlier)}: slower": Cosine(speed),
        "Cosine: as it was, and its constants": Cosine(shipped),
    }


def now() -> Rules:
    """The rule that ships, one part changed at a time."""
    past = vary(
        {},
        *each("rises falls", (0.5, 0.5), (0.25, 0.25), (0.1, 0.1), (0.35, 0.35), (0.35, 0.7)),
        *each("rises falls", (0.5, 1.0), (0.25, 0.75), (0.1, 0.5), (0.0, 0.5), (0.0, 1.0)),
    )
    speed = vary(
        *one("patience", 1.0, 3.0, 4.0),
        *one("ramp", 0.5, 1.0),
        *each("ramp undo", (1.0, 1.0)),
        *one("back", 1.0, 0.25),
        *one("window", 0.97, 0.995),
    )
    guards = vary(
        {"guarded": 0.0},
        *each("late counted", (0.9, 1.0), (0.9, 0.25), (0.95, 1.0)),
        *one("bias", 0.05, 0.1),
    )
    return {"Now: the past": Now(past), "Now: its speed": Now(speed), "Now: guards": Now(guards)}


def settings() -> Rules:
    """The defaults one after the other."""
    return {
        "Before": Before({"before": {}}),
        "Cosine": Cosine({"cosine": {}}),
        "Now": Now({"now": {}}),
    }
