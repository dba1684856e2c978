"""A step of the tuner as torch and optax both make it, and when they measure for it.

What is stored of Δ is Δ up to one factor, the share. Like the rules, `advance` is written for the
arrays of any library.
"""

from typing import NamedTuple

from mechanic import tuner
from mechanic.arrays import Array, namespace
from mechanic.options import Options

FIRST_STEPS = 10
"""The norm of the update itself is measured in so many first steps. A base is then least likely to
do what it did the step before: there is a warm-up from 0, or a first batch without a gradient."""

RISE = 1.1
"""A learning rate may rise by this factor before the update is measured again."""

ABSURD = 1e3
"""An element of the parameters so many times above the typical one has no part in ‖x_1‖."""

SAMPLE = 1 << 12
"""The elements by which the typical size of an array is told."""

FAR = 2.0
"""Edits of the parameters so many times as long as S·Δ take no step back, and are not followed."""


class Advanced(NamedTuple):
    """What a step of the tuner comes to."""

    state: tuner.State
    share: Array
    """The share of the stored displacements that Δ is then"""
    kept: Array
    """1, or 0 where the stored displacements are forgotten and the parameters stay"""


def advance(
    options: Options,
    state: tuner.State,
    share: Array,
    sums: tuner.Sums,
    takes_part: Array | bool,
    *,
    frozen: bool = False,
) -> Advanced:
    """The tuner's step."""
    xp = namespace(share)
    if frozen:
        return Advanced(_chosen(takes_part, state._replace(D=xp.sqrt(sums.dd)), state), share, 1.0)
    after, retained = tuner.update(options, state, sums)
    if takes_part is not True:
        retained = xp.where(takes_part, retained, 1.0)
    next_share = xp.where(retained > 0, retained * share, share)
    kept = xp.where(retained > 0, 1.0, 0.0)
    return Advanced(_chosen(takes_part, after, state), next_share, kept)


def _chosen(takes_part: Array | bool, after: tuner.State, before: tuner.State) -> tuner.State:
    if takes_part is True:
        return after
    xp, pairs = namespace(after.U), zip(after, before, strict=True)
    return type(after)(*(xp.where(takes_part, new, old) for new, old in pairs))
