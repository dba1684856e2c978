"""The sums that a step measures, one for each array of the parameters at first: an array that has
not moved, and does not, has no part in ‖g‖².

Where parameters are sharded, every sum needs the other devices. All sums of a pass come out of one
step of the compiler, which makes one small all-reduce of them.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from mechanic import tuner
from mechanic.arrays import Array
from mechanic.optax import vectors
from mechanic.optax.leaves import Leaves
from mechanic.optax.products import Pairs, inner_products
from mechanic.optax.state import Numbers
from mechanic.options import Options


class Parts(NamedTuple):
    """The sums that need not wait for the base."""

    dg: Array
    """⟨Δ, g⟩"""
    gg: Array
    """‖g‖², one for each array that takes part"""
    dd: Array
    """‖Δ‖², of the same arrays"""
    idle: Array
    """‖Δ‖² of the arrays that have no gradient"""
    dx: Array
    xx: Array


class Late(NamedTuple):
    """The sums that are taken in the first steps, when the learning rate rises, and when an array
    may move that has not."""

    uu: Array
    """‖u‖², one for each array that takes part"""
    xx: Array
    """‖x‖² without absurd elements, of the same arrays"""


def measure(options: Options, leaves: Leaves, numbers: Numbers) -> Parts:
    """Take the sums of a step."""
    zero, share, dtype = jnp.zeros_like(numbers.share), numbers.share, numbers.share.dtype
    rule = tuner.RULES[options.preset]
    squares = takes_cosine = rule.takes_cosine or options.s_init == "relative"
    squares = squares or tuner.reads_x(options) or options.max_grad_norm < math.inf
    names = ["dg", *["gg"] * squares, *["dd"] * takes_cosine]
    rows: list[Pairs] = []
    for grad, _, stored in leaves.live:
        own = {"dg": (stored, grad), "gg": (grad, grad), "dd": (stored, stored)}
        rows.append([own[name] for name in names])
    columns = dict(zip(names, inner_products(rows, dtype).T, strict=False))
    zeros = jnp.zeros((len(rows),), dtype)
    idle = [
        vectors.square(stored, dtype)
        for grad, stored in zip(leaves.grads, leaves.stored, strict=True)
        if grad is None and takes_cosine and vectors.is_inexact(stored)
    ]
    dx = xx = zero
    if tuner.reads_x(options) and not rule.decays_after_base:
        dx, xx = decay_sums(leaves, [param for _, param, _ in leaves.live], numbers)
    return Parts(
        dg=jnp.sum(columns.get("dg", zeros)) * share,
        gg=columns.get("gg", zeros),
        dd=columns.get("dd", zeros) * share**2,
        idle=total(idle, zero) * share**2,
        dx=dx,
        xx=xx,
    )


def decay_sums(leaves: Leaves, points: list[Array], numbers: Numbers) -> tuple[Array, Array]:
    """⟨Δ, x⟩ and ‖x‖², where x are points, one for each array that takes part."""
    zero, dtype = jnp.zeros_like(numbers.share), numbers.share.dtype
    pairs = zip(leaves.live, points, strict=True)
    dx = total([vectors.inner(stored, point, dtype) for (_, _, stored), point in pairs], zero)
    xx = total([vectors.square(point, dtype) for point in points], zero)
    return dx * numbers.share, xx


def measure_late(leaves: Leaves, updates: list[Array], numbers: Numbers) -> Late:
    """Take the sums that need the update of the base."""
    zero, dtype = jnp.zeros_like(numbers.share), numbers.share.dtype
    uu = [vectors.square(update, dtype) for update in updates]
    xx = [vectors.robust_square(param, numbers.absurd) for _, param, _ in leaves.live]
    return Late(_stacked(uu, zero), _stacked(xx, zero))


def total(terms: list[Array], zero: Array) -> Array:
    """The sum of scalars."""
    return jnp.sum(jnp.stack(terms)) if terms else zero


def _stacked(terms: list[Array], zero: Array) -> Array:
    return jnp.stack(terms) if terms else zero[None][:0]
