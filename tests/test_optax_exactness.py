"""`mechanic.optax` against the float64 transcription in `reference.py`, and against optax's own
`contrib.mechanize`, in lock step."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax_runs import PROBLEMS, assert_same, double, flat, parts, row, run, trajectory

from mechanic.optax import mechanize, scale

LR, LONG = 0.5, reference.STEPS

BASES = {
    "sgd": (optax.sgd, reference.sgd, {}),
    "momentum": (optax.sgd, reference.sgd, {"momentum": 0.9}),
    "adamw": (optax.adamw, reference.adamw, {"weight_decay": 0.02}),
    "lion": (optax.lion, reference.lion, {"weight_decay": 0.02}),
}
TOLERANCE = {"paper": 1e-10, "default": 1e-6}
BY_DAY = {("quadratic", "adamw", "default")}


def expect(problem, base, preset, **options):
    _, rule, hyper = BASES[base]
    numpy = PROBLEMS[problem][0] if isinstance(problem, str) else problem
    steps = options.pop("steps", LONG)
    return reference.run(rule, numpy.gradient, numpy.x0, steps, LR, preset, **options, **hyper)


def make(base, lr=LR):
    transformation, _, hyper = BASES[base]
    return transformation(lr, **hyper)


@pytest.mark.parametrize(
    ("problem", "base", "preset"),
    [
        row(problem, base, preset, by_day=(problem, base, preset) in BY_DAY)
        for problem in PROBLEMS
        for base in ("sgd", "momentum", "adamw", "lion")
        for preset in ("paper", "default")
    ],
)
def test_the_reference_over_300_steps(problem, base, preset):
    numpy, gradient = PROBLEMS[problem]
    expected = expect(problem, base, preset)
    with double():
        found = run(mechanize(make(base), preset=preset), gradient, numpy.x0, LONG)
    assert_same(found, expected, TOLERANCE[preset])


@pytest.mark.parametrize(
    ("base", "preset"),
    [row("adamw", "default", by_day=False), row("momentum", "paper", by_day=False)],
)
def test_the_reference_in_float32(base, preset):
    numpy, gradient = PROBLEMS["quadratic"]
    found = run(mechanize(make(base), preset=preset), gradient, numpy.x0, LONG, dtype="float32")
    assert_same(found, expect("quadratic", base, preset), 1e-3)


@pytest.mark.nightly
def test_gradients_that_turn_so_that_the_displacement_is_forgotten(monkeypatch):
    problem, gradient = PROBLEMS["quadratic"]
    steps, kept = 100, reference.note_shares(monkeypatch)

    def sign(t):
        return np.where((t >= 12) & (t < steps // 3), -1.0, 1.0)

    turned = SimpleNamespace(x0=problem.x0, gradient=lambda x, t: sign(t) * problem.gradient(x, t))
    expected = expect(turned, "momentum", "default", steps=steps)
    assert 0 in kept

    def gradient_turned(x, t):
        return jnp.where((t >= 12) & (t < steps // 3), -1.0, 1.0) * gradient(x, t)

    with double():
        found = run(mechanize(make("momentum")), gradient_turned, problem.x0, steps)
    assert_same(found, expected, 1e-6, growth=20.0)


def warm_up_and_cosine(t, xp=math):
    """From exactly 0 over 20 steps to 1, down to 0.01, and 0 in the last ten steps."""
    falling = 0.505 + 0.495 * xp.cos(math.pi * (t - 20) / 80)
    if xp is math:
        return 0.0 if t >= 90 else t / 20 if t < 20 else falling
    return xp.where(t >= 90, 0.0, xp.where(t < 20, t / 20, falling))


@pytest.mark.parametrize("kind", [row("given"), row("injected", by_day=False)])
def test_a_schedule_whose_rate_is_known(kind):
    problem, gradient = PROBLEMS["wine"]
    expected = expect("wine", "adamw", "default", schedule=warm_up_and_cosine, steps=100)

    def schedule(t):
        return LR * warm_up_and_cosine(t.astype(jnp.float64), jnp)

    with double():
        base, rate = make("adamw", schedule), schedule
        if kind == "injected":
            base = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, weight_decay=0.02)
            rate = None
        tx = mechanize(base, learning_rate=rate)
        points, scales = run(tx, gradient, problem.x0, 100)
    assert_same((points[:91], scales[:91]), [own[:91] for own in expected], 1e-6, growth=50)
    assert (points[91:] == points[90]).all()  # at a rate of 0 nothing moves
    assert (scales[91:] == scales[90]).all()


@pytest.mark.nightly
def test_a_cap_and_a_decay():
    problem, gradient = PROBLEMS["wine"]
    options = {"decay": 0.05}
    cap = expect("wine", "momentum", "default", steps=100)[1].max() / 3
    expected = expect("wine", "momentum", "default", steps=100, cap=cap, options=options)
    with double():
        tx = mechanize(make("momentum"), max_scale=cap, s_decay=0.05)
        found = run(tx, gradient, problem.x0, 100)
    assert found[1].max() == pytest.approx(cap, rel=1e-12)
    assert_same(found, expected, 1e-6)


@pytest.mark.parametrize(
    ("problem", "base"),
    [
        row("wine", "adamw"),
        row("quadratic", "momentum", by_day=False),
        row("wine", "sgd", by_day=False),
    ],
)
def test_the_optax_preset_is_optaxs_own(problem, base):
    numpy, gradient = PROBLEMS[problem]
    with double():
        ours = run(mechanize(make(base), preset="optax"), gradient, numpy.x0, 200)
        theirs = optax.contrib.mechanize(make(base))
        expected = run(theirs, gradient, numpy.x0, 200, read=lambda state: state.s.sum())
    assert_same(ours, expected, 1e-9)


@pytest.mark.parametrize("base", [row("adamw"), row("momentum", by_day=False)])
def test_the_typed_learning_rate_does_not_matter(base):
    numpy, gradient = PROBLEMS["quadratic"]
    typed = np.array([1.0, 2.0**-17, 1e-6, 1e6], np.float32)

    def one(lr):  # a schedule, so that the rate is multiplied with the update, and not before
        tx = mechanize(make(base, lambda _: lr))
        return trajectory(tx, gradient, jnp.asarray(numpy.x0, jnp.float32), 60)

    points, scales = (np.asarray(own) for own in jax.jit(jax.vmap(one))(typed))
    assert scales[0].max() > 100 * scales[0][1]
    # A power of two changes no bit.
    np.testing.assert_array_equal(points[1], points[0])
    np.testing.assert_array_equal(scales[1] * typed[1], scales[0])
    for i in (2, 3):
        np.testing.assert_allclose(scales[i] * typed[i], scales[0], rtol=1e-4)
        np.testing.assert_allclose(points[i], points[0], rtol=1e-3, atol=1e-3)


@pytest.mark.nightly
def test_clipping_is_that_of_the_gradients():
    numpy, gradient = PROBLEMS["quadratic"]
    ours = run(mechanize(make("momentum"), max_grad_norm=3.0), gradient, numpy.x0, 60)

    def clipped(x, t):
        own = gradient(x, t)
        return own * jnp.minimum(3.0 / (jnp.linalg.norm(own) + 1e-6), 1.0)

    theirs = run(mechanize(make("momentum")), clipped, numpy.x0, 60)
    assert_same(ours, theirs, 1e-4, growth=20)


@pytest.mark.nightly
def test_an_edit_of_the_weights_stays():
    """A step starts from where the weights are, as after an EMA swap."""
    numpy, gradient = PROBLEMS["quadratic"]
    tx = mechanize(make("momentum"))
    x = parts(jnp.asarray(numpy.x0, jnp.float32))
    state, update = tx.init(x), jax.jit(tx.update)
    for t in range(20):
        updates, state = update(parts(gradient(flat(x), t)), state, x)
        x = optax.apply_updates(x, updates)
    grads = parts(gradient(flat(x), 20))
    updates, after = update(grads, state, x)
    moved, after_moved = update(grads, state, jax.tree.map(lambda own: own + 5, x))
    assert float(scale(after)) != float(scale(state))
    np.testing.assert_array_equal(flat(updates), flat(moved))
    assert float(scale(after)) == float(scale(after_moved))
