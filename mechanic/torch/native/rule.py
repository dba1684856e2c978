"""The tuner's rule as a function in C (see `mechanic.torch.written`)."""

import math
from typing import Any

from mechanic.options import Options
from mechanic.torch import written
from mechanic.torch.written import GIVEN, Code, Written


class _Function(Code):
    """The body of a function in C. Every number has as many columns as there are β, and one that
    stands alone is the same in all of them."""

    def given(self, name: str) -> Written:
        return self.write(f"given[{GIVEN.index(name)}]")

    def load(self, name: str) -> Written:
        return self.write(self._row(name))

    def store(self, name: str, value: Any) -> None:
        self.lines.append(f"    EACH {self._row(name)} = {self.text(value)};")

    def _row(self, name: str) -> str:
        return f"packed[{self.rows.index(name) * self.count} + k]"

    def text(self, value: Any) -> str:
        return f"{value.name}[k]" if isinstance(value, Written) else self.number(float(value))

    def number(self, value: float) -> str:
        return f"{'-' * (value < 0)}INFINITY" if math.isinf(value) else repr(value)

    def write(self, expression: str) -> Written:
        name = f"t{len(self.lines)}"
        self.lines.append(f"    double {name}[{self.count}]; EACH {name}[k] = {expression};")
        return Written(self, name)

    def sum(self, numbers: Written) -> Written:
        return self.write(" + ".join(f"{numbers.name}[{k}]" for k in range(self.count)))

    def absolute(self, text: str) -> str:
        return f"fabs({text})"

    def root(self, text: str) -> str:
        return f"sqrt({text})"

    def choice(self, condition: str, a: str, b: str) -> str:
        return f"{condition} ? {a} : {b}"


def write_rule(options: Options, *, frozen: bool) -> str:
    """A function in C that makes the tuner's step: `void rule(packed, given, made)`."""
    function = _Function(options)
    results = written.write_rule(function, options, frozen=frozen)
    lines = [
        "#include <math.h>",
        f"#define EACH for (int k = 0; k < {function.count}; ++k)",
        "void rule(double *packed, const double *given, double *made) {",
        *function.lines,
        *(f"    made[{place}] = {value.name}[0];" for place, value in enumerate(results)),
        "}",
    ]
    return "\n".join([*lines, ""])
