"""The arrays that take part in a step, side by side."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mechanic.arrays import Array
from mechanic.optax import vectors


class Leaves(NamedTuple):
    """The arrays of a step. An entry whose gradient is None has none, or cannot be moved."""

    structure: Any
    """That of the gradients, in which None is a leaf"""
    grads: list[Any]
    params: list[Any]
    stored: list[Any]
    """The displacements, as they are stored"""

    @property
    def live(self) -> list[tuple[Array, Array, Array]]:
        """The gradient, parameter and displacement of each array that takes part."""
        rows = zip(self.grads, self.params, self.stored, strict=True)
        return [(grad, param, stored) for grad, param, stored in rows if grad is not None]

    @property
    def sizes(self) -> list[float]:
        """The number of elements of each array that takes part."""
        return [float(vectors.count(param)) for _, param, _ in self.live]

    @property
    def total_size(self) -> float:
        """The number of elements of all arrays, of those without a gradient too."""
        return float(sum(vectors.count(p) for p in self.params if vectors.is_inexact(p)))

    def of_live(self, tree: Any, what: str) -> list[Array]:
        """The arrays of a tree like the gradients, of those that take part."""
        found = up_to(self.structure, tree, what)
        return [own for own, grad in zip(found, self.grads, strict=True) if grad is not None]

    def still(self, proposal: Any) -> Any:
        """A proposal that leaves those where they are that cannot be moved."""
        found = up_to(self.structure, proposal, "what the base proposes")
        return self.structure.unflatten(
            jnp.zeros_like(own) if grad is None and vectors.is_number(own) else own
            for grad, own in zip(self.grads, found, strict=True)
        )

    def merged(self, own: list[Array], others: Any) -> Any:
        """A tree like the gradients: `own` where an array takes part, else what is in `others`."""
        rest = iter(own)
        rows = zip(self.grads, up_to(self.structure, others, "the other tree"), strict=True)
        return self.structure.unflatten(
            [other if grad is None else next(rest) for grad, other in rows]
        )


def gather(grads: Any, params: Any, displacement: Any) -> Leaves:
    """The arrays of a step."""
    found, structure = jax.tree.flatten(grads, is_leaf=lambda leaf: leaf is None)
    own = up_to(structure, params, "the parameters")
    _check_shapes(found, own)
    stored = up_to(structure, displacement, "the state")
    movable = [
        grad if vectors.is_inexact(param) and vectors.is_inexact(grad) else None
        for grad, param in zip(found, own, strict=True)
    ]
    return Leaves(structure, movable, own, stored)


def _check_shapes(grads: list[Any], params: list[Any]) -> None:
    for grad, param in zip(grads, params, strict=True):
        is_array = vectors.is_number(grad) and vectors.is_number(param)
        if is_array and grad.shape != param.shape:
            raise ValueError(
                f"a gradient has shape {grad.shape}, and its parameter {param.shape}. Call "
                "update(grads, state, params) with gradients of those parameters."
            )


def up_to(structure: Any, tree: Any, what: str) -> list[Any]:
    """The parts of a tree that stand where the gradients have a leaf."""
    try:
        return list(structure.flatten_up_to(tree))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{what} must be a tree of the same structure as the gradients, which is {structure}, "
            f"but is {jax.tree.structure(tree)}. Call update(grads, state, params) with gradients "
            "of those parameters that init(params) was given."
        ) from error
