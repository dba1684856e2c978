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
    """The point at which the base believes the parameters to be: those that have an average."""
    numbers = state.numbers
    by = (1 - numbers.scale) * numbers.share
    for node in averages(state.base):
        params = jax.tree.map(
            lambda z, point, stored: point if vectors.is_masked(z) else _moved(point, stored, by),
            *(node.z, params, state.displacement),
            is_leaf=vectors.is_masked,
        )
    return params


def follow_reference(base: Any, state: MechanicState, kept: Array) -> Any:
    """Where the displacement is forgotten, x_ref has become x, and the second point of the base
    moves as far."""
    numbers = state.numbers
    by = (numbers.scale - 1) * numbers.share * (1 - kept)

    def move(node: Any) -> Any:
        if not _is_schedule_free(node):
            return node
        z = jax.tree.map(
            lambda point, stored: _moved(point, stored, by),
            *(node.z, state.displacement),
            is_leaf=vectors.is_masked,
        )
        return node._replace(z=z)

    return jax.tree.map(move, base, is_leaf=_is_schedule_free)


def _moved(point: Any, stored: Any, by: Array) -> Any:
    if not vectors.is_inexact(point):
        return point
    wide = vectors.working_dtype(point.dtype)
    return (point + by.astype(wide) * stored.astype(wide)).astype(point.dtype)
