"""Parameters that someone else changes after every update: a projection, or a transformation that
comes after `mechanize` and holds some of them.

Δ would hold what such an edit takes back, and the scale would grow along a direction in which the
parameters do not move. With a copy of where they should be, Δ follows the edits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mechanic.advance import FAR
from mechanic.arrays import Array
from mechanic.optax import vectors
from mechanic.optax.state import is_own


class Followed(NamedTuple):
    """The state of a mechanized transformation whose displacements follow edits."""

    tuned: Any
    """The state of `mechanize` without them"""
    copies: Any
    """Where the parameters are if only the last update was applied"""


def following(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """A mechanized transformation whose displacements follow edits of the parameters."""

    def init(params: Any) -> Followed:
        return Followed(tx.init(params), jax.tree.map(_copy, params))

    def update(
        grads: Any, state: Followed, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Followed]:
        if params is None:
            raise ValueError(vectors.NO_PARAMS)
        tuned = _follow(state, params)
        updates, tuned = tx.update(grads, tuned, params, **extra_args)
        return updates, Followed(tuned, optax.apply_updates(params, updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _copy(param: Any) -> Any:
    return jnp.copy(param) if vectors.is_number(param) else param


def _follow(state: Followed, params: Any) -> Any:
    """The state of a tuner whose displacements know of the edits since its last update."""

    def of_one(node: Any) -> Any:
        if not is_own(node):
            return node
        numbers = node.numbers
        length = numbers.scale * numbers.share

        def follow(stored: Any, param: Any, copy: Any) -> Any:
            if vectors.is_masked(stored) or not vectors.is_inexact(param):
                return stored
            return _followed(stored, param, copy, length)

        own = jax.tree.map(
            follow, node.displacement, params, state.copies, is_leaf=vectors.is_masked
        )
        return node._replace(displacement=own)

    return jax.tree.map(of_one, state.tuned, is_leaf=is_own)


def _followed(stored: Array, param: Array, copy: Array, length: Array) -> Array:
    wide = vectors.working_dtype(param.dtype)
    edit = jnp.nan_to_num(param.astype(wide) - copy.astype(wide), posinf=0.0, neginf=0.0)
    change = edit * jnp.where(length > 0, 1 / length, 0.0).astype(edit.real.dtype)
    had = stored.astype(wide)
    is_far = jnp.linalg.norm(change) > FAR * jnp.linalg.norm(had)
    return (had + jnp.where(is_far, 0.0, change)).astype(stored.dtype)


def unknown(copies: Any) -> Any:
    """Copies of parameters of which it is not known where they were."""
    return jax.tree.map(
        lambda own: jnp.full_like(own, jnp.nan) if vectors.is_inexact(own) else own, copies
    )
