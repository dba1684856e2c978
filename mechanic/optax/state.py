"""What a mechanized transformation keeps beside the state of its base."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mechanic import tuner
from mechanic.arrays import Array
from mechanic.optax import vectors
from mechanic.options import Options


class Numbers(NamedTuple):
    """What the tuner knows, in float32, or in float64 where `jax_enable_x64` is set."""

    tuner: Any
    """The state of the rule, as `mechanic.tuner` has it"""
    scale: Array
    """The scale S that made the parameters"""
    share: Array
    """Δ is this share of the displacement that is stored"""
    signal: Array
    """⟨Δ, g⟩ of the last step"""
    reference_square: Array
    """‖x‖² of each array before it first moved"""
    size: Array
    """The number of elements behind `reference_square`"""
    absurd: Array
    """A larger element of the parameters has no part in `reference_square`"""
    typed_total: Array
    """The sum over all steps of the learning rate that was typed, or of 1 where it is not known"""
    applied_total: Array
    """The same, with the learning rate of each step times its scale"""
    highest_rate: Array
    """The highest of these learning rates"""


class Counts(NamedTuple):
    """How many steps were made, learned from and skipped."""

    steps: Array
    """Steps that moved the parameters"""
    updates: Array
    """Steps that the tuner has learned from"""
    skipped: Array
    skipped_in_a_row: Array


class Rates(NamedTuple):
    """The learning rate that was typed, where it is known."""

    typed: Array
    """The rate of the last step"""
    last: Array
    """The same, and the one before where it was 0"""
    measured: Array
    """The rate at which the norm of the update was last measured"""


class MechanicState(NamedTuple):
    """The state of a mechanized transformation. The parameters are x_ref + S·Δ: no copy of x_ref is
    kept, and no array of the parameters themselves, so that both may be donated.

    Examples:
        It is what `mechanize(tx).init` and `update` return, and what wrappers keep in their states.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import MechanicState, mechanize
        >>> tx = optax.chain(optax.clip(1.0), mechanize(optax.sgd(0.25), max_scale=0.5))
        >>> params = {"w": jnp.ones(3)}
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update({"w": jnp.ones(3)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> isinstance(state[1], MechanicState), list(state[1].displacement)
        (True, ['w'])
        >>> int(state[1].counts.steps), float(state[1].numbers.scale)
        (20, 0.5)
    """

    base: Any
    """The state of the base"""
    displacement: Any
    """Δ up to one factor, `numbers.share`; a tree like the parameters"""
    numbers: Numbers
    counts: Counts
    rates: Rates | None
    """None where nobody has told the learning rate"""
    frozen: Array
    """1 where the scale is held where it is"""


TUNED_TWICE = (
    "this transformation is mechanized already, and its scale would be tuned twice. Call mechanize "
    "once."
)


def is_own(node: Any) -> bool:
    """Whether a part of a larger state is the state of `mechanize`."""
    return isinstance(node, MechanicState)


def all_in(state: Any) -> list[MechanicState]:
    """The states of `mechanize` in a larger one."""
    return [node for node in jax.tree.leaves(state, is_leaf=is_own) if is_own(node)]


def refuse_nested(base: Any) -> None:
    """Refuse a base that holds a mechanized transformation."""
    if all_in(base):
        raise ValueError(TUNED_TWICE)


def new_state(options: Options, params: Any, base: Any, *, knows_rate: bool) -> MechanicState:
    """The state before the first step."""
    dtype = scalar_dtype()
    zero = jnp.zeros((), dtype)
    state = tuner.init(options, jnp.asarray(options.betas, dtype))
    leaves = [leaf for leaf in jax.tree.leaves(params) if vectors.is_inexact(leaf)]
    numbers = Numbers(
        tuner=state,
        scale=tuner.scale_of(state),
        share=zero + 1,
        signal=zero,
        reference_square=zero,
        size=zero,
        absurd=vectors.absurd_size(leaves, dtype),
        typed_total=zero,
        applied_total=zero,
        highest_rate=zero,
    )
    fresh = MechanicState(
        base=base,
        displacement=jax.tree.map(lambda leaf: vectors.new_displacement(leaf, options), params),
        numbers=numbers,
        counts=Counts(*(jnp.zeros((), jnp.int32) for _ in Counts._fields)),
        rates=Rates(zero, zero, zero) if knows_rate else None,
        frozen=jnp.zeros((), jnp.int32),  # a number: what averages states makes a bool one
    )
    return _unshared(fresh, params)


def scalar_dtype() -> Any:
    """The dtype of the tuner's numbers."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def _unshared(state: MechanicState, params: Any) -> MechanicState:
    """A state no array of which is in it twice, or is one of the parameters: only then may it be
    donated together with them."""
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: Any) -> Any:
        is_shared = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if is_shared and isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(own, state)  # type: ignore[no-any-return]


def chosen(condition: Array, after: Any, before: Any) -> Any:
    """`after` or `before`, of trees of the same kind; in the dtypes of `before`."""

    def choose(new: Any, old: Any) -> Any:
        if not isinstance(old, jax.Array):
            old = jnp.asarray(old)
        return jnp.where(condition, jnp.asarray(new, old.dtype), old)

    return jax.tree.map(choose, after, before)
