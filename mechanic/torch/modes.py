"""Bases that keep iterates of their own, such as Schedule-Free's.

Schedule-Free averages: beside the parameters it keeps a second point, z, steps the parameters
towards it, and moves them along the line between in `train()` and `eval()`. Both must belong to one
trajectory, so such a base is shown its own, x_ref + Δ, in place of the parameters at x_ref + S·Δ.
What it does to that point, in a step or in a change of mode, is its proposal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import vectors
from mechanic.torch.mechanism import DISPLACEMENT, Mechanism
from mechanic.torch.vectors import Batch, Coefficients

MODES = ("train", "eval")


def has_modes(base: type[Optimizer]) -> bool:
    """Whether a base has modes to be put into, and so iterates of its own."""
    return all(callable(getattr(base, mode, None)) for mode in MODES)


@contextmanager
def own_view(
    mechanism: Mechanism, batches: list[Batch], before: list[list[Tensor]]
) -> Iterator[list[list[Tensor]]]:
    """Put the parameters where the base believes them; gives those points. If the base fails, the
    parameters are put back to where they were `before`."""
    shift = (1 - mechanism.scale) * mechanism.share
    with torch.no_grad():
        for batch in batches:
            vectors.shift(batch, shift.to(batch.device, batch.dtype))
        origin = [[param.clone() for param in batch.params] for batch in batches]
    try:
        yield origin
    except BaseException:
        vectors.put_back(batches, before)
        raise


def hand_over(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Bring the base's own point to the scale of the parameters, to go on without a tuner."""
    scale = mechanism.scale
    for param, state in optimizer.state.items():
        if DISPLACEMENT in state and "z" in state:
            delta = state[DISPLACEMENT] * mechanism.share.to(state[DISPLACEMENT])
            reference = param - delta * scale.to(delta)
            state["z"].sub_(reference).mul_(scale.to(delta)).add_(reference)
    for group in optimizer.param_groups:  # the averaging weights are powers of the largest lr
        if "lr_max" in group and "weight_sum" in group:
            group["lr_max"] *= float(scale)
            group["weight_sum"] *= float(scale) ** group.get("weight_lr_power", 2.0)


def change_mode(
    optimizer: Optimizer, mechanism: Mechanism, base_mode: Callable[[Optimizer], Any]
) -> Any:
    """The base's `train()` or `eval()`, at the scale of the parameters."""
    with torch.no_grad():
        batches = vectors.batches(
            (index, param, None, optimizer.state[param][DISPLACEMENT])
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if DISPLACEMENT in optimizer.state.get(param, {})
        )
        before = [[param.clone() for param in batch.params] for batch in batches]
        with own_view(mechanism, batches, before) as origin:
            result = base_mode(optimizer)
        still = Coefficients(
            torch.zeros_like(mechanism.scale), mechanism.scale, 1 / mechanism.share
        )
        for batch, points, base_points in zip(batches, before, origin, strict=True):
            vectors.propose(batch, base_points)
            vectors.apply(batch, points, base_points, still.like(batch), mechanism.steps)
    return result
