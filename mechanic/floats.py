"""Python's floats as an array library, for the rules of `mechanic.tuner`.

On a CPU the hundred small operations of a rule take an array library longer than the whole step of
a small model. A tuner with one β can be computed with plain numbers there.
"""

import math


def where(condition: bool, a: float, b: float) -> float:
    """`a` or `b`."""
    return a if condition else b


def clip(a: float, low: float | None, high: float | None) -> float:
    """The nearest number within bounds."""
    if low is not None and a < low:
        a = low
    return high if high is not None and a > high else a


def sqrt(a: float) -> float:
    """The root, and NaN of what has none."""
    return math.sqrt(a) if a >= 0 else math.nan
