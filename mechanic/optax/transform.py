"""`mechanize` for optax: a transformation that learns the scale of another one's updates.

    measure → run the base → tune → move

A step makes two passes over the parameters: the sums read gradients and displacements, and
everything else is computed where the compiler needs it, in the pass that writes the new state.
"""

import functools
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mechanic import tuner
from mechanic.advance import FIRST_STEPS, advance
from mechanic.arrays import Array
from mechanic.optax import own_point, vectors
from mechanic.optax.edits import following
from mechanic.optax.leaves import Leaves, gather
from mechanic.optax.measure import Late, Parts, decay_sums, measure, measure_late
from mechanic.optax.rates import find_rate, next_rates
from mechanic.optax.scoped import ALL_FINITE, scoped
from mechanic.optax.state import (
    TUNED_TWICE,
    Counts,
    MechanicState,
    Numbers,
    Rates,
    chosen,
    new_state,
    refuse_nested,
)
from mechanic.options import Options, Preset

# A hundredth of float32's largest number: what it bounds grows by a few times in one step.
_FARTHEST = 1e36

Rate = float | Array | Callable[[Array], Array] | None


def mechanize(
    tx: optax.GradientTransformation,
    *,
    learning_rate: Rate = None,
    preset: Preset = "default",
    s_init: float | Literal["relative"] | None = None,
    s_decay: float | None = None,
    betas: tuple[float, ...] | None = None,
    max_scale: float = math.inf,
    skip_nonfinite: bool = True,
    max_grad_norm: float = math.inf,
    displacement: Literal["float32", "bfloat16"] = "float32",
    scope: Literal["all", "tensor"] | Mapping[str, str] = "all",
    follow_edits: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Learn the scale of the updates of a transformation while training runs.

    The learning rate that `tx` was made with may be any: its schedule counts as a shape, and its
    size is learned. Further arguments of `update` are passed on to `tx`.

    Args:
        tx: the base, with its learning rate in it.
        learning_rate: the number or the schedule that `tx` was made with, if the tuner should know
            of it. It is found by itself under `optax.inject_hyperparams`. With it nothing moves at
            a rate of 0, a warm-up of more than ten steps is followed exactly, and
            `effective_learning_rate(state)` needs no argument.
        preset: the rule that tunes: `default`, or one as published.
        s_init: the first scale that is not 0; None stands for the preset's, here and below.
        s_decay: the paper's λ, which keeps the weights smaller: 0 in the default preset, 0.01 in
            the others.
        betas: the discount of each tuner.
        max_scale: a cap on the scale.
        skip_nonfinite: skip a step whose gradients hold NaN or inf.
        max_grad_norm: clip the norm of the gradients, inside the step.
        displacement: the dtype of the one slot that is kept for each parameter.
        scope: which arrays share a scale: `"all"`, each `"tensor"` alone, or those whose path
            matches a pattern, as in `{"text": "text_encoder.*", "unet": "unet.*"}`. `scopes(state)`
            has the state of each.
        follow_edits: needed where something else changes the parameters after every update: a
            projection, or a transformation that comes later in a chain and holds some of them. It
            keeps a copy of the parameters.

    Returns:
        A transformation, whose `update` needs `params`.

    Raises:
        ValueError: if an option is out of range, or `tx` is no transformation.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import mechanize, scale
        >>> tx = mechanize(optax.adamw(1.0))
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(150):
        ...     updates, state = update(2 * (params - 3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> bool(abs(params - 3).max() < 0.1), bool(scale(state) > 0)
        (True, True)
    """
    _check(tx, learning_rate)
    options = Options(
        preset=preset,
        s_init=s_init,
        s_decay=s_decay,
        betas=betas,  # type: ignore[arg-type]
        max_scale=max_scale,
        skip_nonfinite=skip_nonfinite,
        max_grad_norm=max_grad_norm,
        displacement=displacement,
        scope=scope,  # type: ignore[arg-type]
    )
    if options.scope == "group":
        raise ValueError(
            "scope='group' is for torch: optax has no groups. Give patterns of the arrays' paths, "
            "as in scope={'text': 'text_encoder.*'}."
        )
    make = functools.partial(_transformation, tx, learning_rate)
    made = make(options) if options.scope == "all" else scoped(make, options)
    if follow_edits:
        made = following(made)
    made.update._is_mechanized = True
    return made


def _transformation(
    tx: optax.GradientTransformation, learning_rate: Rate, options: Options
) -> optax.GradientTransformationExtraArgs:
    base = optax.with_extra_args_support(tx)

    def init(params: Any) -> MechanicState:
        params = vectors.as_arrays(params)
        state = base.init(params)
        refuse_nested(state)
        knows_rate = find_rate(learning_rate, state, jnp.zeros((), jnp.int32)) is not None
        return new_state(options, params, state, knows_rate=knows_rate)

    def update(
        grads: Any, state: MechanicState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MechanicState]:
        if params is None:
            raise ValueError(vectors.NO_PARAMS)
        grads, params = vectors.as_arrays(grads), vectors.as_arrays(params)
        return _step(options, base, learning_rate, grads, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(tx: Any, learning_rate: Any) -> None:
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"tx must be an optax.GradientTransformation, got {tx!r}. "
            "Call mechanize(optax.adamw(1.0))."
        )
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(
            "mechanize takes a transformation, and optax.MultiSteps is a wrapper around one. "
            "Call optax.MultiSteps(mechanize(tx), every_k_schedule=...)."
        )
    if getattr(tx.update, "_is_mechanized", False):
        raise ValueError(TUNED_TWICE)
    is_rate = learning_rate is None or callable(learning_rate) or hasattr(learning_rate, "dtype")
    if not is_rate and (type(learning_rate) is bool or not isinstance(learning_rate, Real)):
        raise ValueError(
            f"learning_rate must be the number or the schedule that tx was made with, got "
            f"{learning_rate!r}. Leave it out if it is not known."
        )


class Ready(NamedTuple):
    """What there is to know of a step before the tuner learns from it."""

    leaves: Leaves
    parts: Parts
    late: Late
    updates: list[Array]
    """What the base proposes"""
    finite: Array | bool
    """Whether the step is made"""
    live: Array | bool
    """Whether the learning rate is not 0, as far as that is known"""
    rate: Array
    """The learning rate that was typed; 1 where it is not known"""


class Coefficients(NamedTuple):
    """How a step moves: x ← x + x_per_stored·stored + scale·u and
    stored ← kept·stored + stored_per_update·u."""

    x_per_stored: Array
    scale: Array
    stored_per_update: Array
    kept: Array


def _step(
    options: Options,
    base: Any,
    learning_rate: Rate,
    grads: Any,
    state: MechanicState,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, MechanicState]:
    all_finite = extra_args.pop(ALL_FINITE, True)  # in the other scopes, too
    leaves = gather(grads, params, state.displacement)
    parts = measure(options, leaves, state.numbers)
    if options.max_grad_norm < math.inf:
        leaves, parts, grads = _clip(options, leaves, parts, grads)
    point = own_point.shown(state, params)

    def propose() -> tuple[Any, Any]:
        return base.update(grads, state.base, point, **extra_args)  # type: ignore[no-any-return]

    proposal, base_state = propose()
    updates = leaves.of_live(proposal, "what the base proposes")
    rates = next_rates(learning_rate, base_state, state)
    late = _late(options, leaves, parts, state, rates, propose)
    finite = _is_finite(options, state.numbers, parts, late)
    if options.skip_nonfinite:
        finite = finite & all_finite
    live = _is_live(options, state, rates, late)
    rate = jnp.ones_like(state.numbers.scale) if rates is None else rates.typed
    ready = Ready(leaves, parts, late, updates, finite, live, rate)
    numbers, by = _tune(options, ready, state)
    base_state = own_point.follow_reference(base_state, state, by.kept)
    moves, stored = _move(options, ready, by, state.counts.steps)
    after = MechanicState(
        base=chosen(finite, base_state, state.base) if options.skip_nonfinite else base_state,
        displacement=leaves.merged(stored, state.displacement),
        numbers=numbers,
        counts=_counted(state.counts, finite, live),
        rates=chosen(finite, rates, state.rates),
        frozen=state.frozen,
    )
    return leaves.merged(moves, leaves.still(proposal)), after


def _clip(options: Options, leaves: Leaves, parts: Parts, grads: Any) -> tuple[Leaves, Parts, Any]:
    """Clip the norm of the gradients, as `torch.nn.utils.clip_grad_norm_` does; the sums follow."""
    norm = jnp.sqrt(jnp.sum(parts.gg))
    factor = jnp.minimum(options.max_grad_norm / (norm + 1e-6), 1.0)
    own = [(grad * factor.astype(grad.dtype)).astype(grad.dtype) for grad, _, _ in leaves.live]
    rest = iter(own)
    clipped = [None if grad is None else next(rest) for grad in leaves.grads]
    parts = parts._replace(dg=parts.dg * factor, gg=parts.gg * factor**2)
    return leaves._replace(grads=clipped), parts, leaves.merged(own, grads)


def _late(
    options: Options,
    leaves: Leaves,
    parts: Parts,
    state: MechanicState,
    rates: Rates | None,
    propose: Callable[[], tuple[Any, Any]],
) -> Late:
    """The norm of the update in the first steps, when the learning rate has risen, and when an
    array moves that has not before; 0 in the others. An array that has a gradient and has not moved
    is looked at in every step. The branch runs the base once more: to hand its update over would be
    to store it."""
    zeros = jnp.zeros_like(parts.gg)
    none = Late(zeros, zeros)
    takes_cosine = tuner.RULES[options.preset].takes_cosine
    if not (options.s_init == "relative" or takes_cosine) or not leaves.live:
        return none
    is_due = state.counts.updates < FIRST_STEPS
    if rates is not None and state.rates is not None:
        is_due = is_due | (rates.measured != state.rates.measured)

    def take() -> Late:
        updates = leaves.of_live(propose()[0], "what the base proposes")
        late = jax.lax.stop_gradient(measure_late(leaves, updates, state.numbers))
        # XLA takes sums for cheap: without a barrier a GPU would take these in every step.
        return jax.lax.optimization_barrier(late)  # type: ignore[no-any-return,no-untyped-call]

    is_needed = is_due | jnp.any((parts.dd == 0) & (parts.gg > 0))
    if not isinstance(is_needed, jax.core.Tracer):  # a branch would be compiled in every step
        late = take() if is_needed else none
    else:
        late = jax.lax.cond(is_needed, take, lambda: none)
    is_due = is_due | jnp.any(_arrives(parts, late))
    return late._replace(uu=jnp.where(is_due, late.uu, 0.0))


def _arrives(parts: Parts, late: Late) -> Array:
    """Which arrays move for the first time: they have no displacement yet, but an update. Where one
    is frozen, by a gradient or an update of zeros, it counts when that ends."""
    return (parts.dd == 0) & (late.uu > 0)


def _is_finite(options: Options, numbers: Numbers, parts: Parts, late: Late) -> Array:
    """Whether all gradients are finite (a NaN or inf in one of them is one in ⟨Δ, g⟩, even at
    Δ = 0), and the update too where it is measured; and whether neither S·Δ nor what is stored of
    it is so large that the next could be infinite."""
    if not options.skip_nonfinite:
        return jnp.ones_like(parts.dg, dtype=bool)
    length = jnp.sqrt(jnp.sum(parts.dd) + parts.idle)
    is_near = ~(jnp.maximum(numbers.scale, 1 / numbers.share) * length > _FARTHEST)
    return jnp.isfinite(parts.dg) & jnp.isfinite(jnp.sum(late.uu)) & is_near


def _is_live(options: Options, state: MechanicState, rates: Rates | None, late: Late) -> Array:
    """Whether the tuner learns from a step: not at a learning rate of 0. Where the rate is not
    known, an update of 0 stands for it in the first steps, in which the update is measured."""
    if rates is not None:
        return rates.typed != 0
    if options.s_init != "relative":
        return jnp.ones_like(state.counts.steps, dtype=bool)
    return (state.counts.updates >= FIRST_STEPS) | (jnp.sum(late.uu) > 0)


def _tune(options: Options, ready: Ready, before: MechanicState) -> tuple[Numbers, Coefficients]:
    """What the tuner knows after the step, and how the parameters move. The coefficients are
    constants to whoever takes a derivative."""
    had, takes_part = before.numbers, ready.live & ready.finite
    sums = jax.lax.stop_gradient(_sums(options, ready, had))
    own = options, had.tuner, had.share, sums, takes_part
    state, share, kept = chosen(before.frozen > 0, advance(*own, frozen=True), advance(*own))
    scale = jnp.where(takes_part, tuner.scale_of(state), had.scale)
    rate = jnp.where(takes_part, ready.rate, 0.0)
    numbers = had._replace(
        tuner=state,
        scale=scale,
        share=share,
        signal=jnp.where(takes_part, sums.dg, had.signal),
        reference_square=sums.x1,
        size=sums.d,
        typed_total=had.typed_total + rate,
        applied_total=had.applied_total + scale * rate,
        highest_rate=jnp.maximum(had.highest_rate, rate),
    )
    pull = jnp.where(takes_part, (scale * share - had.scale * had.share) * kept, 0.0)
    numbers = chosen(ready.finite, numbers, had)
    # A compiler might compute the rule again for every array that it moves.
    settled: tuple[Numbers, Coefficients] = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
        (numbers, Coefficients(pull, scale, 1 / share, kept))
    )
    return settled


def _sums(options: Options, ready: Ready, had: Numbers) -> tuner.Sums:
    """The sums as the rule is told of them."""
    parts, late, leaves = ready.parts, ready.late, ready.leaves
    arrives, moves = _arrives(parts, late), (parts.dd > 0) | (late.uu > 0)
    if not tuner.RULES[options.preset].takes_cosine:
        moves = jnp.ones_like(moves)
    new = jnp.sum(jnp.where(arrives, jnp.asarray(leaves.sizes, late.uu.dtype), 0.0))
    dx, xx = parts.dx, parts.xx
    if tuner.RULES[options.preset].decays_after_base:
        rows = zip(leaves.live, ready.updates, strict=True)
        dx, xx = decay_sums(leaves, [param + update for (_, param, _), update in rows], had)
    return tuner.Sums(
        dg=parts.dg,
        dx=dx,
        gg=jnp.sum(jnp.where(moves, parts.gg, 0.0)),
        xx=xx,
        x1=had.reference_square + jnp.sum(jnp.where(arrives, late.xx, 0.0)),
        d=jnp.minimum(had.size + new, leaves.total_size),
        dd=jnp.sum(parts.dd) + parts.idle,
        uu=jnp.sum(late.uu),
    )


def _move(
    options: Options, ready: Ready, by: Coefficients, step: Array
) -> tuple[list[Array], list[Array]]:
    """The updates of the parameters, and what is then stored of their displacements. Where the base
    proposes NaN or inf although the gradients are finite, an element stays where it is."""
    moves, nexts = [], []
    by = jax.lax.stop_gradient(by)
    for (_, param, stored), update in zip(ready.leaves.live, ready.updates, strict=True):
        wide = vectors.working_dtype(param.dtype)
        pull, scale, per_update, kept = (value.astype(wide) for value in by)
        delta, u = stored.astype(wide), update.astype(wide)
        move = pull * delta + scale * u
        if wide != param.dtype:  # so that the sum, rounded, is the point that is meant
            x = param.astype(wide)
            point = vectors.dither(x + move, param.dtype, step).astype(wide)
            move = jnp.where(jnp.isfinite(x), point - x, 0.0)
        after = vectors.dither(kept * delta + per_update * u, stored.dtype, step, later=True)
        moves_on = ready.finite
        if options.skip_nonfinite:
            moves_on = moves_on & jnp.isfinite(u)
        moves.append(jnp.where(moves_on, move, 0.0).astype(param.dtype))
        nexts.append(jnp.where(moves_on, after, stored))
    return moves, nexts


def _counted(counts: Counts, finite: Array, live: Array) -> Counts:
    done, one = finite.astype(jnp.int32), optax.safe_increment
    return Counts(
        steps=jnp.where(finite, one(counts.steps), counts.steps),
        updates=jnp.where(finite & live, one(counts.updates), counts.updates),
        skipped=jnp.where(finite, counts.skipped, one(counts.skipped)),
        skipped_in_a_row=(counts.skipped_in_a_row + 1) * (1 - done),
    )
