"""The tuner's rule as Triton code.

`mechanic.tuner` works on the arrays of any library. Here it is given arrays that write down what is
done to them, one line each, and those lines are the kernel's. The loads and stores around them
follow from the names of the numbers in `mechanic.torch.scalars`, so that a rule with another state
needs no other kernel.
"""

import functools
import linecache
import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from mechanic import tuner
from mechanic.advance import advance
from mechanic.options import Options
from mechanic.torch.scalars import rows_of

STEP_SUMS = ("dg", "dx", "gg", "xx", "dd", "uu")
"""The sums that a step measures, in the order in which the kernel `tune` hands them over. The
others are among the tuner's numbers."""

GIVEN = ("share", *STEP_SUMS, "takes_part", "lr")
"""What the rule is given beside the tuner's numbers."""


class _Written:
    """A number, or one number for each β, of the kernel that is being written."""

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

    def __init__(self, rows: tuple[str, ...], count: int) -> None:
        self.rows, self.count = rows, count
        self.lines: list[str] = []

    def write(self, expression: str) -> _Written:
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return _Written(self, name)

    def load(self, name: str) -> _Written:
        """One of the tuner's numbers, from its row."""
        row = f"packed + {self.rows.index(name) * self.count}"
        if name in tuner.PER_BETA:
            return self.write(f"tl.load({row} + lane, mask=lane < {self.count}, other=0.0)")
        return self.write(f"tl.load({row})")

    def store(self, name: str, value: Any) -> None:
        """Write one of the tuner's numbers to its row; one that stands alone, to all columns."""
        row = f"packed + {self.rows.index(name) * self.count}"
        stored = f"tl.store({row} + lane, {self.text(value)}, mask=lane < {self.count})"
        self.lines.append(f"    {stored}")

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
    """A Triton function that makes the tuner's step.

    It is given the address of the tuner's numbers and what `GIVEN` names: the share of the stored
    displacements that Δ is, the sums that the step has measured, whether the tuner takes part in
    the step, and the sum of the groups' learning rates. It writes the next numbers, and returns the
    scale, the share, what a stored displacement is multiplied with to be added to the parameters,
    and whether it is kept.
    """
    kernel = _Kernel(rows_of(options), len(options.betas))
    given = {name: _Written(kernel, name) for name in GIVEN}
    had = {name: kernel.load(name) for name in kernel.rows}
    kind = tuner.state_type(options)
    state = kind(*(had[name] for name in kind._fields))
    measured = {name: given[name] for name in STEP_SUMS}
    sums = tuner.Sums(**measured, x1=had["reference_square"], d=had["size"])
    share, takes_part = given["share"], given["takes_part"]
    state, next_share, kept = advance(options, state, share, sums, takes_part, frozen=frozen)
    scale = kernel.where(takes_part, tuner.scale_of(state), had["scale"])
    signal = kernel.where(takes_part, sums.dg, had["signal"])
    pull: Any = scale * next_share - had["scale"] * share  # type: ignore[operator]
    kept = kernel.where(takes_part, kept, 1.0)
    lr = kernel.where(takes_part, given["lr"], 0.0)
    results = scale, next_share, pull * kept, kept
    # Every warp has to have read the numbers before one of them writes.
    kernel.lines.append("    tl.debug_barrier()")
    for name, value in {
        **state._asdict(),
        "scale": scale,
        "share": next_share,
        "signal": signal,
        "typed_total": had["typed_total"] + lr,  # type: ignore[operator]
        "applied_total": had["applied_total"] + scale * lr,  # type: ignore[operator]
    }.items():
        kernel.store(name, value)
    return _compile(f"<the rule of {options}, {frozen=}>", kernel, *results)


def _compile(file: str, kernel: _Kernel, *results: _Written) -> Any:
    head = f"@triton.jit\ndef rule(packed, {', '.join(GIVEN)}, lane):"
    tail = f"    return {', '.join(value.name for value in results)}"
    source = "\n".join([head, *kernel.lines, tail, ""])
    # Triton reads the source of a function, so it has to be found under the name of a file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return names["rule"]
