"""The scalar part of Mechanic: what a step measures goes in, the next scale comes out.

Start reading here. Everything is a pure function of a small state, written for NumPy, torch and JAX
arrays and for floats alike, in the letters of the paper (Cutkosky, Defazio, Mehta: "Mechanic: A
Learning Rate Tuner"):

    =======  ==========================================================================
    letter   meaning, and its word elsewhere in this package
    =======  ==========================================================================
    x_t, g_t the parameters, and the gradient there
    u_t      the update that the base optimizer proposes
    Δ_t      the sum of the updates before step t (`displacement`)
    S_t      the sum of the scales s_t: x_t = x_ref + S_t·Δ_t (`scale`)
    h_t      ⟨Δ_t, g_t⟩, the derivative of the loss along the displacement
    m, v, r  its largest size, sum of squares and collected reward, discounted by β
    =======  ==========================================================================

A rule maps `(options, state, sums)` to `(state, retained)`: the next state, whose scales the next
parameters are made with, and the part of Δ_t that is retained (1 in the paper),

    Δ_{t+1} = retained·Δ_t + u_t,        x_{t+1} = x_ref + S_{t+1}·Δ_{t+1}.

`docs/algorithm.md` lists each place where a rule leaves the paper's text, and why.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from mechanic import floats
from mechanic.options import Options, Preset

Array: TypeAlias = Any
"""A NumPy, torch or JAX array, or a float; there is no common type to name."""

# The constants of the default rule, the same for every task. docs/tried.md has what they were
# chosen on and what they were confirmed on.
START = 1e-4  # ρ: the first update moves the parameters by this fraction of their norm
FLOOR = 0.1  # a parameter counts as at least this large: zero-initialised ones must start too
BACK = 0.5  # the scale after the ramp, as a part of the one that ended it
OUTLIER = (
    4.0  # a rise of S·h this many times above its recent falls may halve S; L grows by no more
)
SHORT = 0.95  # what is recent fades by this factor in each step
LEAST = 0.01  # below this part of the largest |S·h|, the scale changes by as much less
ADDED = 1.1  # the ramp begins anew when the parameters have become so many times as many

EPS = 1e-8  # the ε of the two codes of the paper's authors


class Sums(NamedTuple):
    """What one step measures. Those that are not needed may be 0: `dx`, `xx` and `gg` are for a
    decay above 0, `x1`, `d`, `dd` and `uu` for a relative start, and a rule that takes the cosine
    needs `gg` and `dd` whatever the options.

    `dg` and `gg` are over the groups whose lr is not 0, `dx` and `xx` over all parameters that have
    a gradient, and `dd` over those without one, too.
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


class State(NamedTuple):
    """The state of the n tuners of Algorithm 1; `s` holds the scales that made x_t. The default
    rule uses m, v and r for numbers of its own, which its docstring explains."""

    beta: Array
    m: Array
    v: Array
    r: Array
    s: Array
    M: Array
    """The number of parameters that the ramp was made for (default rule)"""
    U: Array
    """The largest ‖u‖ so far (relative start)"""
    D: Array
    """‖Δ‖ without the last update"""
    R: Array
    """The largest |S·h| of all (default rule)"""
    L: Array
    """R, but that one step against Δ raises it `OUTLIER`-fold at most (default rule)"""
    C: Array
    """The −S·h of the recent steps in a row along Δ, added up, as a part of L (default rule)"""


PER_BETA = ("beta", "m", "v", "r", "s")
"""The fields of `State` that hold one number for each β; the others hold one number."""


def init(options: Options, beta: Array) -> State:
    """Algorithm 1, lines 2 to 4. `beta` is `options.betas` as an array of any library."""
    zero = 0.0 * beta
    m, s = zero, zero
    if options.preset == "mechanic-pytorch":
        m = zero + 1e-6
    elif options.preset == "optax" and options.s_init != "relative":
        s = zero + options.s_init
    none = _total(zero)
    return State(beta, m, v=zero, r=zero, s=s, M=none, U=none, D=none, R=none, L=none, C=none)


def update(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    """One step of the rule that `options.preset` names, and the cap.

    >>> import numpy as np
    >>> options = Options(preset="paper", betas=(0.9,), s_decay=0.0)
    >>> state = init(options, np.array(options.betas))
    >>> for dg in (0.0, -2.0, -2.0):  # along Δ the loss falls, so the scale grows
    ...     state, _ = update(options, state, Sums(*map(np.float64, (dg, 0, 1, 1, 1, 1, 0, 0))))
    >>> round(float(state.s.sum() / options.s_init), 3)
    1.487
    """
    state, retained = RULES[options.preset].update(options, state, sums)
    s, D = _capped(options, state.s), retained * namespace(sums.dd).sqrt(sums.dd)
    return state._replace(s=s, D=D), retained


def _default(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    """The scale is multiplied or divided each step, by the cosine of Δ and −g.

    Here m is the largest recent cosine, and r the largest recent −S·h, or a part of the largest
    recent S·h; v counts the steps against Δ, each of which makes the tuner slower; C is what the
    steps since the last of them come to.
    """
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    S = _total(s)
    sigma, U = start(options, state, sums)
    is_new = sums.d > ADDED * state.M
    known = xp.where(is_new, 0.0, S)  # the scale to go on from, 0 where there is none

    h = _signal(options, 1.0, sums)  # without S, whose unit is the typed lr
    cosine = _finite(_divide(-h, xp.sqrt(sums.dd * sums.gg)))
    m = _max(beta * m, abs(cosine))
    fall = _finite(-S * h)
    R = _max(abs(fall), state.R)
    # One blow-up must not make all that follows look like nothing.
    most = xp.where(state.L > 0, OUTLIER * state.L, math.inf)
    L = _max(_max(fall, xp.clip(-fall, None, most)), state.L)
    part = _divide(xp.clip(abs(fall), None, L), L)
    usual = _total(r) / _count(beta)
    size = _divide(xp.clip(abs(fall), 0 * usual, 2 * OUTLIER * usual), usual)
    record = _divide(abs(fall), R)  # what stands out again and again is noise, and no divergence
    brake = xp.where(fall < 0, 1 + record**2 * (_max(size / OUTLIER, 1.0) - 1), 1.0)
    much = xp.where(usual > 0, xp.clip(size, 0.0, 1.0), 1.0)
    r = _max(SHORT * r, _max(fall, -fall / OUTLIER))

    # A fall larger than any before: what was counted when less was at stake counts as much less.
    v = v * xp.where(fall > state.R, _divide(state.R, R), 1.0)
    # Where g lies along Δ, and little is left to gain or was lost, the base finds the place itself.
    rest = 1 - cosine * cosine * (1 - much)
    c = _divide(rest * cosine + 0 * m, m)
    # In noise, steps in a row along Δ that come to as much as the largest are not chance: what was
    # counted before, when there was nothing to see, counts for less.
    noise = _max(1 - m**2, 0.0) ** 2  # 0 where cosines come close to 1
    C = xp.where(fall > 0, SHORT * state.C * _divide(state.L, L) + part, 0.0)
    slow = v / (1 + (2 * noise**2 * C) ** 2)
    gain = xp.where(v > 0, 2 / (2 + slow), (1 + _max(cosine, 0.0)) / 2)
    worth = xp.clip(part / LEAST, 0.0, 1.0)
    # Without noise, a cosine of some size against Δ says that the run diverges, however slow the
    # tuner has become. In noise, large cosines only raise S.
    large = much * cosine * cosine
    toward = gain * c + xp.where(v > 0, noise * large, 0.0)
    against = gain * abs(c) + m**2 * large
    # The square: when all is learned every step goes along Δ, however large S is.
    by = xp.where(c > 0, 1 + worth**2 * toward, 1 / (1 + worth * against))
    by = xp.where(v > 0, by, xp.where(c < 0, BACK * by, by))  # the first against Δ ends the ramp
    v = xp.where(known > 0, v + _max(-c, 0.0), 0.0)

    # What is learned is a step in units of the largest update: when updates grow, as in a warm-up,
    # the scale becomes as much less.
    grown = _divide(_total(by * s), S)
    s = by / brake * s / _max(_divide(U, state.U), 1.0)
    s = _capped(options, xp.where(known > 0, s, sigma / _count(beta)))
    # The past takes part by a root: x − x_ref = S·Δ follows a fall more than a rise, so that it
    # lies a little closer to x_ref than at a fixed scale, and S settles as much higher.
    past = xp.sqrt(xp.where(grown > 1, xp.sqrt(grown), grown))
    past = xp.where(known > 0, 1 + rest * (past - 1), 1.0)
    retained = xp.where(S > 0, _divide(past * S, _total(s)), 1.0)
    M = xp.where(is_new, sums.d, state.M)
    m, r, R, L, C = (xp.where(known > 0, kept, 0.0) for kept in (m, r, R, L, C))  # a new ramp
    return state._replace(m=m, v=v, r=r, s=s, M=M, U=U, R=R, L=L, C=C), retained


def _paper(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    h = _signal(options, _total(s), sums)  # line 10
    m = _max(beta * m, abs(h))  # line 11, with |h|: see docs/algorithm.md
    v = beta**2 * v + h * h  # line 12
    r = _max(beta * r - s * h, 0.0)  # lines 13 and 14, with s_t: see docs/algorithm.md
    W = sigma * m / _count(beta) + r  # line 15
    s = _divide(W, xp.sqrt(v))  # line 16, without ε: see docs/algorithm.md
    return state._replace(m=m, v=v, r=r, s=s, U=U), U * 0 + 1


def _mechanic_pytorch(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    """mechanic-pytorch 0.0.1; `sums.dx` and `sums.xx` are taken after the base's step."""
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    S = _total(s)
    retained = S / (S + EPS)  # it recovers Δ as (x − x_ref)/(S + ε)
    decay = options.s_decay * S * xp.sqrt(sums.gg) * sums.dx / (xp.sqrt(sums.xx) + EPS)
    h = retained * (sums.dg + decay)
    m = _max(beta * m, abs(h))
    v = beta**2 * v + h * h
    r = _max(beta * r - s * h, 0.0)
    s = (sigma * m / _count(beta) + r) / (xp.sqrt(v) + EPS)
    return state._replace(m=m, v=v, r=r, s=s, U=U), retained


def _optax(options: Options, state: State, sums: Sums) -> tuple[State, Array]:
    """optax.contrib.mechanize 0.2.8."""
    xp, (beta, m, v, r, s) = namespace(sums.dg), state[:5]
    sigma, U = start(options, state, sums)
    S = _total(s)
    retained = S / (S + EPS)
    decay = options.s_decay * S * xp.sqrt(sums.gg) * sums.dx / (xp.sqrt(sums.xx) + EPS)
    h = retained * (sums.dg + decay)
    r = beta * r - s * xp.clip(h + 0 * m, -m, m)  # the stored reward may be negative
    m = _max(beta * m, abs(h) + EPS)
    v = beta**2 * v + h * h
    W = sigma * m / _count(beta) + _max(r, 0.0)
    return state._replace(m=m, v=v, r=r, s=W / (xp.sqrt(v) + EPS), U=U), retained


def _capped(options: Options, s: Array) -> Array:
    return s if options.max_scale == math.inf else s / _max(_total(s) / options.max_scale, 1.0)


class Rule(NamedTuple):
    """A rule, and where it reads its sums."""

    update: Callable[[Options, State, Sums], tuple[State, Array]]
    decays_after_base: bool = False
    """The decay's `dx` and `xx` are taken at x_t + u_t"""
    takes_cosine: bool = False
    """It reads `dd` and `gg`, whatever the options"""


RULES: dict[Preset, Rule] = {
    "default": Rule(_default, takes_cosine=True),
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

    How large an update is, is known in time only where it is waited for (`sums.uu`): it is yet to
    be made. Elsewhere the update before it stands for it, and that one is as large as it has made
    Δ grow (or larger, if it did not point along Δ).
    """
    if options.s_init != "relative":
        return options.s_init, state.U
    xp = namespace(sums.dd)
    grown = xp.sqrt(sums.dd) - state.D
    U = _max(_max(_finite(grown), _finite(xp.sqrt(sums.uu))), state.U)
    size = xp.sqrt(_max(_finite(sums.x1), FLOOR**2 * sums.d))  # one weight may be infinite
    return _divide(START * size, U), U


def _signal(options: Options, weight: Array, sums: Sums) -> Array:
    """Algorithm 1, line 10, where the weight is S. The decay is 0 where the parameters are."""
    if options.s_decay == 0:
        return sums.dg
    xp = namespace(sums.dg)
    decay = options.s_decay * weight * xp.sqrt(sums.gg)
    return sums.dg + decay * _divide(sums.dx, xp.sqrt(sums.xx))


class ProvableState(NamedTuple):
    """The state of Algorithm 2; `s` is the scale to play next."""

    v: Array
    r: Array
    q: Array
    m: Array
    s: Array


def provable_init(zero: Array) -> ProvableState:
    """Algorithm 2, line 2. `zero` is a zero of any library, of any shape."""
    return ProvableState(v=zero, r=zero, q=zero, m=zero, s=zero)


def provable_update(
    state: ProvableState, h: Array, *, wealth: float, beta: float = 1.0
) -> ProvableState:
    """Algorithm 2, lines 6 to 12: the tuner with a proof (Theorem 2), one β at a time.

    Read as its proof reads: with |h| in m, s_t in r, and the bet's clip on −q.

    >>> import numpy as np
    >>> state = provable_init(np.float64(0))
    >>> for h in (-1.0, -1.0, -1.0):
    ...     state = provable_update(state, np.float64(h), wealth=1.0)
    >>> round(float(state.s), 3)
    0.4
    """
    xp = namespace(h)
    m = _max(beta * state.m, abs(h))  # line 6
    h = xp.clip(h, -state.m, state.m)  # line 7
    q = beta * state.q + h  # line 8
    r = beta * state.r - state.s * h  # line 9
    W = wealth + r  # line 10
    v = beta**2 * state.v + h * h  # line 11
    root = xp.sqrt(4 * m**2 + v)
    bet = _divide(-q, root)
    s = _divide(W, root) * xp.clip(bet, 0.0, 1.0)  # line 12
    return ProvableState(v=v, r=r, q=q, m=m, s=s)


def scale_of(state: State) -> Array:
    """The scale S of the next parameters."""
    return _total(state.s)


def _total(numbers: Array) -> Array:
    """The sum over the tuners, of which floats are one."""
    return numbers if type(numbers) is float else numbers.sum()


def _count(beta: Array) -> int:
    return 1 if type(beta) is float else len(beta)


def namespace(array: Array) -> Any:
    """The library that an array comes from. torch's tensors and Python's floats do not say."""
    if type(array) is float:
        return floats
    own = getattr(array, "__array_namespace__", None)
    return own() if own is not None else sys.modules["torch"]


def _max(a: Array, b: Array) -> Array:
    return namespace(a).clip(a, b, None)


def _finite(a: Array) -> Array:
    """a, and 0 where it is inf or NaN."""
    return namespace(a).where(abs(a) < math.inf, a, 0.0)


def _divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0: with no ε beside it, no scale of the loss is special."""
    xp = namespace(b)
    return a / xp.where(b > 0, b, math.inf)
