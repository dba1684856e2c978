"""One mechanized step: gradients → sums → tuner → scale → parameters.

This is the dispatcher. `plain.py` has the step with torch's operators, `kernels/step.py` the same
step on a GPU in a few launches, and `native/step.py` on a CPU in one call of compiled code; all
keep the same state and come to the same result, so that they may take turns. `scoped.py` makes such
a step for each part of an optimizer that has several scales.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mechanic.torch import closures, edits, plain, scoped
from mechanic.torch.call import Call
from mechanic.torch.kernels import step as fast
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.native import step as native
from mechanic.torch.scopes import Scopes


def step(
    optimizer: Optimizer,
    mechanism: Mechanism | Scopes,
    base_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the base's step, and put the parameters where the tuner says.

    Parameters without a gradient stay where they are, and so do those of a group whose lr is 0.
    """
    if isinstance(mechanism, Scopes):
        parts = mechanism.parts(optimizer)
        call = Call(optimizer, parts[0].mechanism, base_step, args, kwargs)
        return scoped.step(closures.evaluate(call), mechanism, parts, _step)
    return _step(closures.evaluate(Call(optimizer, mechanism, base_step, args, kwargs)))


def _step(call: Call) -> Any:
    edits.follow(call)
    result = _make(call)
    edits.note(call)
    return result


def _make(call: Call) -> Any:
    begun = fast.begin(call)
    if begun is not None:
        return fast.finish(call, begun)
    made = native.step(call)
    return plain.step(call) if made is None else made.result
