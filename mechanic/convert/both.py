"""What both directions share: what is known of the bases, where a state keeps it, and whether the
two are of the same kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mechanic.tuner import RULES

if TYPE_CHECKING:
    from mechanic.optax.state import MechanicState

Arrays: TypeAlias = list[Any]

TUNER, DISPLACEMENT, BETA = "mechanic", "mechanic_displacement", "beta"
"""The keys of the tuner in a group of a torch checkpoint, of the displacement in the state of a
parameter, and of what a tuner in JAX may have rounded."""

_SCOPE, STEP, COUNT = "mechanic_scope", "step", "count"
_SAME_BASE = "Mechanize the transformation that is the same as the optimizer."

# What torch's optimizers keep for a parameter, and the field of optax's states that is the same.
FIELDS = {
    STEP: COUNT,
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "momentum_buffer": "trace",
    "square_avg": "nu",
    "sum": "sum_of_squares",
}
ENTRIES = {
    "Adam": (STEP, "exp_avg", "exp_avg_sq"),
    "AdamW": (STEP, "exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "RMSprop": (STEP, "square_avg"),
    "Adagrad": (STEP, "sum"),
}
# Options with which they keep something for which optax has no equal
UNEQUAL = ("amsgrad", "centered")
RMSPROP_MOMENTUM = (
    "the momentum of RMSprop cannot be carried over: torch keeps it without the learning rate, and "
    "optax with it. Use RMSprop without momentum, or Adam."
)


def own_in(state: Any) -> MechanicState:
    """The one state of `mechanize` in a larger one."""
    from mechanic.optax.readers import find
    from mechanic.optax.state import all_in

    count = len(all_in(state))
    if count > 1:
        raise ValueError(
            f"one scale can be carried over, and this {type(state).__name__} has {count}. Call "
            "mechanize(tx) without scope=; or, for several calls of mechanize, carry each of their "
            "states over by itself."
        )
    return find(state)


def tuner_in(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The one tuner in a torch checkpoint."""
    groups = state_dict.get("param_groups") or [{}]
    saved = groups[0].get(TUNER)
    if not saved:
        raise ValueError(
            "the checkpoint is of a plain optimizer: it holds no tuner. Save the state dict of "
            "mechanize(optimizer)."
        )
    scopes = list(dict.fromkeys(str(group.get(_SCOPE, "all")) for group in groups))
    if len(scopes) > 1:
        raise ValueError(
            f"one scale can be carried over, and the torch optimizer has {len(scopes)}, for "
            f'{", ".join(scopes)}. Call mechanize(optimizer) with scope="all".'
        )
    return dict(saved)


def check_tuners(own: MechanicState, saved: dict[str, Any]) -> None:
    """Refuse two tuners that are not of the same kind."""
    from mechanic.torch.checkpoint import check_names

    numbers = own.numbers
    preset: Any = saved.get("preset")
    rule = RULES.get(preset)
    if "preset" in saved and (rule is None or rule.state is not type(numbers.tuner)):
        raise ValueError(
            f"torch has another tuner than the state: it was made with preset={preset!r}. "
            f"Call mechanize(tx, preset={preset!r})."
        )
    check_names(saved, type(numbers.tuner))
    betas = np.asarray(saved[BETA], numbers.scale.dtype)
    if not np.array_equal(betas, np.asarray(getattr(numbers.tuner, BETA, betas))):
        raise ValueError(
            f"torch has another tuner than the state: it was made with betas={saved[BETA]!r}. "
            f"Call mechanize(tx, betas={tuple(saved[BETA])!r})."
        )


def places_in(own: MechanicState) -> dict[str, list[int]]:
    """Where among the leaves of the base's state the arrays of each field are, in the order of the
    parameters; `optax.partition` may keep them in several parts. And where its counts are."""
    import jax
    import jax.numpy as jnp

    paths, _ = jax.tree_util.tree_flatten_with_path(own.displacement)
    params = [path for path, _ in paths]
    found: dict[str, list[tuple[Any, int]]] = {COUNT: []}
    for place, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(own.base)[0]):
        names = [getattr(key, "name", None) for key in path]
        known = [depth for depth, name in enumerate(names) if name in FIELDS.values()]
        if known:
            within = path[known[0] + 1 :]
            found.setdefault(str(names[known[0]]), []).append((within, place))
        elif "hyperparams" not in names and jnp.issubdtype(jnp.result_type(leaf), np.inexact):
            raise ValueError(
                "the state of this base cannot be carried over: it has "
                f"{jax.tree_util.keystr(path)}. Known are {', '.join(FIELDS.values())}."
            )
    places = {COUNT: [place for _, place in found.pop(COUNT)]}
    for field, pairs in found.items():
        one = dict(pairs)
        if len(pairs) != len(params) or one.keys() != set(params):
            raise ValueError(
                f"the base of the state keeps {len(pairs)} arrays as {field}, where there are "
                f"{len(params)} parameters: it treats some in another way, as with optax.partition "
                f"or optax.masked. No optimizer of torch does. {_SAME_BASE}"
            )
        places[field] = [one[path] for path in params]
    return places


def check_fields(places: dict[str, list[int]], names: Iterable[str]) -> None:
    """Refuse a base that does not keep what torch's optimizer does, no less and no more."""
    fields = {FIELDS[name]: name for name in names if name != STEP}
    for field in sorted(fields.keys() - places.keys()):
        raise ValueError(
            f"the base of the state keeps no {field}, for torch's {fields[field]}. {_SAME_BASE}"
        )
    for field in sorted(places.keys() - fields.keys() - {COUNT}):
        raise ValueError(
            f"the base of the state keeps a {field}, for which torch's optimizer has nothing. "
            f"{_SAME_BASE}"
        )
