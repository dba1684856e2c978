"""Inner products of many arrays in few kernels.

A kernel takes the host some microseconds, and a sum over a large array is several of them. Where
there is one device, nothing is sharded, and arrays may be put side by side: small ones as they are,
and large ones when their rows are summed up.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mechanic.arrays import Array
from mechanic.optax import vectors

Pairs = Sequence[tuple[Array, Array]]

_SMALL = 1 << 14  # elements of an array that is copied, to lie beside others of its shape
_LONG = 128  # elements of a row that is worth a sum of its own


def inner_products(rows: list[Pairs], dtype: Any) -> Array:
    """A table of ⟨a, b⟩. Each row has as many pairs, all of them of arrays of one shape."""
    if not rows:
        return jnp.zeros((0, 0), dtype)
    if jax.device_count() > 1:  # side by side, arrays that are sharded differently would be moved
        return jnp.stack([_of_one(pairs, dtype, None) for pairs in rows])
    alike: dict[Any, list[int]] = defaultdict(list)
    sums: dict[int, Array] = {}
    for place, pairs in enumerate(rows):
        like = pairs[0][0]
        if like.size <= _SMALL:
            alike[tuple((x.shape, x.dtype) for pair in pairs for x in pair)].append(place)
        else:
            is_long = like.ndim > 1 and like.shape[-1] >= _LONG
            sums[place] = _of_one(pairs, dtype, (-1,) if is_long else None)
            alike[sums[place].size].append(place)
    tables = [
        _totals([sums[place] for place in places])
        if places[0] in sums
        else _of_stacked([rows[place] for place in places], dtype)
        for places in alike.values()
    ]
    order = [place for places in alike.values() for place in places]
    return jnp.concatenate(tables)[np.argsort(order)]


def _of_one(pairs: Pairs, dtype: Any, axis: tuple[int, ...] | None) -> Array:
    return jnp.stack([vectors.inner(a, b, dtype, axis) for a, b in pairs])


def _of_stacked(rows: list[Pairs], dtype: Any) -> Array:
    """The products of arrays of one shape, each of which is copied."""
    columns = []
    for pairs in zip(*rows, strict=True):
        a, b = (jnp.stack(own) for own in zip(*pairs, strict=True))
        columns.append(vectors.inner(a, b, dtype, tuple(range(1, a.ndim))))
    return jnp.stack(columns, axis=1)


def _totals(sums: list[Array]) -> Array:
    """The sums of what has been summed up along rows."""
    table = jnp.stack(sums)
    return jnp.sum(table, axis=tuple(range(2, table.ndim)))
