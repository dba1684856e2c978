"""Algorithm 2 of the paper: the tuner with a proof (Theorem 2). No optimizer uses it."""

from typing import NamedTuple

from mechanic.arrays import Array, divide, maximum, namespace


class State(NamedTuple):
    """The state of Algorithm 2; `s` is the scale to play next."""

    v: Array
    r: Array
    q: Array
    m: Array
    s: Array


def init(zero: Array) -> State:
    """Algorithm 2, line 2.

    Args:
        zero: a zero of any library, of any shape.

    Returns:
        The state before the first step, whose scale is 0.

    Examples:
        >>> from mechanic import provable
        >>> provable.init(0.0)
        State(v=0.0, r=0.0, q=0.0, m=0.0, s=0.0)
    """
    return State(v=zero, r=zero, q=zero, m=zero, s=zero)


def update(state: State, h: Array, *, wealth: float, beta: float = 1.0) -> State:
    """Algorithm 2, lines 6 to 12, one β at a time.

    Read as its proof reads: with |h| in m, s_t in r, and the bet's clip on −q.

    Args:
        state: what `init` or the step before returned.
        h: ⟨Δ, g⟩, the derivative of the loss along Δ.
        wealth: the paper's W_init, which the first bets are made from.
        beta: the discount of the past; 1 forgets nothing.

    Returns:
        The next state, with the scale to play in `s`.

    Examples:
        >>> import numpy as np
        >>> from mechanic import provable
        >>> state = provable.init(np.float64(0))
        >>> for h in (-1.0, -1.0, -1.0):  # along Δ the loss falls, so the scale grows
        ...     state = provable.update(state, np.float64(h), wealth=1.0)
        >>> round(float(state.s), 3)
        0.4

    References:
        Cutkosky, Defazio and Mehta, "Mechanic: A Learning Rate Tuner", 2023, Theorem 2.
    """
    xp = namespace(h)
    m = maximum(beta * state.m, abs(h))  # line 6
    h = xp.clip(h, -state.m, state.m)  # line 7
    q = beta * state.q + h  # line 8
    r = beta * state.r - state.s * h  # line 9
    W = wealth + r  # line 10
    v = beta**2 * state.v + h * h  # line 11
    root = xp.sqrt(4 * m**2 + v)
    bet = divide(-q, root)
    s = divide(W, root) * xp.clip(bet, 0.0, 1.0)  # line 12
    return State(v=v, r=r, q=q, m=m, s=s)
