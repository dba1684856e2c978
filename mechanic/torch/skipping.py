"""Steps that are skipped because of NaN or inf: by the host, by the base itself, or undone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.options import Options
from mechanic.torch.call import Call
from mechanic.torch.capture import refuse_to_decide
from mechanic.torch.flag import YES, Flag
from mechanic.torch.vectors import Batch


def is_finite(options: Options, dg: Tensor, found_inf: Tensor | None) -> Flag:
    """Whether all gradients are finite: a NaN or inf in one of them is one in ⟨Δ, g⟩, even at
    Δ = 0. `found_inf` is GradScaler's word for it, where there is one."""
    finite = Flag(torch.isfinite(dg)) if options.skip_nonfinite else YES
    if found_inf is not None:
        finite = finite & Flag(found_inf.to(dg.device).reshape(()) == 0)
    return finite


def decide(finite: Flag) -> Flag:
    """Bring a decision to the host, which waits for it. A meta tensor has nothing to tell, and the
    step is made."""
    if finite.device is None:
        return finite
    if finite.device.type == "meta":
        return YES
    refuse_to_decide(finite.device)
    return finite.wait()


def skips_by_itself(call: Call) -> bool:
    """Whether the base leaves everything as it is where `found_inf` is set, as torch's fused do.

    SGD with dampening does not do so at its first step, which is not dampened: once skipped, the
    first step is over.
    """
    if not call.is_of_torch:
        return False
    state = call.optimizer.state
    return all(
        group.get("fused") and (not group.get("dampening") or all(map(state.get, own)))
        for group in call.optimizer.param_groups
        if (own := [param for param in group["params"] if param.grad is not None])
    )


@contextmanager
def by_base(optimizer: Any, params: Iterable[Tensor], finite: Flag) -> Iterator[None]:
    """Let a fused base skip the step of some parameters by itself where the gradients are not
    finite. Where the host knows that they are, nothing has to be done."""
    if finite.is_known:
        yield
        return
    new = [param for param in params if not optimizer.state.get(param)]
    had = getattr(optimizer, "found_inf", None)
    found: Tensor = finite.opposite().value  # type: ignore[assignment]
    optimizer.found_inf = found.to(torch.float32)
    try:
        yield
    finally:
        if had is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = had
    for param in new:  # SGD's momentum is uninitialised memory when its first step is skipped
        for value in optimizer.state.get(param, {}).values():
            if isinstance(value, Tensor):
                value.masked_fill_(found.to(value.device), 0)


@contextmanager
def undoing(
    optimizer: Optimizer, batches: list[Batch], before: list[list[Tensor]], finite: Flag
) -> Iterator[None]:
    """Run the base in any case, and undo it on the device where the gradients are not finite. The
    copies that this takes are worth it in a compiled step, which has no other way."""
    if finite.is_known:
        yield
        return
    owners = [owner for batch in batches for owner in batch.owners]
    had = [
        {name: v.clone() for name, v in optimizer.state.get(o, {}).items() if isinstance(v, Tensor)}
        for o in owners
    ]
    yield
    with torch.no_grad():
        for batch, points in zip(batches, before, strict=True):
            for param, point in zip(batch.params, points, strict=True):
                param.copy_(finite.choose(param, point))
        for owner, old in zip(owners, had, strict=True):
            for name, value in optimizer.state.get(owner, {}).items():
                if isinstance(value, Tensor):
                    kept = old[name] if name in old else torch.zeros_like(value)
                    value.copy_(finite.choose(value, kept))
