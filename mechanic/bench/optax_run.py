"""One run in JAX: the transformation of a method trains a problem from the first step to the last.

JAX is imported only when such a run is made.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from mechanic.bench.course import Course, require_finite
from mechanic.bench.methods import Method, hyperparameters
from mechanic.bench.record import Outcome
from mechanic.bench.task import BuildSettings, OptaxProblem

Schedule = Callable[[Any], Any]


class Recipe(NamedTuple):
    """All that a compiled step depends on, but for the learning rates. Runs with the same recipe
    share one."""

    method: str
    loss: Callable[[Any, Any], Any]
    clip: float | None
    betas: tuple[float, float]
    weight_decay: float
    warms_up: bool
    """Whether the schedule begins with a warm-up"""


class Transformation(NamedTuple):
    """A method that trains a problem."""

    tx: Any
    factor: Callable[[Any], Any]
    """What the scheduled lr is multiplied with, from the state of `tx`"""


class Functions(NamedTuple):
    """A method, compiled. Its learning rates are an array, one for each step."""

    init: Callable[[Any, Any], Any]
    """A state, from parameters and learning rates"""
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]
    """Parameters, state and loss, from parameters, state, learning rates and a batch"""
    factor: Callable[[Any], Any]


def train(
    problem: OptaxProblem,
    method: Method,
    base: str,
    lr: float,
    settings: BuildSettings,
    report: Callable[[int, int], None],
) -> Outcome:
    """Train, as `mechanic.bench.train.train` does.

    Raises:
        DivergedError: if the loss becomes NaN or infinite.
    """
    import jax
    import jax.numpy as jnp

    init, step, factor = _compiled(_recipe(problem, method))
    with jax.default_device(device_of(settings.device)):
        params = problem.params
        start_loss = problem.evaluate(params)["train_loss"]
        scheduled = _scheduled(problem, lr)
        rates = jnp.asarray(scheduled)
        state = init(params, rates)
        spare, spare_state = jax.tree.map(jnp.copy, (params, state))
        step(spare, spare_state, rates, next(problem.batches))  # compiles it
        course = Course(problem.steps, lambda losses: jnp.stack(losses).tolist(), report)
        start = time.perf_counter()
        for rate in scheduled:
            params, state, loss = step(params, state, rates, next(problem.batches))
            course.add(loss, lambda: float(rate * factor(state)))  # noqa: B023, called at once
        seconds = time.perf_counter() - start
        metrics = problem.evaluate(params)
    require_finite(metrics, problem.steps)
    return Outcome(start_loss, metrics, course.curve, seconds)


@contextmanager
def _started_for(is_gpu: bool) -> Iterator[None]:
    """What JAX reads when it is first asked for a device: use as many threads as torch has and no
    more memory than is needed, since other workers run beside; and on a GPU, deterministic
    operators."""
    flags = os.environ.get("XLA_FLAGS", "") + is_gpu * " --xla_gpu_deterministic_ops=true"
    wanted = {"NPROC": str(torch.get_num_threads()), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    had = dict(os.environ)
    os.environ.update({**wanted, **had, "XLA_FLAGS": flags})
    try:
        yield
    finally:
        for name in (*wanted, "XLA_FLAGS"):
            os.environ.pop(name, None)
        os.environ.update(had)


def _scheduled(problem: OptaxProblem, lr: float) -> list[float]:
    """The lr of each step, taken at its middle, as in torch."""
    return [lr * problem.schedule((k + 0.5) / problem.steps) for k in range(problem.steps)]


def _recipe(problem: OptaxProblem, method: Method) -> Recipe:
    options = hyperparameters(problem, "adamw")
    warms_up = problem.schedule(0.0) < problem.schedule(0.1)
    return Recipe(method.name, problem.loss, problem.clip, **options, warms_up=warms_up)


@cache
def _compiled(recipe: Recipe) -> Functions:
    import jax
    import jax.numpy as jnp
    import optax

    build = _BUILDERS[recipe.method]
    clip = optax.identity() if recipe.clip is None else optax.clip_by_global_norm(recipe.clip)

    def init(params: Any, rates: Any) -> Any:
        # Some peers keep the parameters in their state, and no array can be donated twice.
        return jax.tree.map(jnp.copy, build(recipe, rates.__getitem__).tx.init(params))

    def step(params: Any, state: Any, rates: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(recipe.loss)(params, batch)
        grads, _ = clip.update(grads, clip.init(params))
        updates, state = build(recipe, rates.__getitem__).tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    factor = build(recipe, lambda count: 1.0).factor
    return Functions(jax.jit(init), jax.jit(step, donate_argnums=(0, 1)), factor)


def device_of(device: torch.device) -> Any:
    """The device of JAX that is meant by one of torch.

    Raises:
        ValueError: if JAX cannot use it.
    """
    is_gpu = device.type == "cuda"
    try:
        with _started_for(is_gpu):
            import jax

            return jax.devices("gpu" if is_gpu else device.type)[device.index or 0]
    except RuntimeError as error:
        raise ValueError(
            f"JAX cannot use the device {device}, which torch can: {error}. Use --device cpu, or "
            "install JAX for this device, as with pip install 'jax[cuda13]'."
        ) from error


def _adamw(recipe: Recipe, schedule: Schedule) -> Any:
    import optax

    return optax.adamw(schedule, *recipe.betas, weight_decay=recipe.weight_decay)


def _sweep(recipe: Recipe, schedule: Schedule) -> Transformation:
    return Transformation(_adamw(recipe, schedule), lambda state: 1.0)


def _mechanic(**options: Any) -> Callable[[Recipe, Schedule], Transformation]:
    def build(recipe: Recipe, schedule: Schedule) -> Transformation:
        from mechanic.optax import mechanize, scale

        tx = mechanize(_adamw(recipe, schedule), learning_rate=schedule, **options)
        return Transformation(tx, scale)

    return build


def _optax_mechanize(recipe: Recipe, schedule: Schedule) -> Transformation:
    from optax import contrib

    return Transformation(contrib.mechanize(_adamw(recipe, schedule)), lambda state: state.s.sum())


def _optax_prodigy(recipe: Recipe, schedule: Schedule) -> Transformation:
    from optax import contrib

    tx = contrib.prodigy(
        schedule,
        recipe.betas,
        weight_decay=recipe.weight_decay,
        # "to avoid issues during warm-up stage"
        safeguard_warmup=recipe.warms_up,
    )
    return Transformation(tx, lambda state: state.estim_lr)


_BUILDERS: Mapping[str, Callable[[Recipe, Schedule], Transformation]] = {
    "adamw": _sweep,
    "mechanic": _mechanic(),
    "mechanic-paper": _mechanic(preset="paper"),
    "mechanic-optax": _mechanic(preset="optax"),
    "optax-mechanize": _optax_mechanize,
    "optax-prodigy": _optax_prodigy,
}
