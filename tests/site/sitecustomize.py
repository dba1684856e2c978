"""On the path of the processes that the tests start, which then start in half the time.

Whoever makes an optimizer, steps, or joins a process group has torch import its compiler, for
seconds, to tell it to keep out of a few functions. Here that waits until somebody asks the compiler
for anything else.
"""

import importlib
import sys
import types
from typing import Any


class _Later(types.ModuleType):
    """Stands for a module until more is asked of it than it is given here."""

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name)
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is _compiler:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(self.__name__), name)


COMPILER = "torch._dynamo"
_compiler = _Later(
    COMPILER,
    disable=lambda function, *_, **__: function,
    graph_break=lambda *_, **__: None,
    trace_rules=_Later(f"{COMPILER}.trace_rules", clear_lru_cache=lambda: None),
    utils=_Later(f"{COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)
sys.modules[COMPILER] = _compiler
