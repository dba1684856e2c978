"""Bases that keep iterates of their own: Schedule-Free's.

Beside the parameters it keeps a second point, z, and moves the parameters towards it. Both points
must belong to one trajectory, so such a base is shown its own, x_ref + Δ, in place of the
parameters at x_ref + S·Δ. What it does to that point is its proposal.
"""

from typing import Any

import jax
from optax.contrib import ScheduleFreeState

from mechanic.arrays import Array
from mechanic.optax import vectors
from mechanic.optax.state import MechanicState


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState)


def averages(base: Any) -> list[ScheduleFreeState]:
    """The states of Schedule-Free within the state of a base."""
    nodes = jax.tree.leaves(base, is_leaf=_is_schedule_free)
    return [node for node in nodes if _is_schedule_free(node)]


def shown(state: MechanicState, params: Any) -> Any:
    """The point at which the base believes the parameters to be."""
    if not averages(state.base):
        return params
    numbers = state.numbers
    return _shifted(params, state.displacement, (1 - numbers.scale) * numbers.share)


def follow_reference(base: Any, state: MechanicState, kept: Array) -> Any:
    """Where the displacement is forgotten, x_ref has become x, and the second point of the base
    moves as far."""
    numbers = state.numbers
    by = (numbers.scale - 1) * numbers.share * (1 - kept)

    def move(node: Any) -> Any:
        if not _is_schedule_free(node):
            return node
        return node._replace(z=_shifted(node.z, state.displacement, by))

    return jax.tree.map(move, base, is_leaf=_is_schedule_free)


def _shifted(points: Any, displacement: Any, by: Array) -> Any:
    def move(point: Any, stored: Any) -> Any:
        if not vectors.is_inexact(point):
            return point
        wide = vectors.working_dtype(point.dtype)
        return (point + by.astype(wide) * stored.astype(wide)).astype(point.dtype)

    return jax.tree.map(move, points, displacement)
