"""The scalar part of Mechanic: what a step measures goes in, the next scale comes out.

Start reading here. Everything is a pure function of a small state, written for NumPy, torch and JAX
arrays and for floats alike, in the letters of the paper (Cutkosky, Defazio, Mehta: "Mechanic: A
Learning Rate Tuner"). `mechanic.torch.written` turns it into C and Triton: it knows + − * / < >,
squares, `where`, `clip`, `sqrt` and sums, and no other operation, such as `&` or a fourth power.

    =======  ==========================================================================
    letter   meaning, and its word elsewhere in this package
    =======  ==========================================================================
    x_t, g_t the parameters, and the gradient there
    u_t      the update that the base optimizer proposes
    Δ_t      the sum of the updates before step t (`displacement`), or what is retained of it
    S_t      the sum of s_t over the β: x_t = x_ref + S_t·Δ_t (`scale`)
    h_t      ⟨Δ_t, g_t⟩, the derivative of the loss along Δ; −S·h > 0 is a fall of the loss
    m, v, r  the largest |h|, the sum of h² and the reward, discounted by β (not in the default)
    =======  ==========================================================================

A rule maps `(options, state, sums)` to `(state, retained)`: the next state, whose scales the next
parameters are made with, and how much of Δ_t is retained (1 in the paper; it may be above 1),

    Δ_{t+1} = retained·Δ_t + u_t,        x_{t+1} = x_ref + S_{t+1}·Δ_{t+1}.

Where nothing is retained, the caller sets x_ref to x_t, so that x_{t+1} = x_t + S_{t+1}·u_t.

`docs/algorithm.md` lists each place where a rule leaves the paper's text, and why.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from mechanic.arrays import Array, count, divide, finite, maximum, mean, namespace, total
from mechanic.options import Options, Preset

# The constants of the default rule, the same for every task; docs/tried.md has what chose them.
START = 1e-4  # ρ: the first update moves the parameters by this fraction of their norm
FLOOR = 0.1  # a parameter counts as at least this large: zero-initialised ones must start too
BACK = 0.5  # a further factor on the scale in the step that ends the ramp
OUTLIER = 4.0  # the brake begins at a rise so many times `recent_fall`, and halves S at twice that;
# one step multiplies the stake by this at most; `recent_fall` counts a rise divided by this
STEEP = 100.0  # one step raises the largest recent slope so many times at most
SHORT = 0.95  # the recent slope and fall fade by this in each step, the largest cosine by β
LEAST = 0.01  # below this part of the stake the scale changes less
SAFE = 0.85  # up to this part of `top` a large cosine is taken for noise
WRONG = 0.1  # Δ was wrong when the scale has fallen to this part of `top`
THAW = 4.0  # the tuner's hesitation is divided by this when Δ was wrong
ADDED = 1.1  # the ramp begins anew when the parameters have become so many times as many

ROUNDED = 1 - 1e-6  # from here on a scale is at its cap, up to rounding in float32

EPS = 1e-8  # the ε of the two codes of the paper's authors


class Sums(NamedTuple):
    """What one step measures. Those that are not needed may be 0: `dx`, `xx` and `gg` are for a
    decay above 0, `x1`, `d`, `dd` and `uu` for a relative start, and a rule that takes the cosine
    needs `gg`, `dd` and `d` whatever the options.

    `dg` and `gg` are over the groups whose lr is not 0, `dx` and `xx` over all parameters that have
    a gradient, and `dd` over those without one, too.

    Examples:
        >>> import numpy as np
        >>> delta, g = np.array([-1.0, -2.0]), np.array([1.0, 1.0])
        >>> sums = Sums(delta @ g, dx=0, gg=g @ g, xx=0, x1=0, d=g.size, dd=delta @ delta, uu=0)
        >>> float(sums.dg), float(sums.gg), float(sums.dd)
        (-3.0, 2.0, 5.0)
    """

    dg: Array
    """⟨Δ_t, g_t⟩"""
    dx: Array
    """⟨Δ_t, x_t⟩"""
    gg: Array
    """‖g_t‖², of the groups whose lr is not 0"""
    xx: Array
    """‖x_t‖²"""
    x1: Array
    """‖x_1‖²: of each parameter when it was first seen, without absurd elements"""
    d: Array
    """The number of parameters behind `x1`"""
    dd: Array
    """‖Δ_t‖²"""
    uu: Array
    """‖u_t‖², in the steps in which it is taken"""


class PaperState(NamedTuple):
    """The state of the n tuners of Algorithm 1; `s` holds the scales that made x_t."""

    beta: Array
    m: Array
    v: Array
    r: Array
    s: Array
    U: Array
    """The largest ‖u‖ so far (relative start)"""
    D: Array
    """‖Δ‖ without the last update"""


class DefaultState(NamedTuple):
    """The state of the default rule, whose own numbers are in words. It has one scale, the sum of
    `s`, and takes the mean of the β."""

    beta: Array
    s: Array
    U: Array
    """The largest ‖u‖ so far"""
    D: Array
    """‖Δ‖ without the last update"""
    ramp_size: Array
    """The number of parameters that the ramp was made for"""
    largest_cosine: Array
    """The largest recent |cosine|"""
    hesitation: Array
    """What the steps against Δ add up to, less after a record fall; 0 in the ramp"""
    recent_slope: Array
    """The largest recent |slope|, except that one step raises it at most `STEEP`-fold"""
    recent_fall: Array
    """The largest recent fall of the loss along Δ, −S·h, or rise divided by `OUTLIER`"""
    stake: Array
    """The largest |S·h| since the ramp began, except that one step raises it at most
    `OUTLIER`-fold"""
    top: Array
    """The largest scale of the ramp after its first, or the scale when Δ was last found wrong. It
    falls as U grows"""
    last_factor: Array
    """The factor of the step before, without the brake and the growth of U; 0 before the first one
    with this Δ after the ramp"""


State: TypeAlias = PaperState | DefaultState

PER_BETA = ("beta", "m", "v", "r", "s")
"""The fields of a state that hold one number for each β; the others hold one number."""


def init(options: Options, beta: Array) -> State:
    """Algorithm 1, lines 2 to 4. `beta` is `options.betas` as an array of any library.

    Examples:
        >>> import numpy as np
        >>> state = init(Options(preset="optax"), np.array([0.9, 0.99]))
        >>> type(state).__name__, state.s.tolist()
        ('PaperState', [1e-06, 1e-06])
    """
    zero = 0.0 * beta
    none = total(zero)
    kind = state_type(options)
    numbers = {name: zero if name in PER_BETA else none for name in kind._fields} | {"beta": beta}
    if options.preset == "mechanic-pytorch":
        numbers["m"] = zero + 1e-6
    elif options.preset == "optax" and options.s_init != "relative":
        numbers["s"] = zero + options.s_init
    return kind(**numbers)


def state_type(options: Options) -> type[State]:
    """The type of the state of the rule that `options.preset` names."""
    return RULES[options.preset].state


def update(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    """One step of the rule that `options.preset` names, and the cap.

    Returns:
        The next state, and how much of Δ is retained.

    Examples:
        >>> import numpy as np
        >>> options = Options(preset="paper", betas=(0.9,), s_decay=0.0)
        >>> state = init(options, np.array(options.betas))
        >>> for dg in (0.0, -2.0, -2.0):  # along Δ the loss falls, so the scale grows
        ...     state, _ = update(options, state, Sums(*map(np.float64, (dg, 0, 1, 1, 1, 1, 0, 0))))
        >>> round(float(state.s.sum() / options.s_init), 3)
        1.487
    """
    state, retained = RULES[options.preset].update(options, state, sums)
    # Where nothing is retained D is ‖Δ_t‖ all the same: parameters that rest keep their Δ, and
    # beside a D of 0 that would count as growth.
    kept = namespace(retained).where(retained > 0, retained, 1.0)
    s, D = _capped(options, state.s), kept * namespace(sums.dd).sqrt(sums.dd)
    return state._replace(s=s, D=D), retained


def _default(options: Options, state: DefaultState, sums: Sums) -> tuple[DefaultState, Array]:
    """The scale is multiplied or divided in each step, by as much as the cosine of Δ and −g and the
    slope along Δ say, each beside its largest recent one, and x − x_ref follows in part
    (`_offset_factor`).

    A step is *against Δ* if its cosine is negative. The *ramp* ends with the first of them, which
    belongs to it; it begins anew, with all but U forgotten, where the scale is 0 or many parameters
    are added. Each step against Δ makes the tuner hesitate more: in noise the scale settles.
    """
    xp, S = namespace(sums.dg), total(state.s)
    is_new = sums.d > ADDED * state.ramp_size
    goes_on = xp.where(is_new, 0.0, S) > 0  # where not, a ramp begins
    is_ramp_over = state.hesitation > 0  # before this step
    seen = _look(options, state, sums, S)

    # The scale
    factor, brake = _factor(state, seen, S, is_ramp_over), _brake(seen, state.recent_fall)
    sigma, U = start(options, state, sums)
    # What is learned is a step in units of the largest update: when updates grow, as in a warm-up,
    # the scale becomes as much less.
    shrunk = 1 / maximum(divide(U, state.U), 1.0)
    uncapped = xp.where(goes_on, factor / brake * S * shrunk, sigma)
    tuned = xp.clip(uncapped, None, options.max_scale)
    s = tuned / count(state.beta) + 0 * state.beta
    if options.max_scale < math.inf:  # x follows what the cap has left, brake and growth included
        left = xp.where(ROUNDED * options.max_scale > S, divide(tuned, S), 1.0)
        factor = xp.where(uncapped > options.max_scale, left, factor)

    # What is retained of Δ, and of what the tuner knows
    top = maximum(state.top * shrunk, xp.where(is_ramp_over, 0.0, tuned))
    is_wrong = xp.where(is_ramp_over, top * WRONG, 0.0) > tuned
    # By the mean of two steps, because the next cosine answers to a step of x along Δ. And by trust
    # once more: where the base converges by itself, x is not drawn to x_ref.
    mean_factor = xp.sqrt(factor * xp.where(state.last_factor > 0, state.last_factor, factor))
    mean_factor = xp.where(abs(factor - 1) > 0, mean_factor, 1.0)  # where S rests, x rests
    offset_factor = xp.where(is_wrong, 0.0, 1 + seen.trust * (_offset_factor(mean_factor) - 1))
    offset_factor = xp.where(goes_on, offset_factor, 0.0)  # a new ramp has a Δ of its own
    # x − x_ref = S·Δ becomes offset_factor·(x − x_ref), whatever the brake. At S = 0 x is x_ref.
    retained = xp.where(S > 0, divide(offset_factor * S, tuned), 1.0)
    hesitation = seen.hesitation + maximum(-seen.c, 0.0)
    learned = {
        "largest_cosine": seen.largest_cosine,
        "hesitation": hesitation / xp.where(is_wrong, THAW, 1.0),
        "recent_slope": _raised(SHORT * state.recent_slope, seen.slope, STEEP),
        "recent_fall": maximum(SHORT * state.recent_fall, maximum(seen.fall, -seen.fall / OUTLIER)),
        "stake": seen.stake,
        "top": xp.where(is_wrong, tuned, top),
        "last_factor": xp.where(is_ramp_over, xp.where(is_wrong, 0.0, factor), 0.0),
    }
    learned = {name: xp.where(goes_on, value, 0.0) for name, value in learned.items()}
    ramp_size = xp.where(is_new, sums.d, state.ramp_size)
    return state._replace(s=s, U=U, ramp_size=ramp_size, **learned), retained


class _Seen(NamedTuple):
    """What the default rule sees in a step."""

    cosine: Array
    """Of Δ and −g"""
    largest_cosine: Array
    slope: Array
    """What the loss falls by for each unit of length along Δ"""
    fall: Array
    """What the loss falls by along Δ, −S·h"""
    recent_part: Array
    """|fall| as a part of the largest recent one, at most 1"""
    stake: Array
    trust: Array
    """From 0 to 1: how far the scale, and not the base, is to answer to the cosine"""
    c: Array
    """The cosine beside the largest recent one, as far as it is trusted, and no more than the slope
    beside the largest recent one; from −1 to 1"""
    hesitation: Array
    """That of the steps before this one, less after a record fall"""


def _look(options: Options, state: DefaultState, sums: Sums, S: Array) -> _Seen:
    xp = namespace(sums.dg)
    h = _signal(options, 1.0, sums)  # not times S, which depends on the typed lr
    cosine = xp.clip(finite(divide(-h, xp.sqrt(sums.dd) * xp.sqrt(sums.gg))), -1.0, 1.0)
    largest_cosine = maximum(mean(state.beta) * state.largest_cosine, abs(cosine))
    slope, fall = finite(cosine * xp.sqrt(sums.gg)), finite(-S * h)
    slope_part = _part(slope, state.recent_slope, without=1.0)
    recent_part = _part(fall, state.recent_fall, without=1.0)
    # When g is parallel to Δ and the change is small beside recent ones, the base converges by
    # itself: the scale is left alone.
    trust = 1 - cosine * cosine * (1 - recent_part)
    # The cosine forgets how steep the loss is: without noise, many falls that are slight would
    # outweigh a few rises that are steep.
    c = xp.clip(divide(trust * cosine, largest_cosine), -slope_part, slope_part)
    stake = _raised(state.stake, fall, OUTLIER)
    # A record fall makes earlier hesitation count less, by as much as it raises the stake.
    hesitation = state.hesitation * xp.where(fall > 0, divide(state.stake, stake), 1.0)
    return _Seen(cosine, largest_cosine, slope, fall, recent_part, stake, trust, c, hesitation)


def _raised(largest: Array, a: Array, at_most: float) -> Array:
    """The larger one of `largest` and |a|, but no more than `at_most` times `largest`, unless that
    is 0: one blow-up must not make all that follows look like nothing."""
    xp = namespace(a)
    most = xp.where(largest > 0, at_most * largest, math.inf)
    return xp.clip(abs(a), largest, most)


def _part(a: Array, of: Array, without: float = 0.0) -> Array:
    """|a| as a part of something, at most 1; `without` where that is 0."""
    xp = namespace(a)
    return xp.where(of > 0, divide(xp.clip(abs(a), None, of), of), without)


def _factor(state: DefaultState, seen: _Seen, S: Array, is_ramp_over: Array) -> Array:
    """What the scale is multiplied with, but for the brake and the growth of updates."""
    xp = namespace(S)
    ramp_speed = (1 + maximum(seen.cosine, 0.0)) / 2
    step = xp.where(is_ramp_over, 2 / (2 + seen.hesitation), ramp_speed) * abs(seen.c)
    # Without noise cosines come close to 1, and a large one against Δ means divergence, which is to
    # be met however slow hesitation has made the tuner. At a scale well below `top`, which the ramp
    # went through, it is noise.
    is_safe = state.top * SAFE > S
    against = xp.where(is_safe, 0.0, (seen.largest_cosine * seen.cosine) ** 2)
    divergence = seen.recent_part * against
    # Where little is at stake, less, and by the square: when all is learned, every step goes along
    # Δ, and the scale would grow without limit. Up and down alike: in noise it would drift.
    worth = xp.clip(_part(seen.fall, seen.stake) / LEAST, None, 1.0) ** 2
    rise = 1 + worth * step
    fallen = xp.where(is_ramp_over, 1.0, BACK) / (1 + worth * (step + divergence))
    return xp.where(seen.c < 0, fallen, rise)  # 1 where c is 0, since the step is 0


def _brake(seen: _Seen, recent_fall: Array) -> Array:
    """A further divisor of the scale, from 1 to 2, for steps in which the loss rises along Δ far
    more than it recently fell. A rise that comes again and again is noise: as S falls it becomes a
    small part of the stake, and by its fourth power the brake goes."""
    xp = namespace(seen.fall)
    rise = xp.clip(-seen.fall, None, 2 * OUTLIER * recent_fall)
    excess = maximum(divide(rise, recent_fall) / OUTLIER, 1.0) - 1
    return 1 + excess * (_part(seen.fall, seen.stake) ** 2) ** 2


def _offset_factor(factor: Array) -> Array:
    """What x − x_ref is multiplied with: the fourth root of a rise, the square root of a fall. So x
    lies a little closer to x_ref than at a fixed scale, and S settles higher."""
    xp = namespace(factor)
    return xp.sqrt(xp.where(factor > 1, xp.sqrt(factor), factor))


def _paper(options: Options, state: PaperState, sums: Sums) -> tuple[PaperState, Array]:
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    h = _signal(options, total(s), sums)  # line 10
    m = maximum(beta * m, abs(h))  # line 11, with |h|: see docs/algorithm.md
    v = beta**2 * v + h * h  # line 12
    r = maximum(beta * r - s * h, 0.0)  # lines 13 and 14, with s_t: see docs/algorithm.md
    W = sigma * m / count(beta) + r  # line 15
    s = divide(W, xp.sqrt(v))  # line 16, without ε: see docs/algorithm.md
    return state._replace(m=m, v=v, r=r, s=s, U=U), U * 0 + 1


def _mechanic_pytorch(options: Options, state: PaperState, sums: Sums) -> tuple[PaperState, Array]:
    """mechanic-pytorch 0.0.1; `sums.dx` and `sums.xx` are taken after the base's step."""
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    S = total(s)
    retained = S / (S + EPS)  # it recovers Δ as (x − x_ref)/(S + ε)
    decay = options.s_decay * S * xp.sqrt(sums.gg) * sums.dx / (xp.sqrt(sums.xx) + EPS)
    h = retained * (sums.dg + decay)
    m = maximum(beta * m, abs(h))
    v = beta**2 * v + h * h
    r = maximum(beta * r - s * h, 0.0)
    s = (sigma * m / count(beta) + r) / (xp.sqrt(v) + EPS)
    return state._replace(m=m, v=v, r=r, s=s, U=U), retained


def _optax(options: Options, state: PaperState, sums: Sums) -> tuple[PaperState, Array]:
    """optax.contrib.mechanize 0.2.8."""
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    S = total(s)
    retained = S / (S + EPS)
    decay = options.s_decay * S * xp.sqrt(sums.gg) * sums.dx / (xp.sqrt(sums.xx) + EPS)
    h = retained * (sums.dg + decay)
    r = beta * r - s * xp.clip(h + 0 * m, -m, m)  # the stored reward may be negative
    m = maximum(beta * m, abs(h) + EPS)
    v = beta**2 * v + h * h
    W = sigma * m / count(beta) + maximum(r, 0.0)
    return state._replace(m=m, v=v, r=r, s=W / (xp.sqrt(v) + EPS), U=U), retained


def _capped(options: Options, s: Array) -> Array:
    return s if options.max_scale == math.inf else s / maximum(total(s) / options.max_scale, 1.0)


class Rule(NamedTuple):
    """A rule, its state, and where it reads its sums."""

    update: Callable[[Options, Any, Sums], tuple[State, Array]]
    state: type[State] = PaperState
    decays_after_base: bool = False
    """The decay's `dx` and `xx` are taken at x_t + u_t"""
    takes_cosine: bool = False
    """It reads `d`, `dd` and `gg`, whatever the options"""


RULES: dict[Preset, Rule] = {
    "default": Rule(_default, DefaultState, takes_cosine=True),
    "paper": Rule(_paper),
    "mechanic-pytorch": Rule(_mechanic_pytorch, decays_after_base=True),
    "optax": Rule(_optax),
}


def reads_x(options: Options) -> bool:
    """Whether the sums read the parameters themselves."""
    return options.s_decay != 0


def start(options: Options, state: State, sums: Sums) -> tuple[Array, Array]:
    """The scale to start from, a number that is given or relative to the problem, and U.

    The relative start makes the largest update so far move the parameters by `START` times
    their norm, whatever the learning rate that is typed and the scale of the loss.

    The size of the update is known in time only in the steps that wait for it (`sums.uu`), since it
    is yet to be made. In the others the update before stands for it, and that one is as large as it
    has made Δ grow (or larger, if it did not point along Δ).
    """
    if options.s_init != "relative":
        return options.s_init, state.U
    xp = namespace(sums.dd)
    grown = xp.sqrt(sums.dd) - state.D
    U = maximum(maximum(finite(grown), finite(xp.sqrt(sums.uu))), state.U)
    size = xp.sqrt(maximum(finite(sums.x1), FLOOR**2 * sums.d))  # one weight may be infinite
    return divide(START * size, U), U


def _signal(options: Options, weight: Array, sums: Sums) -> Array:
    """Algorithm 1, line 10, where the weight is S. Parameters that are all 0 have no decay."""
    if options.s_decay == 0:
        return sums.dg
    xp = namespace(sums.dg)
    decay = options.s_decay * weight * xp.sqrt(sums.gg)
    return sums.dg + decay * divide(sums.dx, xp.sqrt(sums.xx))


def scale_of(state: State) -> Array:
    """The scale S of the next parameters.

    Examples:
        >>> import numpy as np
        >>> state = init(Options(preset="optax", s_init=0.25), np.array([0.9, 0.99]))
        >>> float(scale_of(state))
        0.5
    """
    return total(state.s)


def had_signal(state: State) -> Array:
    """Whether h was other than 0 in a step."""
    return total(state.v) > 0 if isinstance(state, PaperState) else state.stake > 0
