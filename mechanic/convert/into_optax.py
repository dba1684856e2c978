"""A checkpoint of torch as a state of optax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mechanic.convert.both import (
    COUNT,
    DISPLACEMENT,
    FIELDS,
    RMSPROP_MOMENTUM,
    STEP,
    Arrays,
    check_fields,
    check_tuners,
    own_in,
    places_in,
    tuner_in,
)
from mechanic.suggestion import typed_rates

if TYPE_CHECKING:
    from mechanic.optax.state import MechanicState


def from_torch(
    state_dict: dict[str, Any], state: Any, *, arrange: Callable[[Arrays], Any] | None = None
) -> Any:
    """The state of a mechanized transformation that goes on where a torch optimizer stopped.

    Args:
        state_dict: `optimizer.state_dict()` of a mechanized optimizer.
        state: `tx.init(params)`, with the same preset; it may hold the state of `mechanize` within
            a larger one. What comes from torch lies on its devices.
        arrange: a list of NumPy arrays, one for each parameter of the optimizer, as a tree like
            `params`. None takes them in the order of the tree's leaves.

    Returns:
        A new state; that which is given stays as it is.

    Raises:
        ValueError: if the two are not of the same kind.

    Examples:
        >>> import jax.numpy as jnp, mechanic.optax, mechanic.torch, optax, torch
        >>> from mechanic import convert
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> sgd = torch.optim.SGD([weights], lr=0.25, momentum=0.9)
        >>> optimizer = mechanic.torch.mechanize(sgd, max_scale=0.5)
        >>> for _ in range(20):
        ...     weights.grad = torch.ones(3)
        ...     optimizer.step()
        >>> tx = mechanic.optax.mechanize(optax.sgd(0.25, momentum=0.9), max_scale=0.5)
        >>> params = jnp.asarray(weights.detach().numpy())
        >>> state = convert.from_torch(optimizer.state_dict(), tx.init(params))
        >>> float(mechanic.optax.scale(state)), int(state.counts.steps)
        (0.5, 20)
        >>> momentum = optimizer.state[weights]["momentum_buffer"]
        >>> state.base[0].trace.tolist() == momentum.tolist()
        True
    """
    import jax

    own = own_in(state)
    saved = tuner_in(state_dict)
    check_tuners(own, saved)
    after = _with_numbers(own, saved, state_dict["param_groups"])
    after = _with_base(after, _entries_of(state_dict), saved["steps"], arrange)
    return _without_copies(
        jax.tree.map(
            lambda node: after if node is own else node, state, is_leaf=lambda node: node is own
        )
    )


def _without_copies(state: Any) -> Any:
    """A state that does not know where the parameters were: they are taken over, too."""
    import jax

    from mechanic.optax.edits import Followed, unknown

    def is_followed(node: Any) -> bool:
        return isinstance(node, Followed)

    return jax.tree.map(
        lambda node: node._replace(copies=unknown(node.copies)) if is_followed(node) else node,
        state,
        is_leaf=is_followed,
    )


def _with_numbers(
    own: MechanicState, saved: dict[str, Any], groups: list[dict[str, Any]]
) -> MechanicState:
    """A state with the tuner of a checkpoint."""

    def read(part: Any) -> Any:
        pairs = {n: (saved[n], had) for n, had in part._asdict().items() if n in saved}
        for name, (value, had) in pairs.items():
            if np.shape(value) != had.shape:
                raise ValueError(
                    f"torch has another tuner than the state: its {name} has shape "
                    f"{np.shape(value)}, and that of the state {had.shape}. Give the state that "
                    "init() of one mechanized transformation returned."
                )
        return part._replace(**{name: _placed(*pair) for name, pair in pairs.items()})

    numbers, rates = read(own.numbers._replace(tuner=read(own.numbers.tuner))), own.rates
    if rates is not None:
        first, measured = groups[0], saved["lrs"][0] if saved["lrs"] else 0.0
        typed, (highest, *_) = float(first["lr"]), typed_rates([first], saved["lrs"])[0]
        values = {"typed": typed, "last": typed or measured, "measured": measured}
        rates = type(rates)(**{n: _placed(values[n], had) for n, had in rates._asdict().items()})
        numbers = numbers._replace(highest_rate=_placed(highest, numbers.highest_rate))
    frozen = _placed(saved["frozen"], own.frozen)
    return own._replace(numbers=numbers, counts=read(own.counts), rates=rates, frozen=frozen)


def _entries_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint holds of each parameter, in their order."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    rows = (state_dict["state"].get(key, {}).items() for key in keys)
    entries = [{name: value for name, value in row if value is not None} for row in rows]
    names = {name for own in entries for name in own}
    if not names:
        raise ValueError(
            "the checkpoint has no state of a parameter: its optimizer has made no step. Start "
            "with tx.init(params)."
        )
    if unknown := sorted(names - {*FIELDS, DISPLACEMENT}):
        raise ValueError(
            f"the state of this base cannot be carried over: it has {', '.join(unknown)}. "
            f"Known are {', '.join(FIELDS)}."
        )
    if {"square_avg", "momentum_buffer"} <= names:
        raise ValueError(RMSPROP_MOMENTUM)
    return entries


def _with_base(
    own: MechanicState,
    entries: list[dict[str, Any]],
    steps: int,
    arrange: Callable[[Arrays], Any] | None,
) -> MechanicState:
    """A state with the displacements and the base's state of a checkpoint. Whatever counts steps in
    the base has counted those of torch's base; of the tuner, where torch's base does not count."""
    import jax

    leaves = jax.tree.leaves(own.base)
    like: Any = jax.tree.structure(own.displacement)
    names = {name for one in entries for name in one} - {DISPLACEMENT}
    places = places_in(own)
    check_fields(places, names)
    if arrange is None and like.num_leaves != len(entries):
        raise ValueError(
            f"the checkpoint has {len(entries)} parameters, and the state {like.num_leaves}. Give "
            "the function that makes a tree like params of the model's arrays as arrange=."
        )

    def tree_of(name: str, target: Any) -> Any:
        arrays = [_array(one.get(name)) for one in entries]
        if arrange is None:
            pairs = zip(arrays, jax.tree.leaves(target), strict=True)
            tree = like.unflatten(np.zeros_like(own) if a is None else a for a, own in pairs)
        else:
            tree = arrange(_without_gaps(arrays, entries, name))
        return jax.tree.map(_fitted, target, tree)

    for name in names - {STEP}:
        own_places = places[FIELDS[name]]
        tree = tree_of(name, like.unflatten([leaves[place] for place in own_places]))
        for place, leaf in zip(own_places, jax.tree.leaves(tree), strict=True):
            leaves[place] = leaf
    made = max((int(one[STEP]) for one in entries if STEP in one), default=steps)
    for place in places[COUNT]:
        leaves[place] = _placed(made, leaves[place])
    displacement = tree_of(DISPLACEMENT, own.displacement)
    return own._replace(
        base=jax.tree.unflatten(jax.tree.structure(own.base), leaves), displacement=displacement
    )


def _without_gaps(arrays: Arrays, entries: list[dict[str, Any]], name: str) -> Arrays:
    """Arrays with zeros for those that a checkpoint lacks, in the shape of another entry."""
    filled = []
    for one, array in zip(entries, arrays, strict=True):
        others = (_array(value) for key, value in one.items() if key != STEP)
        found = array if array is not None else next((o for o in others if o is not None), None)
        if found is None:
            raise ValueError(
                f"a parameter of the checkpoint has no {name}, nor anything else: it has had no "
                "gradient yet. Save the checkpoint after a step in which all parameters have one."
            )
        filled.append(np.zeros(found.shape) if array is None else array)
    return filled


def _array(value: Any) -> Any:
    """A tensor as an array of NumPy, in a dtype that NumPy has."""
    if value is None:
        return None
    import torch

    tensor = value.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _fitted(target: Any, value: Any) -> Any:
    """An array of a checkpoint that takes the place of another one."""
    if np.iscomplexobj(target) and not np.iscomplexobj(value):  # torch has pairs of real numbers
        value = value[..., 0] + 1j * value[..., 1]
    if value.shape != target.shape:
        raise ValueError(
            f"an array of the checkpoint has shape {value.shape}, where the state has "
            f"{target.shape}. Give the function that takes the model's arrays over, kernels "
            "transposed where they are, as arrange=."
        )
    return _placed(value, target)


def _placed(value: Any, like: Any) -> Any:
    """An array of its own in the dtype and on the devices of another one. It shares no memory with
    the tensor that it comes from, which torch goes on to write."""
    import jax

    where = like.sharding if getattr(like, "committed", False) else None
    return jax.device_put(np.array(value, like.dtype), where, may_alias=False)
