"""The passes over one array: its displacement, its part of the sums, and rounding.

What is computed is float32 at least, whatever dtypes parameters, gradients and updates have. All of
it is written for `jit`, which makes two passes of it: one for the sums, one for the step.
"""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from mechanic import tuner
from mechanic.advance import ABSURD, SAMPLE
from mechanic.arrays import Array
from mechanic.options import Options

NO_PARAMS = (
    "params must be given, got None: the sums of a step read where the parameters are. "
    "Call update(grads, state, params)."
)


def without_variables(params: Any) -> Any:
    """The arrays of a tree of flax's `nnx.Variable`s. `nnx.Optimizer` gives these to `init`, and
    arrays to `update`."""
    nnx: Any = sys.modules.get("flax.nnx")
    return params if nnx is None else nnx.as_pure(params)


def is_masked(node: Any) -> bool:
    """Whether it stands for an array that another transformation has."""
    return isinstance(node, optax.MaskedNode)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers of any kind."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.number)


def as_arrays(tree: Any) -> Any:
    """A tree with arrays in place of Python's floats, which can be moved as well."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, (float, complex)) else leaf

    return jax.tree.map(as_array, tree)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex numbers, which can be moved."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def count(leaf: Array) -> int:
    """The number of elements of an array, complex ones as two."""
    return int(leaf.size) * (2 if jnp.iscomplexobj(leaf) else 1)


def working_dtype(dtype: Any) -> Any:
    """The dtype that the step of a parameter is computed in."""
    least = jnp.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float32
    return jnp.promote_types(dtype, least)


def new_displacement(leaf: Any, options: Options) -> Any:
    """A displacement of zero, which lies on the devices as its parameter does."""
    if not is_inexact(leaf):
        return jnp.zeros(jnp.shape(leaf), jnp.float32)
    dtype = working_dtype(leaf.dtype)
    if options.displacement == "bfloat16" and dtype == jnp.float32:
        dtype = jnp.bfloat16
    return jnp.zeros_like(leaf, dtype=dtype)


def inner(a: Array, b: Array, dtype: Any, axis: tuple[int, ...] | None = None) -> Array:
    """⟨a, b⟩, of complex numbers as of pairs of real ones, in the dtype of the tuner's numbers;
    along some axes alone, where they are given."""
    a, b = a.astype(working_dtype(a.dtype)), b.astype(working_dtype(b.dtype))
    product = jnp.real(a) * jnp.real(b)
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        product = product + jnp.imag(a) * jnp.imag(b)
    wide = jnp.promote_types(dtype, product.dtype)
    return jnp.sum(product, axis=axis, dtype=wide).astype(dtype)


def square(a: Array, dtype: Any) -> Array:
    """‖a‖²"""
    return inner(a, a, dtype)


def absurd_size(leaves: list[Any], dtype: Any) -> Array:
    """The size beyond which an element is no measure of the others: a single one of them could be
    all of ‖x‖. It is told by the medians of samples."""
    medians = [_typical_size(leaf, dtype) for leaf in leaves if leaf.size]
    typical = _median(jnp.stack(medians)) if medians else jnp.zeros((), dtype)
    return ABSURD * jnp.maximum(typical, tuner.FLOOR)


def _typical_size(leaf: Array, dtype: Any) -> Array:
    """The median of |x| in a sample of the elements; 0 if they are NaN."""
    leaf = jnp.atleast_1d(leaf)
    size = count(leaf)
    places = np.arange(0, size, -(-size // SAMPLE))
    parts = [leaf]
    if jnp.iscomplexobj(leaf):
        parts, places, is_imaginary = [leaf.real, leaf.imag], places // 2, places % 2
    index = np.unravel_index(places, leaf.shape)
    samples = [_taken(part, index) for part in parts]
    sample = samples[0] if len(samples) == 1 else jnp.where(is_imaginary, samples[1], samples[0])
    sizes = jnp.abs(sample.astype(dtype))
    return _median(jnp.where(jnp.isnan(sizes), 0.0, sizes))


def _taken(leaf: Array, index: Any) -> Array:
    """Elements of an array, on every device where its type says how it is sharded."""
    is_explicit = any(jax.typeof(leaf).sharding.spec)
    if not is_explicit:
        return leaf[index]
    spec: Any = PartitionSpec(None)  # type: ignore[no-untyped-call]
    everywhere = NamedSharding(jax.typeof(leaf).sharding.mesh, spec)
    return leaf.at[index].get(out_sharding=everywhere)


def _median(values: Array) -> Array:
    """The lower one, where two are in the middle."""
    return jnp.sort(values)[(values.size - 1) // 2]


def robust_square(leaf: Array, absurd: Array) -> Array:
    """‖x‖² without the elements that are NaN or absurdly large."""
    parts = [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]
    total = jnp.zeros((), absurd.dtype)
    for part in parts:
        wide = part.astype(jnp.promote_types(part.dtype, absurd.dtype))
        kept = jnp.where(jnp.abs(wide) <= absurd.astype(wide.dtype), wide, 0.0)
        total = total + jnp.sum(kept * kept).astype(absurd.dtype)
    return total


def dither(point: Array, dtype: Any, step: Array, *, later: bool = False) -> Array:
    """Round to a narrow dtype so that many small steps add up to what they should.

    Rounding to nearest would swallow every step below half a unit in the last place. Here an
    element is rounded down or up in proportion to where it lies between its neighbours, against a
    threshold that runs evenly through [0, 1) from step to step and from element to element
    (Roberts' R2 sequence). What `dtype` can represent is left as it is. What is rounded `later` has
    thresholds that are shifted by one half.
    """
    if point.dtype == dtype:
        return point
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    digits = 1 - round(math.log2(float(info.eps)))
    smallest = round(math.log2(float(info.smallest_normal)) + math.log2(float(info.eps)))
    wide = jax.lax.stop_gradient(point)
    _, exponent = jnp.frexp(wide)
    unit = jnp.ldexp(jnp.ones_like(wide), jnp.maximum(exponent - digits, smallest))
    steps = wide / unit
    below = jnp.floor(steps)
    up = steps - below > _thresholds(wide, step, later)
    error = jnp.where(up, below + 1, below) * unit - wide
    error = jnp.where(jnp.isfinite(wide), error, 0.0)
    return (point + error).astype(dtype)  # exact, and autograd sees the point itself


def _thresholds(like: Array, step: Array, later: bool) -> Array:
    """The sequence, in the integers modulo 2³²; 2³²/ρ and 2³²/ρ² are its steps."""
    place, stride = jnp.zeros_like(like, dtype=jnp.uint32), 1
    for axis in reversed(range(like.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis)
        place = place + along * np.uint32(stride % (1 << 32))
        stride *= like.shape[axis]
    sequence = place * np.uint32(0xC13FA9A9) + step.astype(jnp.uint32) * np.uint32(0x91E10DA5)
    sequence = sequence + np.uint32(later << 31)
    return (sequence >> 8).astype(like.dtype) / (1 << 24)
