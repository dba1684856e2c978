"""Looking into the state of a mechanized transformation, wherever it stands in a larger one."""

from typing import Any

import jax
import jax.numpy as jnp

from mechanic.arrays import Array, divide
from mechanic.optax import own_point, vectors
from mechanic.optax.rates import injected_rates
from mechanic.optax.state import MechanicState, all_in, is_own
from mechanic.suggestion import suggest


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


def suggest_lr(state: Any, learning_rate: float | None = None) -> float:
    """The learning rate to type for the plain transformation: with the same schedule, it would have
    added up to the same over the run. It waits for the device.

    For a schedule it is the highest rate, which is `init_value` or, with a warm-up, `peak_value`.

    Args:
        state: as in `scale`.
        learning_rate: the rate that was typed, if it was the same in all steps. It may be left out
            where `mechanize` was told of it, and where the base has `optax.inject_hyperparams`.

    Raises:
        ValueError: if the rate that was typed is not known, or is a schedule.
    """
    found = find(state)
    is_unknown = found.rates is None and learning_rate is None
    if is_unknown or callable(learning_rate):
        raise ValueError(
            "suggest_lr needs the learning rate that was typed, because each step counts by its "
            f"own; got learning_rate={learning_rate!r}. Call mechanize(tx, learning_rate=...) with "
            "the number or schedule that tx was made with; or, if the rate was the same in all "
            "steps, suggest_lr(state, learning_rate=...) with that number."
        )
    numbers = found.numbers
    typed = numbers.highest_rate if learning_rate is None else learning_rate
    mean_scale = divide(float(numbers.applied_total), float(numbers.typed_total))
    (suggested,) = suggest(mean_scale, [{"lr": typed}])
    return suggested


def freeze(state: Any) -> Any:
    """The same state, but that the scale is held where it is. The base goes on with the learning
    rate that it has.

    Args:
        state: as in `scale`. Where it holds several states of `mechanize`, all are frozen.

    Returns:
        A new state; that which is given stays as it is.

    Raises:
        ValueError: if there is no state of `mechanize` in it.

    >>> import jax.numpy as jnp, optax
    >>> from mechanic.optax import freeze, mechanize, unfreeze
    >>> state = freeze(mechanize(optax.sgd(1.0)).init(jnp.ones(3)))
    >>> bool(state.frozen), bool(unfreeze(state).frozen)
    (True, False)
    """
    return _with_frozen(state, True)


def unfreeze(state: Any) -> Any:
    """The same state, but that the tuner goes on, from what it knew when the scale was frozen.

    Arguments and errors are those of `freeze`.
    """
    return _with_frozen(state, False)


def _with_frozen(state: Any, value: bool) -> Any:
    def change(node: Any) -> Any:
        if not is_own(node):
            return node
        return node._replace(
            frozen=jax.tree.map(lambda own: jnp.full_like(own, value), node.frozen)
        )

    if not all_in(state):
        raise ValueError(_none_in(state))
    return jax.tree.map(change, state, is_leaf=is_own)


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
    found = vectors.without_variables(find(state))
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

    own = vectors.without_variables(params)
    moved = jax.tree.map(move, own, own_point.shown(found, own), averages[0].z)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(moved))


def find(state: Any) -> MechanicState:
    """The one state of `mechanize` in a larger one."""
    found = all_in(state)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(_none_in(state))
    raise ValueError(
        f"there are {len(found)} states of mechanize in this {type(state).__name__}. Give the part "
        "of it that holds one, such as state.inner_states['name'], or with scope= one of "
        "scopes(state)."
    )


def _none_in(state: Any) -> str:
    return (
        f"there is no state of mechanize in this {type(state).__name__}. Give the state that "
        "init() or update() of a mechanized transformation returned, or one that holds it."
    )
