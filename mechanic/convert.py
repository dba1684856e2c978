"""One portable state: the checkpoint of a mechanized torch optimizer as the state of a mechanized
optax transformation, and back.

    state = convert.from_torch(optimizer.state_dict(), tx.init(params), arrange=to_jax)
    optimizer.load_state_dict(convert.to_torch(state, optimizer, arrange=to_torch))

The numbers of the tuner, the displacements and the state of the base go over; the parameters
themselves are the model's, and have to be taken over as usual. The function that does so for them,
from a list of arrays to a tree or back, is `arrange`: transposed kernels are transposed in the
state as well.

Numbers go over bit for bit where the dtype is the same. A tuner in torch has float64, and so has
one in JAX where `jax_enable_x64` is set. Else it has float32: what comes from torch is then
rounded, once, and what goes to torch is not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mechanic.tuner import RULES

if TYPE_CHECKING:
    from mechanic.optax.state import MechanicState

Arrays: TypeAlias = list[Any]

TUNER, DISPLACEMENT, BETA = "mechanic", "mechanic_displacement", "beta"
"""The keys of the tuner in a group of a torch checkpoint, of the displacement in the state of a
parameter, and of what a tuner in JAX may have rounded."""

# What torch's optimizers keep for a parameter, and the field of optax's states that is the same.
_FIELDS = {
    "step": "count",
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "momentum_buffer": "trace",
    "square_avg": "nu",
    "sum": "sum_of_squares",
}
_ENTRIES = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "RMSprop": ("step", "square_avg"),
    "Adagrad": ("step", "sum"),
}


def from_torch(
    state_dict: dict[str, Any], state: Any, *, arrange: Callable[[Arrays], Any] | None = None
) -> Any:
    """The state of a mechanized transformation that goes on where a torch optimizer stopped.

    Args:
        state_dict: `optimizer.state_dict()` of a mechanized optimizer.
        state: `tx.init(params)`, with the same preset; it may hold the state of `mechanize` within
            a larger one.
        arrange: a list of NumPy arrays, one for each parameter of the optimizer, as a tree like
            `params`. None takes them in the order of the tree's leaves.

    Raises:
        ValueError: if the two are not of the same kind.
    """
    import jax

    from mechanic.optax.readers import find
    from mechanic.optax.state import MechanicState

    own = find(state)
    saved = _tuner_in(state_dict)
    if saved["frozen"]:
        raise ValueError(
            "the checkpoint's scale is frozen, which a state of optax cannot be. Call "
            "tuner(optimizer).unfreeze() before you save it."
        )
    after = _with_numbers(own, saved, [group["lr"] for group in state_dict["param_groups"]])
    after = _with_arrays(after, _entries_of(state_dict), arrange)
    return jax.tree.map(
        lambda node: after if node is own else node,
        state,
        is_leaf=lambda node: isinstance(node, MechanicState),
    )


def _tuner_in(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = state_dict.get("param_groups") or [{}]
    saved = groups[0].get(TUNER)
    if not saved:
        raise ValueError(
            "the checkpoint is of a plain optimizer: it holds no tuner. Save the state dict of "
            "mechanize(optimizer)."
        )
    return dict(saved)


def _with_numbers(own: MechanicState, saved: dict[str, Any], lrs: list[Any]) -> MechanicState:
    """A state with the tuner of a checkpoint."""
    import jax.numpy as jnp

    def read(name: str, had: Any) -> Any:
        value = np.asarray(saved[name], had.dtype)
        if value.shape != had.shape:
            raise ValueError(
                f"the checkpoint is of another tuner: its {name} has shape {value.shape}, and that "
                f"of the state {had.shape}. Call mechanize(tx, betas=...) with the same betas."
            )
        return jnp.asarray(value)

    numbers, names = own.numbers, own.numbers.tuner._fields
    rule = RULES.get(saved["preset"])
    if rule is None or rule.state is not type(numbers.tuner):
        raise ValueError(
            f"the checkpoint is of another tuner: it was made with preset={saved['preset']!r}. "
            f"Call mechanize(tx, preset={saved['preset']!r})."
        )
    if missing := [name for name in names if name not in saved]:
        raise ValueError(f"the checkpoint is damaged: its tuner lacks {', '.join(missing)}.")
    betas = np.asarray(saved[BETA], numbers.scale.dtype)
    if not np.array_equal(betas, np.asarray(getattr(numbers.tuner, BETA, betas))):
        raise ValueError(
            f"the checkpoint is of another tuner: it was made with betas={saved[BETA]!r}. "
            f"Call mechanize(tx, betas={tuple(saved[BETA])!r})."
        )
    state = numbers.tuner._replace(**{n: read(n, getattr(numbers.tuner, n)) for n in names})
    beside = [name for name in numbers._fields if name in saved]
    numbers = numbers._replace(tuner=state, **{n: read(n, getattr(numbers, n)) for n in beside})
    counts = own.counts._replace(**{n: read(n, getattr(own.counts, n)) for n in own.counts._fields})
    rates = own.rates
    if rates is not None:
        typed = jnp.asarray(float(lrs[0]), rates.typed.dtype)
        measured = saved["lrs"][0] if saved["lrs"] else 0.0
        rates = type(rates)(typed, typed, jnp.asarray(measured, rates.typed.dtype))
    return own._replace(numbers=numbers, counts=counts, rates=rates)


def _entries_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint holds of each parameter, in their order."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    entries = [dict(state_dict["state"].get(key, {})) for key in keys]
    known = {*_FIELDS, DISPLACEMENT}
    if unknown := sorted(
        {name for own in entries for name in own if own[name] is not None} - known
    ):
        raise ValueError(
            f"the state of this base cannot be carried over: it has {', '.join(unknown)}. "
            f"Known are {', '.join(_FIELDS)}."
        )
    return entries


def _with_arrays(
    own: MechanicState, entries: list[dict[str, Any]], arrange: Callable[[Arrays], Any] | None
) -> MechanicState:
    """A state with the displacements and the base's state of a checkpoint."""
    import jax
    import optax

    like = jax.tree.leaves(own.displacement)
    if arrange is None and len(like) != len(entries):
        raise ValueError(
            f"the checkpoint has {len(entries)} parameters, and the state {len(like)}. Give the "
            "function that makes a tree like params of the model's arrays as arrange=."
        )

    def tree_of(name: str, target: Any) -> Any:
        arrays = [_array(one.get(name)) for one in entries]
        if any(array is None for array in arrays):
            shapes = _shapes_of(entries, arrays, name)
            arrays = [np.zeros(s) if a is None else a for s, a in zip(shapes, arrays, strict=True)]
        structure: Any = jax.tree.structure(target)
        tree = structure.unflatten(arrays) if arrange is None else arrange(arrays)
        return jax.tree.map(_fitted, target, tree)

    base = own.base
    names = {name for one in entries for name in one if one[name] is not None} - {DISPLACEMENT}
    for name in sorted(names):
        field = _FIELDS[name]
        found = [value for _, value in optax.tree.get_all_with_path(base, field)]
        if not found:
            raise ValueError(
                f"the base of the state keeps no {field}, for torch's {name}. Mechanize the "
                "transformation that is the same as the optimizer."
            )
        if name == "step":
            step = max(float(one[name]) for one in entries if name in one)
            value = found[0].dtype.type(step)
            base = optax.tree.set(base, **{field: jax.numpy.asarray(value)})
        else:
            base = optax.tree.set(base, **{field: tree_of(name, found[0])})
    return own._replace(base=base, displacement=tree_of(DISPLACEMENT, own.displacement))


def _shapes_of(entries: list[dict[str, Any]], arrays: Arrays, name: str) -> list[tuple[int, ...]]:
    """The shapes of the parameters, as far as a checkpoint tells them."""
    shapes = []
    for one, array in zip(entries, arrays, strict=True):
        others = (_array(value) for key, value in one.items() if key != "step")
        found = array if array is not None else next((o for o in others if o is not None), None)
        if found is None:
            raise ValueError(
                f"a parameter of the checkpoint has no {name}, nor anything else: it has had no "
                "gradient yet. Save the checkpoint after a step in which all parameters have one."
            )
        shapes.append(found.shape)
    return shapes


def _array(value: Any) -> Any:
    """A tensor as an array of NumPy, in a dtype that NumPy has."""
    if value is None:
        return None
    import torch

    tensor = value.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _fitted(target: Any, value: Any) -> Any:
    """An array that takes the place of another one."""
    import jax.numpy as jnp

    if np.iscomplexobj(target) and not np.iscomplexobj(value):  # torch has pairs of real numbers
        value = value[..., 0] + 1j * value[..., 1]
    if value.shape != target.shape:
        raise ValueError(
            f"an array of the checkpoint has shape {value.shape}, where the state has "
            f"{target.shape}. Give the function that takes the model's arrays over, kernels "
            "transposed where they are, as arrange=."
        )
    return jnp.asarray(value, target.dtype)


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

    Raises:
        ValueError: if the two are not of the same kind.
    """
    import jax
    import optax

    from mechanic.optax.readers import find

    own, state_dict = find(state), optimizer.state_dict()
    saved = _saved_from(own, _tuner_in(state_dict), state_dict["param_groups"])
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def listed(tree: Any) -> Arrays:
        arrays = jax.tree.leaves(tree) if arrange is None else arrange(tree)
        return [_tensor(*pair) for pair in zip(arrays, params, strict=True)]

    columns = {DISPLACEMENT: listed(own.displacement)}
    for name in _kept_by(optimizer):
        found = [value for _, value in optax.tree.get_all_with_path(own.base, _FIELDS[name])]
        if not found:
            continue
        if name == "step":
            columns[name] = [_step(found[0]) for _ in params]
        else:
            columns[name] = listed(found[0])
    groups = [{**group, TUNER: saved} for group in state_dict["param_groups"]]
    keys = chain.from_iterable(group["params"] for group in groups)
    rows = ({n: column[i] for n, column in columns.items()} for i in range(len(params)))
    return {**state_dict, "state": dict(zip(keys, rows, strict=True)), "param_groups": groups}


def _kept_by(optimizer: Any) -> tuple[str, ...]:
    """What an optimizer keeps for a parameter, as far as it can be carried over."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    for name in names:
        if name in _ENTRIES:
            return _ENTRIES[name]
    raise ValueError(
        f"the state of {names[0]} cannot be carried over. Known are {', '.join(_ENTRIES)}."
    )


def _saved_from(
    own: MechanicState, template: dict[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The tuner as a torch checkpoint has it. The βs, which JAX may have rounded, are torch's."""
    values = own.numbers.tuner._asdict()
    if RULES[template["preset"]].state is not type(own.numbers.tuner):
        raise ValueError(
            f"the state is of another tuner than the optimizer, whose preset is "
            f"{template['preset']!r}. Call mechanize(optimizer, preset=...) with the preset of the "
            "transformation."
        )
    values |= own.numbers._asdict() | own.counts._asdict()
    values = {n: np.asarray(v).tolist() for n, v in values.items() if n in template and n != BETA}
    lrs = [float(group["lr"]) for group in groups]
    if own.rates is not None:
        lrs = [float(own.rates.measured)] * len(groups)
    return {**template, **values, "lrs": lrs, "frozen": False}


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
