"""Scopes: which arrays share a scale.

Each scope has a tuner and a base of its own, over the arrays that belong to it. The gradients of
all are looked at first: a NaN in one scope skips the step of all, and `max_grad_norm` is for all.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic.optax import vectors
from mechanic.optax.state import MechanicState
from mechanic.options import REST, Options, refuse_unmatched

ALL_FINITE = "mechanic_all_finite"
"""The argument of a scope's update that tells whether the gradients of all scopes are finite."""

Make = Callable[[Options], optax.GradientTransformationExtraArgs]


def scopes(state: Any) -> dict[str, MechanicState]:
    """The state of each scope, by its name, for the other readers.

    Args:
        state: the state of `mechanize(tx, scope=...)`, or anything that holds it.

    Returns:
        States by the names of their scopes. Arrays that no pattern matches are in `"rest"`.

    Raises:
        ValueError: if there are no scopes in it.

    Examples:
        The gradient of the U-Net is 0 here, so its scale does not leave 0.

        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.optax import mechanize, scale, scopes
        >>> tx = mechanize(optax.sgd(0.25), scope={"text": "text.*"}, max_scale=0.5)
        >>> params = {"text": {"w": jnp.ones(3)}, "unet": {"w": jnp.ones(2)}}
        >>> grads = {"text": {"w": jnp.ones(3)}, "unet": {"w": jnp.zeros(2)}}
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> {name: float(scale(own)) for name, own in scopes(state).items()}
        {'rest': 0.0, 'text': 0.5}
    """

    def is_partition(node: Any) -> bool:
        return isinstance(node, optax.transforms.PartitionState)

    for node in jax.tree.leaves(state, is_leaf=is_partition):
        if is_partition(node):
            inner = {name: own.inner_state for name, own in node.inner_states.items()}
            if all(isinstance(own, MechanicState) for own in inner.values()):
                return dict(sorted(inner.items()))
    raise ValueError(
        f"there are no scopes in this {type(state).__name__}. Give the state of mechanize(tx, "
        "scope=...), or one that holds it."
    )


def scoped(make: Make, options: Options) -> optax.GradientTransformationExtraArgs:
    """A transformation with a scale for each scope. `make` gives that of one scope."""
    own = make(replace(options, scope="all", max_grad_norm=math.inf))

    def parted(labels: Any) -> optax.GradientTransformationExtraArgs:
        names = set(jax.tree.leaves(labels))
        return optax.with_extra_args_support(
            # A function of the labels: a tree may be callable itself, as a model of equinox is.
            optax.transforms.partition(dict.fromkeys(sorted(names), own), lambda _: labels)
        )

    def init(params: Any) -> Any:
        params = vectors.without_variables(params)
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        labels = name_scopes(params, options)
        names = [_path(path) for path, _ in paths]
        refuse_unmatched(options, set(jax.tree.leaves(labels)), names)
        return parted(labels).init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(vectors.NO_PARAMS)
        held = [grad for grad in jax.tree.leaves(grads) if _counts(grad)]
        largest = [jnp.max(jnp.abs(grad)).astype(jnp.float32) for grad in held]
        all_finite = jnp.isfinite(jnp.stack(largest)).all() if held else jnp.asarray(True)
        if options.max_grad_norm < math.inf:
            grads = _clipped(grads, options.max_grad_norm)
        extra_args[ALL_FINITE] = all_finite
        parts = parted(name_scopes(params, options))
        updates, state = parts.update(grads, state, params, **extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def _counts(grad: Any) -> bool:
    return vectors.is_inexact(grad) and grad.size > 0


def _clipped(grads: Any, max_norm: float) -> Any:
    """Clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does."""
    squares = [jnp.sum(jnp.abs(grad) ** 2) for grad in jax.tree.leaves(grads) if _counts(grad)]
    norm = jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.zeros(())
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)

    def clip(grad: Any) -> Any:
        return grad * factor.astype(grad.dtype) if _counts(grad) else grad

    return jax.tree.map(clip, grads)


def name_scopes(params: Any, options: Options) -> Any:
    """The scope of each array, by the name of its path: `"encoder.layers.0.kernel"`."""

    def name(path: Any, _: Any) -> str:
        found = _path(path)
        if options.scope == "tensor":
            return found
        pairs: Any = options.scope
        return next((own for own, pattern in pairs if fnmatchcase(found, pattern)), REST)

    return jax.tree_util.tree_map_with_path(name, params)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
