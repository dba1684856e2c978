"""The tuner's rule as Triton code.

`mechanic.tuner` works on the arrays of any library. Here it is given arrays that write down what is
done to them, one line each, and those lines are the kernel's.
"""

import functools
import linecache
import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch.scalars import advance

INPUTS = (*tuner.State._fields, "share", *tuner.Sums._fields, "takes_part")


class _Written:
    """A number, or one a β, of the kernel that is being written."""

    def __init__(self, kernel: "_Kernel", name: str) -> None:
        self.kernel, self.name = kernel, name

    def __array_namespace__(self) -> "_Kernel":
        return self.kernel

    def __len__(self) -> int:
        return self.kernel.count

    def sum(self) -> "_Written":
        return self.kernel.write(f"tl.sum(tl.where(lane < {len(self)}, {self.name}, 0.0), 0)")

    def __abs__(self) -> "_Written":
        return self.kernel.write(f"tl.abs({self.name})")

    def __neg__(self) -> "_Written":
        return self.kernel.write(f"-{self.name}")

    def __pow__(self, exponent: int) -> "_Written":
        if exponent != 2:
            raise NotImplementedError(f"a rule may square a number, not take its power {exponent}.")
        return self.kernel.write(f"{self.name} * {self.name}")


def _operator(symbol: str, *, swapped: bool = False) -> Callable[[_Written, Any], _Written]:
    def apply(self: _Written, other: Any) -> _Written:
        operands = self.kernel.text(other), symbol, self.name
        return self.kernel.write(" ".join(operands if swapped else operands[::-1]))

    return apply


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*", "truediv": "/"}.items():
    setattr(_Written, f"__{_name}__", _operator(_symbol))
    setattr(_Written, f"__r{_name}__", _operator(_symbol, swapped=True))
for _name, _symbol in {"gt": ">", "lt": "<"}.items():
    setattr(_Written, f"__{_name}__", _operator(_symbol))


class _Kernel:
    """The body of the function that is being written, and the array library that writes it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lines: list[str] = []

    def write(self, expression: str) -> _Written:
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return _Written(self, name)

    def text(self, value: Any) -> str:
        if isinstance(value, _Written):
            return value.name
        number = f'float("{value}")' if math.isinf(value) else repr(float(value))
        return f"tl.full((), {number}, tl.float64)"  # bare, it would be a float32

    def where(self, condition: _Written, a: Any, b: Any) -> _Written:
        return self.write(f"tl.where({condition.name}, {self.text(a)}, {self.text(b)})")

    def clip(self, a: Any, low: Any, high: Any) -> _Written:
        name = self.text(a)
        for bound, sign in ((low, "<"), (high, ">")):
            if bound is not None:
                limit = self.text(bound)
                name = self.write(f"tl.where({name} {sign} {limit}, {limit}, {name})").name
        return _Written(self, name)

    def sqrt(self, a: _Written) -> _Written:
        return self.write(f"tl.sqrt({a.name})")


@functools.cache
def write_rule(options: Options, *, frozen: bool) -> Any:
    """A Triton function from a tuner's state, share and sums, and whether it takes part in the
    step, to the next state and share."""
    kernel = _Kernel(len(options.betas))
    given = {name: _Written(kernel, name) for name in INPUTS}
    state = tuner.State(*(given[name] for name in tuner.State._fields))
    sums = tuner.Sums(*(given[name] for name in tuner.Sums._fields))
    state, share = advance(options, state, given["share"], sums, given["takes_part"], frozen=frozen)
    results = ", ".join(kernel.text(value) for value in (*state, share))
    head = f"@triton.jit\ndef rule({', '.join(INPUTS)}, lane):"
    source = "\n".join([head, *kernel.lines, f"    return {results}", ""])
    # Triton reads the source of a function, so it has to be found under the name of a file.
    file = f"<the rule of {options}, {frozen=}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return names["rule"]
