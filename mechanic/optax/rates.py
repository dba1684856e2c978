"""The learning rate that was typed, as far as it is known.

A transformation does not tell its learning rate. `optax.inject_hyperparams` does, and so may the
user.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mechanic.advance import FIRST_STEPS, RISE
from mechanic.arrays import Array
from mechanic.optax.state import MechanicState, Rates

LEARNING_RATE = "learning_rate"


def find_rate(learning_rate: Any, base: Any, step: Array) -> Any:
    """The learning rate of a step, given or found in the state of the base; None if unknown."""
    if learning_rate is not None:
        return learning_rate(step) if callable(learning_rate) else learning_rate
    found = injected_rates(base)
    return found[0] if len(found) == 1 else None


def injected_rates(state: Any) -> list[Any]:
    """The learning rates that `optax.inject_hyperparams` keeps in a state."""

    def is_injected(node: Any) -> bool:
        names = getattr(node, "_fields", ())
        return "hyperparams" in names and isinstance(node.hyperparams, dict)

    found: list[Any] = []

    def look(tree: Any) -> None:
        for node in jax.tree.leaves(tree, is_leaf=is_injected):
            if is_injected(node):
                found.extend(
                    [node.hyperparams[LEARNING_RATE]] * (LEARNING_RATE in node.hyperparams)
                )
                look([getattr(node, name) for name in node._fields if name != "hyperparams"])

    look(state)
    return found


def next_rates(learning_rate: Any, base: Any, state: MechanicState) -> Rates | None:
    """The rates after a step, where `base` is the state of the base after it. The norm of the
    update is measured in the first steps, and in this one if `measured` has changed."""
    had = state.rates
    if had is None:
        return None
    rate = find_rate(learning_rate, base, state.counts.steps)
    typed = jnp.asarray(rate, had.typed.dtype).reshape(had.typed.shape)
    typed = jax.lax.stop_gradient(typed)
    last = jnp.where(typed == 0, had.last, typed)
    is_measured = (state.counts.updates < FIRST_STEPS) | (last > RISE * had.measured)
    return Rates(typed, last, jnp.where(is_measured, last, had.measured))
