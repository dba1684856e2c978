"""Steps that are skipped, by the host or by the base itself, and what a CUDA graph makes of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.mechanism import DISPLACEMENT, Mechanism, is_capturing
from mechanic.torch.vectors import Batch


def decide(finite: Tensor) -> bool:
    """Bring a decision to the host, which waits for it."""
    refuse_to_decide(finite)
    return bool(finite)


def refuse_to_decide(finite: Tensor) -> None:
    """Refuse a decision by the host in a CUDA graph, whose replays it does not see."""
    if is_capturing(finite.device):
        raise RuntimeError(
            "this step cannot be captured in a CUDA graph: whether to skip it, the host has to "
            "decide. Use an optimizer with fused=True, or else mechanize(optimizer, "
            "skip_nonfinite=False)."
        )


def refuse_capture(optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch]) -> None:
    """Refuse to capture what a replay would not repeat."""
    owners = [owner for batch in batches for owner in batch.owners]
    if mechanism.scale.device.type != "cuda" or any(
        DISPLACEMENT not in optimizer.state.get(owner, {}) for owner in owners
    ):
        raise RuntimeError(
            "the first step of a mechanized optimizer cannot be captured in a CUDA graph: it makes "
            "the optimizer's state. Make a few steps first, at best ten, as torch advises for any "
            "capture."
        )


def skips_by_itself(optimizer: Optimizer, base_step: Callable[..., Any]) -> bool:
    """Whether the base leaves everything as it is where `found_inf` is set, as torch's fused do.

    Not SGD's with dampening at its first step, which is not dampened: once skipped, it is over.
    """
    if not base_step.__module__.startswith("torch.optim."):
        return False
    return all(
        group.get("fused") and (not group.get("dampening") or all(map(optimizer.state.get, own)))
        for group in optimizer.param_groups
        if (own := [param for param in group["params"] if param.grad is not None])
    )


@contextmanager
def skipping(optimizer: Optimizer, batches: list[Batch], finite: Tensor) -> Iterator[None]:
    """Let a fused base skip its step by itself where the gradients are not finite."""
    owners = [owner for batch in batches for owner in batch.owners]
    new = [owner for owner in owners if not optimizer.state.get(owner)]
    had = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if had is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = had  # type: ignore[attr-defined]
    for owner in new:  # SGD's momentum is uninitialised memory when its first step is skipped
        for value in optimizer.state.get(owner, {}).values():
            if isinstance(value, Tensor):
                value.masked_fill_(~finite.to(value.device), 0)


@contextmanager
def selecting(
    optimizer: Optimizer, batches: list[Batch], before: list[list[Tensor]], finite: Tensor
) -> Iterator[None]:
    """Run the base in any case, and undo it on the device where the gradients are not finite. The
    copies that this takes are worth it in a compiled step, which has no other way."""
    owners = [owner for batch in batches for owner in batch.owners]
    had = [
        {name: v.clone() for name, v in optimizer.state.get(o, {}).items() if isinstance(v, Tensor)}
        for o in owners
    ]
    yield
    with torch.no_grad():
        for batch, points in zip(batches, before, strict=True):
            for param, point in zip(batch.params, points, strict=True):
                param.copy_(torch.where(finite.to(param.device), param, point))
        for owner, old in zip(owners, had, strict=True):
            for name, value in optimizer.state.get(owner, {}).items():
                if isinstance(value, Tensor):
                    kept = old[name] if name in old else torch.zeros_like(value)
                    value.copy_(torch.where(finite.to(value.device), value, kept))
