"""A state of optax as a checkpoint of torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mechanic.convert.both import (
    BETA,
    DISPLACEMENT,
    ENTRIES,
    FIELDS,
    RMSPROP_MOMENTUM,
    STEP,
    TUNER,
    UNEQUAL,
    Arrays,
    check_fields,
    check_tuners,
    own_in,
    places_in,
    tuner_in,
)

if TYPE_CHECKING:
    from mechanic.optax.state import MechanicState


def to_torch(
    state: Any, optimizer: Any, *, arrange: Callable[[Any], Arrays] | None = None
) -> dict[str, Any]:
    """The state dict with which a mechanized torch optimizer goes on where optax stopped.

    Args:
        state: the state of `mechanize`, or a larger one that holds it.
        optimizer: a mechanized optimizer over the same parameters, with the same preset. It is not
            changed: call its `load_state_dict`.
        arrange: a tree like `params` as a list of arrays, one for each parameter of the optimizer.
            None takes the leaves of the tree in their order.

    Returns:
        A state dict, for `optimizer.load_state_dict`.

    Raises:
        ValueError: if the two are not of the same kind.

    Examples:
        >>> import jax, jax.numpy as jnp, mechanic.optax, mechanic.torch, numpy, optax, torch
        >>> from mechanic import convert
        >>> tx = mechanic.optax.mechanize(optax.sgd(0.25), max_scale=0.5)
        >>> params = jnp.ones(3)
        >>> state, update = tx.init(params), jax.jit(tx.update)
        >>> for _ in range(20):
        ...     updates, state = update(jnp.ones(3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> weights = torch.nn.Parameter(torch.tensor(numpy.array(params)))
        >>> optimizer = torch.optim.SGD([weights], lr=0.25)
        >>> optimizer = mechanic.torch.mechanize(optimizer, max_scale=0.5)
        >>> optimizer.load_state_dict(convert.to_torch(state, optimizer))
        >>> mechanic.torch.tuner(optimizer)
        Tuner(scale=0.5, steps=20)
    """
    import jax

    own, state_dict = own_in(state), optimizer.state_dict()
    saved, places, names = tuner_in(state_dict), places_in(own), _kept_by(optimizer)
    check_tuners(own, saved)
    check_fields(places, names)
    leaves = jax.tree.leaves(own.base)
    like: Any = jax.tree.structure(own.displacement)
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def listed(tree: Any) -> Arrays:
        arrays = jax.tree.leaves(tree) if arrange is None else arrange(tree)
        if len(arrays) != len(params):
            raise ValueError(
                f"the state has {len(arrays)} arrays, and the optimizer {len(params)} parameters. "
                "Give the function that makes a list of the model's arrays as arrange=."
            )
        return [_tensor(*pair) for pair in zip(arrays, params, strict=True)]

    columns = {DISPLACEMENT: listed(own.displacement)}
    for name in names:
        found = [leaves[place] for place in places[FIELDS[name]]]
        if name == STEP:
            made = found[0] if found else own.counts.steps
            columns[name] = [_step(made) for _ in params]
        else:
            columns[name] = listed(like.unflatten(found))
    saved = _saved_from(own, saved, state_dict["param_groups"])
    groups = [{**group, TUNER: saved} for group in state_dict["param_groups"]]
    keys = chain.from_iterable(group["params"] for group in groups)
    rows = [{n: column[i] for n, column in columns.items()} for i in range(len(params))]
    _leave_out_what_has_not_moved(rows, saved["steps"])
    return {**state_dict, "state": dict(zip(keys, rows, strict=True)), "param_groups": groups}


def _leave_out_what_has_not_moved(rows: list[dict[str, Any]], steps: int) -> None:
    """Take displacements of zeros out. In optax such a parameter has yet to be measured, and in
    torch one that has no displacement."""
    moved = [bool(row[DISPLACEMENT].any()) for row in rows]
    if steps and not any(moved):
        raise ValueError(
            f"no parameter has moved in the {steps} steps of the state, and torch knows no such "
            "state. Make a step at a learning rate above 0, or start anew in torch."
        )
    for row, has_moved in zip(rows, moved, strict=True):
        if not has_moved:
            del row[DISPLACEMENT]


def _kept_by(optimizer: Any) -> list[str]:
    """What an optimizer keeps for a parameter, if it can be carried over."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    name = next((kind for kind in kinds if kind in ENTRIES), None)
    names = (*UNEQUAL, "momentum")
    options = {key for group in optimizer.param_groups for key in names if group.get(key)}
    unequal = [f"{option}=True" for option in UNEQUAL if option in options]
    if name is None or unequal:
        raise ValueError(
            f"the state of {' with '.join([kinds[0], *unequal])} cannot be carried over. Known are "
            f"{', '.join(ENTRIES)}, without {' and '.join(UNEQUAL)}."
        )
    if name == "RMSprop" and "momentum" in options:
        raise ValueError(RMSPROP_MOMENTUM)
    return [key for key in ENTRIES[name] if key != "momentum_buffer" or "momentum" in options]


def _saved_from(
    own: MechanicState, template: dict[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The tuner as a torch checkpoint has it. The βs, which JAX may have rounded, are torch's."""
    values = own.numbers.tuner._asdict() | own.numbers._asdict() | own.counts._asdict()
    values |= {"frozen": own.frozen > 0}
    values = {n: np.asarray(v).tolist() for n, v in values.items() if n in template and n != BETA}
    lrs = [float(group["lr"]) for group in groups]
    if own.rates is not None:
        lrs = [float(own.rates.measured)] * len(groups)
    return {**template, **values, "lrs": lrs}


def _tensor(array: Any, param: Any) -> Any:
    """An array as a tensor beside its parameter; complex numbers as pairs of real ones."""
    import torch

    # bfloat16 of NumPy is unknown to torch
    own = np.asarray(array)
    narrow = str(own.dtype) == "bfloat16"
    tensor = torch.from_numpy(np.array(own, np.float32 if narrow else own.dtype))
    tensor = tensor.to(torch.bfloat16) if narrow else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"an array of the state has shape {tuple(own.shape)}, where the optimizer has "
            f"{tuple(param.shape)}. Give the function that takes the arrays over to the model, "
            "kernels transposed where they are, as arrange=."
        )
    return tensor.to(param.device)


def _step(count: Any) -> Any:
    import torch

    return torch.tensor(float(np.asarray(count)))
