"""Looking into the state of a mechanized transformation, wherever it stands in a larger one."""

from typing import Any

import jax
import jax.numpy as jnp

from mechanic.arrays import Array
from mechanic.optax import own_point, vectors
from mechanic.optax.rates import injected_rates
from mechanic.optax.state import MechanicState


def scale(state: Any) -> Array:
    """The learned scale S: what the updates of the base are multiplied with.

    Args:
        state: the state of `mechanize`, or anything that holds it: the state of a chain, a wrapper
            or a training state.

    Raises:
        ValueError: if there is none in it, or more than one.
    """
    return jnp.asarray(find(state).numbers.scale)


def effective_learning_rate(state: Any, learning_rate: Any = None) -> Array:
    """The learning rate in force: the scale times the rate that was typed.

    Args:
        state: as in `scale`.
        learning_rate: the rate that was typed. It may be left out where `mechanize` was told of it,
            and under `optax.inject_hyperparams`.

    Raises:
        ValueError: if the rate that was typed is not known.
    """
    found = find(state)
    if learning_rate is None and found.rates is not None:
        learning_rate = found.rates.typed
    elif learning_rate is None:
        injected = injected_rates(state)
        learning_rate = injected[0] if len(injected) == 1 else None
    if learning_rate is None:
        raise ValueError(
            "the learning rate that was typed is not in the state: a transformation does not tell "
            "it. Call effective_learning_rate(state, learning_rate=...) with that of this step, or "
            "mechanize(tx, learning_rate=...) with the number or schedule that tx was made with."
        )
    return jnp.asarray(found.numbers.scale) * jnp.asarray(learning_rate)


def metrics(state: Any) -> dict[str, Array]:
    """Everything worth logging, as arrays on the device: nothing waits until one is read.

    `signal` is ⟨Δ, g⟩, negative while a larger scale would have been better. `effective_lr` is
    there if the learning rate that was typed is known.
    """
    found = find(state)
    own = {
        "scale": found.numbers.scale,
        "signal": found.numbers.signal,
        "steps": found.counts.steps,
        "skipped": found.counts.skipped,
    }
    if found.rates is not None:
        own["effective_lr"] = effective_learning_rate(state)
    return {name: jnp.asarray(value) for name, value in own.items()}


def eval_params(state: Any, params: Any) -> Any:
    """The parameters to evaluate, where the base is `optax.contrib.schedule_free`: the average that
    it keeps, at the learned scale. For other bases, the parameters as they are.

    Raises:
        ValueError: if Schedule-Free stands in several parts of the base.
    """
    found = find(state)
    averages = own_point.averages(found.base)
    if not averages:
        return params
    if len(averages) > 1:
        raise ValueError(
            f"eval_params needs one Schedule-Free base, got {len(averages)}. Mechanize each part "
            "on its own, and call eval_params with the state of each."
        )
    b1, scale_now = averages[0].b1, found.numbers.scale

    def move(param: Any, own: Any, z: Any) -> Any:
        if not vectors.is_inexact(param):
            return param
        wide = vectors.working_dtype(param.dtype)
        b, factor = jnp.asarray(b1).astype(wide), jnp.asarray(scale_now).astype(wide)
        y, z = own.astype(wide), z.astype(wide)
        average = (y - (1 - b) * z) / b
        return (param + factor * (average - y)).astype(param.dtype)

    return jax.tree.map(move, params, own_point.shown(found, params), averages[0].z)


def find(state: Any) -> MechanicState:
    """The one state of `mechanize` in a larger one."""

    def is_own(node: Any) -> bool:
        return isinstance(node, MechanicState)

    nodes = jax.tree.leaves(state, is_leaf=is_own)
    found: list[MechanicState] = [node for node in nodes if is_own(node)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"there is no state of mechanize in this {type(state).__name__}. Give the state that "
            "init() or update() of a mechanized transformation returned, or one that holds it."
        )
    raise ValueError(
        f"there are {len(found)} states of mechanize in this {type(state).__name__}. Give the part "
        "of it that holds one, such as state.inner_states['name']."
    )
