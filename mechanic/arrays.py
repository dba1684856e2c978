"""The few operations that the rules need beyond an array library's own, for the arrays of any."""

import math
import sys
from typing import Any, TypeAlias

from mechanic import floats

Array: TypeAlias = Any
"""A NumPy, torch or JAX array, or a float; there is no common type to name."""


def total(numbers: Array) -> Array:
    """The sum over the tuners, of which floats are one."""
    return numbers if type(numbers) is float else numbers.sum()


def count(beta: Array) -> int:
    """The number of tuners."""
    return 1 if type(beta) is float else len(beta)


def mean(beta: Array) -> Array:
    """The mean over the tuners."""
    return total(beta) / count(beta)


def namespace(array: Array) -> Any:
    """The library that an array comes from. torch's tensors and Python's floats do not say."""
    if type(array) is float:
        return floats
    own = getattr(array, "__array_namespace__", None)
    return own() if own is not None else sys.modules["torch"]


def maximum(a: Array, b: Array) -> Array:
    """The larger of two numbers."""
    return namespace(a).clip(a, b, None)


def finite(a: Array) -> Array:
    """a, and 0 where it is inf or NaN."""
    return namespace(a).where(abs(a) < math.inf, a, 0.0)


def divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: with no ε beside it, no scale of the loss is special."""
    xp = namespace(b)
    return a / xp.where(b > 0, b, math.inf)
