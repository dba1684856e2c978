"""What runs are compared by: every bit of a value, what a tuner knows, where two runs ended."""

from typing import Any

import torch
from bases import Problem, assert_moved
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic.torch import tuner

# Where a CPU lacks its bfloat16 product, as Muon finds out, torch changes over to another library
# for all products from then on, and two equal runs are no longer equal bit for bit.
torch.backends.mkldnn.set_flags(False)

PATIENCE = 10  # so many skips in a row are worth a warning


def bits(value: Any) -> Any:
    """A value as plain objects that compare equal only if they are the same bit for bit, the sign
    of a zero included."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # torchao's quantized state
            names, _ = value.__tensor_flatten__()
            return (type(value).__name__, {name: bits(getattr(value, name)) for name in names})
        if value.is_sparse:
            return ("sparse", bits(value._indices()), bits(value._values()))
        data = value.detach().cpu().contiguous().reshape(-1)
        content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return (str(value.dtype), tuple(value.shape), content)
    if isinstance(value, dict):
        return {key: bits(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(own) for own in value]
    return value.hex() if isinstance(value, float) else value


def differences(a: Any, b: Any, *path: Any) -> list[tuple[Any, ...]]:
    """The paths at which two results of `bits` differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], *path, key)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, *path, i)]
    return [] if a == b else [path]


def assert_same(a: Any, b: Any) -> None:
    """Two results of `bits` are equal; what is not is named, and not shown at full length."""
    found = differences(a, b)
    assert not found


def skipped(opt: Optimizer) -> int:
    return int(tuner(opt).metrics()["skipped"])


def poison(param: nn.Parameter, value: float, at: int = -1) -> None:
    """Put a value into one element of a gradient."""
    grad = param.grad
    (grad._values() if grad.is_sparse else grad).view(-1)[at] = value


def bad_step(opt: Optimizer, problem: Problem, value: float, which: int = -1) -> Any:
    """One step whose gradient holds `value` in one element of one tensor."""

    def closure() -> Tensor:
        loss = problem.backward(1)
        poison(problem.params[which], value)
        return loss

    if problem.closure_only:
        return opt.step(closure)
    closure()
    return opt.step()


def tuner_of(opt: Optimizer) -> list[Tensor]:
    """Everything that a tuner knows."""
    numbers = opt._mechanic.scalars.read()
    return [t.clone() for t in (*numbers.state, numbers.scale)]


def displacements(opt: Optimizer) -> list[Tensor]:
    """Δ, which is stored in a unit of its own."""
    states = [opt.state.get(p, {}) for group in opt.param_groups for p in group["params"]]
    stored = [s["mechanic_displacement"] for s in states if "mechanic_displacement" in s]
    share = opt._mechanic.scalars.read().share
    return [share.to(s.dtype) * s for s in stored]


def assert_same_run(one: Optimizer, two: Optimizer, rtol: float = 1e-6) -> None:
    """Two runs in float64 came to the same point and the same scale, to rounding."""
    assert_moved(one)
    torch.testing.assert_close(tuner(one).scale, tuner(two).scale, rtol=rtol, atol=0)
    for group, other in zip(one.param_groups, two.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


def two_groups(problem: Problem, first: Any = 1.0, second: Any = 1.0) -> list[dict[str, Any]]:
    """The first half of the parameters and the rest, each with its lr."""
    params = problem.params
    half = len(params) // 2
    return [{"params": params[:half], "lr": first}, {"params": params[half:], "lr": second}]


DISPLACEMENT = "mechanic_displacement"
DISPLACEMENT = "mechanic_displacement"
