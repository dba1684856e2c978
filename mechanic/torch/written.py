"""The tuner's rule as code of another language: Triton's, or C.

`mechanic.tuner` works on the arrays of any library. Here it is given arrays that write down what is
done to them, one line each, and those lines are the code. The loads and stores around them follow
from the names of the numbers in `mechanic.torch.scalars`, so that a rule with another state needs
no other code. `kernels/rule.py` and `native/rule.py` have what the languages differ in.
"""

from collections.abc import Callable
from typing import Any

from mechanic import tuner
from mechanic.advance import advance
from mechanic.options import Options
from mechanic.torch.scalars import rows_of

STEP_SUMS = ("dg", "dx", "gg", "xx", "dd", "uu")
"""The sums that a step measures, in the order in which they are handed over. The others are among
the tuner's numbers."""

GIVEN = ("share", *STEP_SUMS, "takes_part", "lr")
"""What the rule is given beside the tuner's numbers."""


class Written:
    """A number, or one number for each β, of the code that is being written."""

    def __init__(self, code: "Code", name: str) -> None:
        self.code, self.name = code, name

    def __array_namespace__(self) -> "Code":
        return self.code

    def __len__(self) -> int:
        return self.code.count

    def sum(self) -> "Written":
        """The sum over the β."""
        return self.code.sum(self)

    def __abs__(self) -> "Written":
        return self.code.write(self.code.absolute(self.code.text(self)))

    def __neg__(self) -> "Written":
        return self.code.write(f"-{self.code.text(self)}")

    def __pow__(self, exponent: int) -> "Written":
        if exponent != 2:
            raise NotImplementedError(f"a rule may square a number, not take its power {exponent}.")
        return self.code.write(f"{self.code.text(self)} * {self.code.text(self)}")


def _operator(symbol: str, *, swapped: bool = False) -> Callable[[Written, Any], Written]:
    def apply(self: Written, other: Any) -> Written:
        operands = self.code.text(other), symbol, self.code.text(self)
        return self.code.write(" ".join(operands if swapped else operands[::-1]))

    return apply


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*", "truediv": "/"}.items():
    setattr(Written, f"__{_name}__", _operator(_symbol))
    setattr(Written, f"__r{_name}__", _operator(_symbol, swapped=True))
for _name, _symbol in {"gt": ">", "lt": "<"}.items():
    setattr(Written, f"__{_name}__", _operator(_symbol))


class Code:
    """The body of the function that is being written, and the array library that writes it."""

    def __init__(self, options: Options) -> None:
        self.rows, self.count = rows_of(options), len(options.betas)
        self.lines: list[str] = []

    def given(self, name: str) -> Written:
        """One of the numbers that `GIVEN` names."""
        raise NotImplementedError

    def load(self, name: str) -> Written:
        """One of the tuner's numbers, from its row."""
        raise NotImplementedError

    def begin_to_store(self) -> None:
        """Called when all is computed, before the first number is stored."""

    def store(self, name: str, value: Any) -> None:
        """Write one of the tuner's numbers to its row; one that stands alone, to all columns."""
        raise NotImplementedError

    def number(self, value: float) -> str:
        """A number as the language has it."""
        raise NotImplementedError

    def write(self, expression: str) -> Written:
        """A line that computes something, and what it has computed."""
        raise NotImplementedError

    def sum(self, numbers: Written) -> Written:
        """The sum over the β."""
        raise NotImplementedError

    def absolute(self, text: str) -> str:
        """|a|"""
        raise NotImplementedError

    def root(self, text: str) -> str:
        """√a"""
        raise NotImplementedError

    def choice(self, condition: str, a: str, b: str) -> str:
        """`a` where the condition holds, else `b`."""
        raise NotImplementedError

    def text(self, value: Any) -> str:
        """A value in an expression."""
        return value.name if isinstance(value, Written) else self.number(float(value))

    def where(self, condition: Written, a: Any, b: Any) -> Written:
        """What the rules call `where`."""
        return self.write(self.choice(*map(self.text, (condition, a, b))))

    def clip(self, a: Any, low: Any, high: Any) -> Written:
        """What the rules call `clip`."""
        for bound, sign in ((low, "<"), (high, ">")):
            if bound is not None:
                own, limit = self.text(a), self.text(bound)
                a = self.write(self.choice(f"{own} {sign} {limit}", limit, own))
        clipped: Written = a
        return clipped

    def sqrt(self, a: Written) -> Written:
        """What the rules call `sqrt`."""
        return self.write(self.root(self.text(a)))


def write_rule(code: Code, options: Options, *, frozen: bool) -> tuple[Written, ...]:
    """Write a step of the tuner: it reads the tuner's numbers and what `GIVEN` names, which are the
    share of the stored displacements that Δ is, the sums that the step has measured, whether the
    tuner takes part in the step, and the sum of the groups' learning rates, and writes the next
    numbers.

    Returns the scale, the share, what a stored displacement is multiplied with to be added to the
    parameters, and whether it is kept.
    """
    given: dict[str, Any] = {name: code.given(name) for name in GIVEN}
    had: dict[str, Any] = {name: code.load(name) for name in code.rows}
    kind = tuner.state_type(options)
    state = kind(*(had[name] for name in kind._fields))
    measured = {name: given[name] for name in STEP_SUMS}
    sums = tuner.Sums(**measured, x1=had["reference_square"], d=had["size"])
    share, takes_part = given["share"], given["takes_part"]
    state, next_share, kept = advance(options, state, share, sums, takes_part, frozen=frozen)
    scale: Any = code.where(takes_part, tuner.scale_of(state), had["scale"])
    signal = code.where(takes_part, sums.dg, had["signal"])
    pull = scale * next_share - had["scale"] * share
    kept = code.where(takes_part, kept, 1.0)
    lr = code.where(takes_part, given["lr"], 0.0)
    results = scale, next_share, pull * kept, kept
    stored = {
        **state._asdict(),
        "scale": scale,
        "share": next_share,
        "signal": signal,
        "typed_total": had["typed_total"] + lr,
        "applied_total": had["applied_total"] + scale * lr,
    }
    code.begin_to_store()
    for name, value in stored.items():
        code.store(name, value)
    return results
