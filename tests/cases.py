"""Cases of parametrized tests: those of `make test`, by day, and those of `make test-all`."""

from typing import Any

import pytest


def case(*values: Any, name: str, by_day: bool = True) -> Any:
    return pytest.param(*values, id=name, marks=() if by_day else pytest.mark.nightly)
