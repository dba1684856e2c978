"""The compiled code, where there is a compiler to make it."""

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from mechanic.options import Options
from mechanic.torch.native import build
from mechanic.torch.native.rule import write_rule

_FAST = ("-O3", "-fno-math-errno")  # not -ffast-math: a NaN must be seen
# Every operation of the rule is rounded as Python rounds it.
_EXACT = ("-O1", "-ffp-contract=off")


class Passes(NamedTuple):
    """The functions of `step.c` and of a rule."""

    step: Any
    """Makes a step"""
    rule: int
    """The address of the rule, which `step` is given"""


@functools.cache
def find_passes(options: Options, *, frozen: bool) -> Passes | None:
    """The compiled code for a rule; None where it cannot be had."""
    if build.find_compiler() is None:
        return None
    try:
        rule = build.load(write_rule(options, frozen=frozen), [_EXACT]).rule
        address = ctypes.cast(rule, ctypes.c_void_p).value
        assert address is not None
        return Passes(_load_step(), address)
    except Exception as error:  # whatever it is, the plain path is there
        warnings.warn(
            f"mechanic: C code cannot be compiled and loaded here ({error!r}), so that steps on "
            "the CPU take the slower path of torch's own operators. MECHANIC_NATIVE=0 in the "
            "environment chooses that path without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def read_source() -> str:
    """The passes and the step that is made of them."""
    files = [Path(__file__).with_name(name) for name in ("passes.c", "step.c")]
    return "\n".join(file.read_text("utf-8") for file in files)


@functools.cache
def _load_step() -> Any:
    for_any = [_FAST]
    for_this = [(*_FAST, "-march=native"), (*_FAST, "-mcpu=native")]
    step = build.load(
        read_source(), [*(for_this if build.is_processor_known() else []), *for_any]
    ).step
    step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    step.restype = ctypes.c_int64
    return step
