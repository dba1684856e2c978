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

    Returns:
        A scalar, on the device.

    Raises:
        ValueError: if there is none in it, or more than one.

    Examples:
        The loss is `params.sum()`, along which the scale grows until it is at its cap.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import mechanize, scale
        >>> tx = mechanize(optax.sgd(0.25), max_scale=0.5)
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update(jnp.ones(3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(scale(state))
        0.5
    """
    return jnp.asarray(find(state).numbers.scale)


def effective_learning_rate(state: Any, learning_rate: Any = None) -> Array:
    """The learning rate in force: the scale times the rate that was typed.

    Args:
        state: as in `scale`.
        learning_rate: the rate that was typed. It may be left out where `mechanize` was told of it,
            and under `optax.inject_hyperparams`.

    Returns:
        A scalar, on the device.

    Raises:
        ValueError: if the rate that was typed is not known.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import effective_learning_rate, mechanize
        >>> tx = mechanize(optax.sgd(0.25), learning_rate=0.25, max_scale=0.5)
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update(jnp.ones(3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(effective_learning_rate(state))
        0.125
        >>> float(effective_learning_rate(state, learning_rate=1.0))  # for another rate
        0.5
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

    Returns:
        A number.

    Raises:
        ValueError: if the rate that was typed is not known, or is a schedule.

    Examples:
        Here, a rate of 100 would have diverged. A plain optimizer with the suggestion converges.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import mechanize, suggest_lr
        >>> def train(tx, params=jnp.ones(3), steps=60):
        ...     state, update = tx.init(params), jax.jit(tx.update)
        ...     for _ in range(steps):
        ...         updates, state = update(params - 3, state, params)
        ...         params = optax.apply_updates(params, updates)
        ...     return round(float(params.mean()), 2), state
        >>> found, state = train(mechanize(optax.sgd(100.0), learning_rate=100.0))
        >>> again, _ = train(optax.sgd(suggest_lr(state)))
        >>> found, again
        (3.0, 3.0)
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

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import freeze, mechanize, scale
        >>> tx = mechanize(optax.sgd(1.0))
        >>> update = jax.jit(tx.update)
        >>> def train(state, params=jnp.ones(3), steps=20):
        ...     for _ in range(steps):
        ...         updates, state = update(jnp.ones(3), state, params)
        ...         params = optax.apply_updates(params, updates)
        ...     return state
        >>> state = train(tx.init(jnp.ones(3)))
        >>> frozen = train(freeze(state))  # else the scale would have doubled in each step
        >>> float(scale(frozen) / scale(state))
        1.0
    """
    return _with_frozen(state, True)


def unfreeze(state: Any) -> Any:
    """The same state, but that the tuner goes on, from what it knew when the scale was frozen.

    Args:
        state: as in `freeze`.

    Returns:
        A new state; that which is given stays as it is.

    Raises:
        ValueError: if there is no state of `mechanize` in it.

    Examples:
        Along this loss, `params.sum()`, the scale doubles in each step, and does so again after
        `unfreeze`.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import freeze, mechanize, scale, unfreeze
        >>> tx = mechanize(optax.sgd(1.0))
        >>> update = jax.jit(tx.update)
        >>> def train(state, params=jnp.ones(3), steps=20):
        ...     for _ in range(steps):
        ...         updates, state = update(jnp.ones(3), state, params)
        ...         params = optax.apply_updates(params, updates)
        ...     return state
        >>> held = train(freeze(train(tx.init(jnp.ones(3)))))
        >>> round(float(scale(train(unfreeze(held), steps=3)) / scale(held)), 3)
        8.0
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

    Args:
        state: as in `scale`.

    Returns:
        Arrays by their names.

    Raises:
        ValueError: if there is no state of `mechanize` in it, or more than one.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import mechanize, metrics
        >>> tx = mechanize(optax.sgd(0.25), learning_rate=0.25, max_scale=0.5)
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for step in range(25):
        ...     grads = jnp.full(3, jnp.nan if step == 3 else 1.0)
        ...     updates, state = update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> numbers = metrics(state)
        >>> {name: float(numbers[name]) for name in ("scale", "effective_lr")}
        {'scale': 0.5, 'effective_lr': 0.125}
        >>> {name: int(numbers[name]) for name in ("steps", "skipped")}
        {'steps': 24, 'skipped': 1}
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

    Args:
        state: as in `scale`.
        params: the parameters that training has now.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: if Schedule-Free stands in several parts of the base.

    Examples:
        At a scale of 1 it is what optax has for the base alone.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import eval_params, mechanize
        >>> tx = mechanize(optax.contrib.schedule_free_sgd(1.0), max_scale=1.0)
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update(jnp.ones(3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> average = optax.contrib.schedule_free_eval_params(state.base, params)
        >>> bool(jnp.allclose(eval_params(state, params), average))
        True
        >>> bool(jnp.allclose(params, average))
        False
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
