"""Bases that keep iterates of their own, such as Schedule-Free's.

Schedule-Free averages: beside the parameters it keeps a second point, z, steps the parameters
towards it, and moves them along the line between the two in `train()` and `eval()`. Both points
must belong to one trajectory, so such a base is shown its own, x_ref + Δ, in place of the
parameters at x_ref + S·Δ. What it does to that point, in a step or in a change of mode, is its
proposal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import vectors
from mechanic.torch.commit import Values, commit
from mechanic.torch.copies import record_copies
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.rates import rate_of
from mechanic.torch.scalars import Numbers
from mechanic.torch.twin import Twin
from mechanic.torch.vectors import DISPLACEMENT, Batch, Coefficients

MODES = ("train", "eval")


def has_modes(base: type[Optimizer]) -> bool:
    """Whether a base has modes to be put into, and so iterates of its own."""
    return all(callable(getattr(base, mode, None)) for mode in MODES)


def show_own_point(
    numbers: Numbers, batches: list[Batch], points: list[list[Tensor]]
) -> list[list[Tensor]]:
    """Move points from where the parameters are to where the base believes them to be; returns
    copies of those points."""
    by = (1 - numbers.scale) * numbers.share
    with torch.no_grad():
        for batch, own in zip(batches, points, strict=True):
            vectors.shift(batch, own, by.to(batch.device, batch.dtype))
        return [[point.clone() for point in own] for own in points]


def follow_reference(
    optimizer: Optimizer, numbers: Numbers, batches: list[Batch], kept: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """What is written where the displacements are forgotten, for `commit`: x_ref has become x, and
    the base's second point moves as far. Asked for before the displacements are written."""
    by = (numbers.scale - 1) * numbers.share * (1 - kept)
    rows = [
        (optimizer.state[owner]["z"], stored)
        for batch in batches
        for owner, stored in zip(batch.owners, batch.stored, strict=True)
        if "z" in optimizer.state.get(owner, {})
    ]
    return [z for z, _ in rows], [z + stored.to(z) * by.to(z) for z, stored in rows]


def hand_over(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Bring the base's own point to the scale of the parameters, to go on without a tuner."""
    numbers = mechanism.scalars.read()
    scale = numbers.scale
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        state = optimizer.state.get(param, {})
        if DISPLACEMENT in state and "z" in state:
            delta = state[DISPLACEMENT] * numbers.share.to(state[DISPLACEMENT])
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
        points, stand_ins, _ = record_copies(batches)
        numbers = mechanism.scalars.read()
        origin = show_own_point(numbers, batches, points)
        rates = [rate_of(group, proportional=False) for group in optimizer.param_groups]
        own = Twin(optimizer, stand_ins)
        own.prepare(optimizer, rates)
        result = base_mode(own.optimizer)
        by = Coefficients(torch.zeros_like(numbers.scale), numbers.scale, 1 / numbers.share)
        writes = [
            write
            for batch, after, before in zip(batches, points, origin, strict=True)
            for write in vectors.moves(
                batch, after, before, by.like(batch), mechanism.counts.read().steps
            )
        ]

        def change_groups() -> Values:
            own.take_over(optimizer)
            return [], []

        commit([*writes, change_groups])
    return result
