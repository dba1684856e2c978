"""The tuner's rule as Triton code (see `mechanic.torch.written`)."""

import functools
import linecache
import math
from typing import Any

import triton
import triton.language as tl

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import written
from mechanic.torch.written import GIVEN, Code, Written


class _Kernel(Code):
    """The body of a Triton function, in which `lane` runs over the β."""

    def given(self, name: str) -> Written:
        return Written(self, name)

    def load(self, name: str) -> Written:
        if name in tuner.PER_BETA:
            return self.write(f"tl.load({self._row(name)} + lane, mask={self._is_own}, other=0.0)")
        return self.write(f"tl.load({self._row(name)})")

    def begin_to_store(self) -> None:
        # Every warp has to have read the numbers before one of them writes.
        self.lines.append("    tl.debug_barrier()")

    def store(self, name: str, value: Any) -> None:
        stored = f"tl.store({self._row(name)} + lane, {self.text(value)}, mask={self._is_own})"
        self.lines.append(f"    {stored}")

    @property
    def _is_own(self) -> str:
        return f"lane < {self.count}"

    def _row(self, name: str) -> str:
        return f"packed + {self.rows.index(name) * self.count}"

    def number(self, value: float) -> str:
        number = f'float("{value}")' if math.isinf(value) else repr(value)
        return f"tl.full((), {number}, tl.float64)"  # bare, it would be a float32

    def write(self, expression: str) -> Written:
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return Written(self, name)

    def sum(self, numbers: Written) -> Written:
        return self.write(f"tl.sum(tl.where({self._is_own}, {numbers.name}, 0.0), 0)")

    def absolute(self, text: str) -> str:
        return f"tl.abs({text})"

    def root(self, text: str) -> str:
        return f"tl.sqrt({text})"

    def choice(self, condition: str, a: str, b: str) -> str:
        return f"tl.where({condition}, {a}, {b})"


@functools.cache
def write_rule(options: Options, *, frozen: bool) -> Any:
    """A Triton function that makes the tuner's step. It is given the address of the tuner's
    numbers, what `GIVEN` names, and the lanes."""
    kernel = _Kernel(options)
    results = written.write_rule(kernel, options, frozen=frozen)
    return _compile(f"<the rule of {options}, {frozen=}>", kernel, *results)


def _compile(file: str, kernel: _Kernel, *results: Written) -> Any:
    head = f"@triton.jit\ndef rule(packed, {', '.join(GIVEN)}, lane):"
    tail = f"    return {', '.join(value.name for value in results)}"
    source = "\n".join([head, *kernel.lines, tail, ""])
    # Triton reads the source of a function, so it has to be found under the name of a file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return names["rule"]
