"""The plain path and the compiled step side by side, on the same gradients.

    pair = Pair(lambda params: torch.optim.AdamW(params, lr=1.0))
    pair.run()
    pair.assert_same()

Whether the compiled step was made is counted: what it leaves to the plain path would be equal, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lockstep import Lock, Make
from torch import Tensor

from mechanic.torch.native import build
from mechanic.torch.native import step as native

FIRST = 1  # so many first steps are the plain path's
STEPS = 60

# One of several chunks, one that ends in the middle of a vector, a number, and nothing.
SHAPES = [(200, 170), (7,), (3, 5), (), (0, 4)]

on_native = [
    pytest.mark.usefixtures("own_native_cache", "one_thread"),
    pytest.mark.skipif(build.find_compiler() is None, reason="there is no C compiler"),
]


@contextmanager
def native_steps(used: bool = True) -> Iterator[list[bool]]:
    """Let the dispatcher make compiled steps here, or not; gives those that were made."""
    made: list[bool] = []
    make, before = native._make, native.IS_ON

    def counted(*args: Any) -> Any:
        done = make(*args)
        if done is not None:
            made.append(True)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_make", counted)
        patch.setattr(native, "IS_ON", used)
        yield made
    assert before == native.IS_ON


class Pair(Lock):
    """Two optimizers that `make` makes, over equal parameters; see the top of this file."""

    def __init__(
        self,
        make: Make,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        params: list[Tensor] | None = None,
        **options: Any,
    ) -> None:
        draw = torch.Generator().manual_seed(3)
        params = params or [torch.randn(shape, generator=draw) for shape in shapes]
        super().__init__(make, params=params, **options)
        self.made = 0
        """The number of compiled steps"""

    def step(self, gradients: Sequence[Tensor | None] | None = None, *, used: bool = True) -> None:
        self.give(self.gradients() if gradients is None else gradients)
        with native_steps(False):
            self.plain.optimizer.step()
        with native_steps(used) as made:
            self.fast.optimizer.step()
        self.made += len(made)
        self.first_scale = self.first_scale or float(self.plain.mechanism.scale)

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()

    def groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The groups of both, in pairs."""
        yield from zip(*(side.optimizer.param_groups for side in self.sides), strict=True)
