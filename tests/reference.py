"""Mechanic and seven base optimizers in float64 NumPy: what the library is compared against.

Written from the texts (the paper's Algorithm 1 and 2, the readings that settle what the paper
leaves open, and `docs/algorithm.md` for the default rule) and apart from `mechanic/`, as naively
as they stand there: every vector is kept, Δ is summed, and x is made anew from x_ref at each step.
`run` is the whole trajectory; the rest are its parts, and two problems to run them on.

A base maps (g, x, state, lr) to its update u, so that alone it would play x + u. `lr` may be a
vector: the learning rates of several groups.
"""

import math

import numpy as np
from sklearn.datasets import load_wine

# Algorithm 1, line 1
BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
PAPER_DECAY = 0.01  # λ
PAPER_START = 1e-8  # s_init


def run(
    base,
    gradient,
    x0,
    steps,
    lr,
    rule="default",
    *,
    schedule=None,
    cap=math.inf,
    options=None,
    **hyper,
):
    """Run `base` under a rule for so many steps.

    gradient(x, t) gives g_t, schedule(t) a factor on lr, `options` go to the rule and `hyper` to
    the base. Returns the points x_1, ..., x_{T+1} and the scales S_1, ..., S_{T+1}.
    """
    update_scale = {"default": default, "paper": algorithm1}[rule]
    options = dict(options or {}) | ({"cap": cap} if rule == "default" else {})
    x_ref = np.array(x0, dtype=np.float64)
    x, delta = x_ref.copy(), np.zeros_like(x_ref)  # lines 2 and 3
    memory, tuner = {}, {"x1": x_ref}
    xs, Ss = [x], [0.0]  # line 4: s_1 = 0
    for t in range(steps):
        g = gradient(x, t)  # line 6
        rate = np.asarray(lr, dtype=np.float64) * (1.0 if schedule is None else schedule(t))
        u = base(g, x, memory, rate, **hyper)  # line 7
        last = tuner.get("rate", np.zeros_like(rate))  # 0 where there has been none yet
        measured = tuner.get("measured", np.zeros_like(rate))
        grown = np.divide(rate, measured, out=np.ones_like(rate), where=measured > 0)
        tuner.update(rise=max(1.0, grown.max()), rate=np.where(rate > 0, rate, last))
        tuner["t"] = tuner.get("t", 0) + np.any(rate > 0)  # steps at an lr above 0, from 1
        s, q = update_scale(tuner, delta, g, x, u, **options)  # lines 10 to 16
        s = s * min(1.0, cap / s.sum()) if s.sum() > 0 else s
        tuner["s"] = s
        if q == 0:  # the default rule begins anew from where it is
            x_ref = x
        # Line 9, where the default rule forgets a part of the past: of all of Δ, whichever
        # parameters have a gradient at this step.
        delta = q * delta + u
        x = x_ref + s.sum() * delta  # line 17
        xs.append(x)
        Ss.append(s.sum())
    return np.array(xs), np.array(Ss)


# The rules: from what step t measures to the scales s_{t+1}, and the part q of Δ_t that stays.


def algorithm1(
    state,
    delta,
    g,
    x,
    u,
    *,
    betas=BETAS,
    s_init=PAPER_START,
    decay=PAPER_DECAY,
    epsilon=0.0,
    m_of=abs,
    s_of_reward="s_t",
):
    """Algorithm 1, lines 10 to 16.

    The last three arguments are for the readings that the paper's text leaves open. As they
    stand, they are the settled ones: |h| in line 11, s_t in line 13, no ε in line 16.
    """
    beta = np.asarray(betas)
    n, zero = len(beta), np.zeros(len(beta))
    s = state.get("s", zero)
    s_before, state["s_before"] = state.get("s_before", zero), s

    # Line 10; the decay term is 0 where x is.
    norm = np.linalg.norm(x)
    toward_zero = decay * s.sum() * np.linalg.norm(g) * x / norm if norm > 0 else 0.0 * x
    h = delta @ (g + toward_zero)
    m = np.maximum(beta * state.get("m", zero), m_of(h))  # line 11
    v = beta**2 * state.get("v", zero) + h**2  # line 12
    r = beta * state.get("r", zero) - (s if s_of_reward == "s_t" else s_before) * h  # line 13
    r = np.maximum(0.0, r)  # line 14
    W = s_init * m / n + r  # line 15
    root = np.sqrt(v) + epsilon
    s = np.divide(W, root, out=np.zeros(n), where=root > 0)  # line 16
    state.update(m=m, v=v, r=r)
    return s, 1.0


def default(state, delta, g, x, u, *, betas=(0.99,), cap=math.inf, decay=0.0, blown=4, steep=100):
    """The default rule, one number after the other. ‖u‖ is that of the update before, as far as it
    has made Δ grow; it is taken itself in ten steps, and when an lr has grown by a tenth."""
    n = len(betas)
    S = state.get("s", np.zeros(n)).sum()
    largest_cosine, hesitation, recent_fall = (
        state.get(name, 0.0) for name in ("largest_cosine", "hesitation", "recent_fall")
    )
    steepest = state.get("recent_slope", 0.0)
    stake, top, ramp_size = (state.get(name, 0.0) for name in ("stake", "top", "ramp_size"))
    is_ramp_over = hesitation > 0

    x1_size = max(np.linalg.norm(state["x1"]), 0.1 * math.sqrt(x.size))
    D, U_before = np.linalg.norm(delta), state.get("U", 0.0)
    U = max(U_before, D - state.get("D", 0.0))
    if state["t"] <= 10 or state["rise"] > 1.1:
        U = max(U, np.linalg.norm(u))
        state["measured"] = state["rate"]

    norm = np.linalg.norm(x)
    h = delta @ g + (decay * np.linalg.norm(g) * (delta @ x) / norm if norm > 0 else 0.0)
    sizes = D * np.linalg.norm(g)
    cosine = min(max(-h / sizes, -1.0), 1.0) if sizes > 0 else 0.0
    slope, fall = cosine * np.linalg.norm(g), -S * h
    before, stake = stake, max(stake, min(abs(fall), blown * stake if stake > 0 else math.inf))
    if fall > before:
        hesitation *= before / stake
    largest_cosine = max(np.mean(betas) * largest_cosine, abs(cosine))
    recent_part = min(1.0, abs(fall) / recent_fall) if recent_fall > 0 else 1.0
    trust = 1 - cosine**2 * (1 - recent_part)
    c = trust * cosine / largest_cosine if largest_cosine > 0 else 0.0
    c = math.copysign(min(abs(c), abs(slope) / steepest if steepest > 0 else 1.0), c)

    # The scale
    k = 1 / (1 + hesitation / 2) if is_ramp_over else (1 + max(cosine, 0)) / 2
    step = k * abs(c)
    worth = min(1.0, abs(fall) / (0.01 * stake)) if stake > 0 else 0.0
    if c > 0:
        factor = 1 + worth**2 * step
    elif c < 0:
        divergence = recent_part * (cosine * largest_cosine) ** 2 * (top * 0.85 <= S)
        factor = (1.0 if is_ramp_over else 0.5) / (1 + worth**2 * (step + divergence))
    else:
        factor = 1.0
    new = S * factor
    if recent_fall > 0 and -fall > 4 * recent_fall:  # the brake
        new /= 1 + (min(2.0, -fall / recent_fall / 4) - 1) * min(-fall / stake, 1.0) ** 4
    if U_before > 0:
        new, top = new * U_before / U, top * U_before / U
    if new > cap:
        new, factor = cap, cap / S if S > 0 else 1.0
    recent_fall = max(0.95 * recent_fall, fall, -fall / 4)
    faded = 0.95 * steepest
    steepest = max(faded, min(abs(slope), steep * faded if faded > 0 else math.inf))
    hesitation += max(-c, 0.0)

    # Has Δ been wrong?
    top = top if is_ramp_over else max(top, new)
    last_factor = state.get("last_factor", 0.0)
    both = math.sqrt(factor * last_factor) if last_factor > 0 and factor != 1 else factor
    offset_factor = 1 + trust * (both ** (0.25 if both > 1 else 0.5) - 1)
    last_factor = factor if is_ramp_over else 0.0
    q = offset_factor * S / new if S > 0 else 1.0
    if is_ramp_over and new < 0.1 * top:
        q, hesitation, top, last_factor = 0.0, hesitation / 4, new, 0.0

    is_new = ramp_size * 1.1 < x.size
    if is_new or S == 0:  # the ramp begins, with nothing of what was before
        new = min(1e-4 * x1_size / U if U > 0 else 0.0, cap)
        q = 0.0 if S > 0 else 1.0
        largest_cosine = hesitation = recent_fall = steepest = stake = top = last_factor = 0.0
    state.update(
        largest_cosine=largest_cosine,
        hesitation=hesitation,
        recent_fall=recent_fall,
        recent_slope=steepest,
        stake=stake,
        top=top,
        last_factor=last_factor,
    )
    state.update(U=U, D=(q or 1.0) * D, ramp_size=x.size if is_new else ramp_size)
    return np.full(n, new / n), q


def note_shares(monkeypatch):
    """The shares of Δ that the default rule keeps from now on, as they come."""
    kept, rule = [], default

    def noted(*args, **options):
        scale, share = rule(*args, **options)
        kept.append(share)
        return scale, share

    monkeypatch.setitem(globals(), "default", noted)
    return kept


def algorithm2(hs, W0, beta=1.0, *, q_sign=-1.0):
    """Algorithm 2 on the signals h_1, ..., h_T: the scales s_1, ..., s_T and wealths W_1, ..., W_T.

    Read as its proof reads it: |h| in line 6, s_t in line 9, and in line 12 the clip of −q
    (the printed line has +q, `q_sign=1`, with which it bets against what it has seen).
    """
    v = r = q = m = s = 0.0  # line 2
    scales, wealths = [], []
    for h in hs:
        scales.append(s)  # line 4
        m_before, m = m, max(beta * m, abs(h))  # line 6
        clipped = min(max(h, -m_before), m_before)  # line 7
        q = beta * q + clipped  # line 8
        r = beta * r - s * clipped  # line 9
        W = W0 + r  # line 10
        v = beta**2 * v + clipped**2  # line 11
        root = math.sqrt(4 * m**2 + v)
        s = W / root * min(max(q_sign * q / root, 0.0), 1.0) if root > 0 else 0.0  # line 12
        wealths.append(W)
    return np.array(scales), np.array(wealths)


# The bases, each as its own paper has it, with the defaults of torch.optim and lion-pytorch.


def sgd(g, x, state, lr, *, momentum=0.0, weight_decay=0.0):
    """Stochastic gradient descent with heavy-ball momentum; the decay is part of the gradient."""
    g = g + weight_decay * x
    state["buffer"] = momentum * state["buffer"] + g if "buffer" in state else g
    return -lr * state["buffer"]


def adamw(g, x, state, lr, *, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """Loshchilov and Hutter, "Decoupled weight decay regularization", Algorithm 2."""
    t, m, v = _moments(g, state, betas)
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return -lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * x)


def nadam(g, x, state, lr, *, betas=(0.9, 0.999), eps=1e-8, momentum_decay=4e-3):
    """Dozat, "Incorporating Nesterov momentum into Adam", with its schedule of μ."""
    t, m, v = _moments(g, state, betas)
    mu, mu_next = (betas[0] * (1 - 0.5 * 0.96 ** (k * momentum_decay)) for k in (t, t + 1))
    product = state["mu_product"] = state.get("mu_product", 1.0) * mu
    m_hat = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
    return -lr * m_hat / (np.sqrt(v / (1 - betas[1] ** t)) + eps)


def lion(g, x, state, lr, *, betas=(0.9, 0.99), weight_decay=0.0):
    """Chen et al., "Symbolic discovery of optimization algorithms", Algorithm 2."""
    m = state.get("m", np.zeros_like(g))
    state["direction"] = betas[0] * m + (1 - betas[0]) * g
    state["m"] = betas[1] * m + (1 - betas[1]) * g
    return -lr * (np.sign(state["direction"]) + weight_decay * x)


def rmsprop(g, x, state, lr, *, alpha=0.99, eps=1e-8):
    """Tieleman and Hinton's lecture; the average starts at 0 and is not corrected."""
    state["v"] = alpha * state.get("v", 0.0) + (1 - alpha) * g**2
    return -lr * g / (np.sqrt(state["v"]) + eps)


def adagrad(g, x, state, lr, *, eps=1e-10):
    """Duchi, Hazan and Singer, the diagonal version."""
    state["v"] = state.get("v", 0.0) + g**2
    return -lr * g / (np.sqrt(state["v"]) + eps)


def _moments(g, state, betas):
    """Adam's step count and its two running averages."""
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g**2
    return t, state["m"], state["v"]


# Two problems of 300 steps. Both are noisy, and have to be: with exact gradients the tuner goes to
# the edge of stability, and there a trajectory is chaotic. In this reference alone, run twice,
# relative errors of 1e-7 in x and g then grow to O(1) in S (full batches of wine, or the quadratic
# with a noise of 0.1). On the problems below they stay under 1e-5 for every base and rule, and the
# seeds are such that Lion takes no sign of a number that rounding in float32 could flip.

STEPS = 300


class Quadratic:
    """½·Σ a·(x − x*)² in 22 dimensions, a from 1 to 2, and noise on its gradient."""

    def __init__(self):
        draw, d = np.random.default_rng(0), 22
        self.a = np.geomspace(1, 2, d)
        self.x0 = draw.normal(size=d)
        self.optimum = self.x0 + 2 * draw.choice([-1, 1], size=d) + draw.normal(size=d) / 4
        self.noise = 4 * draw.normal(size=(STEPS, d))

    def gradient(self, x, t):
        return self.a * (x - self.optimum) + self.noise[t]


class Wine:
    """Multinomial logistic regression: 178 wines, 13 features, 3 classes, batches of 16."""

    def __init__(self):
        features, labels = load_wine(return_X_y=True)
        features = (features - features.mean(0)) / features.std(0)
        draw = np.random.default_rng(14)
        rows = [draw.permutation(len(features))[:16] for _ in range(STEPS)]
        self.features, self.labels = features[rows], labels[rows]
        self.x0 = draw.normal(size=42) / 2  # 13 × 3 weights, then 3 biases

    def gradient(self, x, t):
        X, y = self.features[t], np.eye(3)[self.labels[t]]
        logits = X @ x[:39].reshape(13, 3) + x[39:]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        error = (odds / odds.sum(1, keepdims=True) - y) / len(X)
        return np.concatenate([(X.T @ error).ravel(), error.sum(0)])


QUADRATIC, WINE = Quadratic(), Wine()
