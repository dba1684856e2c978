"""The tuner in an optimizer's state dict: plain tensors, numbers and strings.

A parameter's displacement stands in its state, the tuner in every group: that is what torch's own
checkpointing, distributed or not, carries along. Written as plain numbers the tuner compares equal
to itself, which the distributed one asks for.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import edits, vectors
from mechanic.torch.capture import is_traced
from mechanic.torch.counts import Counted
from mechanic.torch.measure import has_extremes
from mechanic.torch.mechanism import MECHANISM, Mechanism
from mechanic.torch.rates import EFFECTIVE_LR, publish_rates
from mechanic.torch.scalars import BESIDE_STATE, Numbers, pack
from mechanic.torch.scopes import SCOPE, parts_of
from mechanic.torch.sharding import local
from mechanic.torch.vectors import DISPLACEMENT

TUNER = "mechanic"
"""The key of the tuner in `param_groups`."""

_NO_NUMBERS = ("preset", "lrs", "frozen")
_EDITED = "edited"  # only there, and True, where displacements follow edits of the weights
_IDENTITY = {"preset": "preset", "betas": "beta"}  # options, and where a saved tuner has them
_LARGEST = sys.float_info.max
# What the tuner's numbers are at least, where that is not 0: the reward of optax may be below it,
# and the share is divided by.
_LEAST = {"signal": -math.inf, "r": -math.inf, "share": sys.float_info.min}

# Entries of torch's optimizers (and Lion's) that have their parameter's shape. Other packages keep
# one number per row or a projection under the same names.
_SHAPED_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "prev")
_SHAPED_IN = ("torch", "lion_pytorch")
_NO_DISPLACEMENT = (
    "the checkpoint holds a tuner that has run, but no displacement of a parameter. Nothing was "
    "loaded. If it came through torch.distributed.checkpoint, load it into an optimizer that has "
    "made a step, so that there is a place for them."
)
_OF_ADAM = {"step", "exp_avg", "exp_avg_sq"}  # either all of them are there, or none


def publish(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Write the tuner into the groups."""
    saved = _save(mechanism)
    for group in optimizer.param_groups:
        group[TUNER] = saved


@contextmanager
def publishing(optimizer: Optimizer) -> Iterator[None]:
    """Around the base's `state_dict`: write the tuner into the groups, after the user's hooks."""

    def publish_all(_: Optimizer) -> None:
        for part in parts_of(optimizer):
            edits.settle(part.optimizer, part.mechanism)
            publish(part.optimizer, part.mechanism)

    handle = optimizer.register_state_dict_pre_hook(publish_all)
    try:
        yield
    finally:
        handle.remove()


def with_rates_of_now(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose learning rates in force do not change with later steps, and are numbers,
    so that a script may write its groups as JSON."""
    for group in state_dict.get("param_groups", ()):
        rate = group.get(EFFECTIVE_LR) if isinstance(group, dict) else None
        if isinstance(rate, Tensor):
            has_value = rate.device.type != "meta" and not is_traced()
            group[EFFECTIVE_LR] = rate.item() if has_value else rate.clone()
    return state_dict


def strip(optimizer: Optimizer) -> None:
    """Take everything that belongs to the tuner out of an optimizer."""
    for group in optimizer.param_groups:
        group.pop(TUNER, None)
        group.pop(EFFECTIVE_LR, None)
        group.pop(SCOPE, None)
    for param, state in list(optimizer.state.items()):
        is_own = isinstance(state, dict)  # some bases keep a number there, under a name
        if is_own and state.pop(DISPLACEMENT, None) is not None and not state:
            del optimizer.state[param]


@contextmanager
def restoring(optimizer: Optimizer) -> Iterator[None]:
    """Around the base's `load_state_dict`: check the checkpoint before anything is loaded, keep
    the displacements from being cast to the parameters' dtype, and load the tuner.

    It is done in hooks, so that the user's own hooks before it have had their say on the state
    dict, and those after it find everything loaded.
    """
    saved: dict[str, dict[str, Any]] = {}
    displacements: dict[Tensor, Tensor] = {}

    def take_out(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        _check_scopes(optimizer, state_dict["param_groups"])
        _check_groups(optimizer, state_dict)
        saved.update(_tuners_for(optimizer, state_dict["param_groups"]))
        state, found = _split_state(optimizer, state_dict)
        displacements.update(found if any(saved.values()) else {})
        if any(own.get("steps") for own in saved.values()) and not displacements:
            raise ValueError(_NO_DISPLACEMENT)
        own_groups = [  # the rate in force may be a tensor, which torch would copy
            {name: value for name, value in group.items() if name != EFFECTIVE_LR}
            for group in state_dict["param_groups"]
        ]
        own_state = {key: own for key, own in state.items() if own != {}}
        return {**state_dict, "state": own_state, "param_groups": own_groups}

    def put_back(_: Optimizer) -> None:
        _check_settings(optimizer, had[1])
        for name, part, mechanism in parts_of(optimizer):
            for param in chain.from_iterable(group["params"] for group in part.param_groups):
                if param in displacements:
                    optimizer.state[param][DISPLACEMENT] = displacements[param].to(
                        device=param.device,
                        dtype=vectors.displacement_dtype(param, mechanism.options),
                        copy=True,
                    )
            load_tuner(mechanism, saved.get(name, {}))
            mechanism.history.has_met_extremes = has_extremes(part, mechanism.home)
            publish_rates(mechanism.scale, part.param_groups)
            publish(part, mechanism)

    had = optimizer.state, optimizer.param_groups
    known = [(part.mechanism, dict(vars(part.mechanism))) for part in parts_of(optimizer)]
    before = optimizer.register_load_state_dict_pre_hook(take_out)
    after = optimizer.register_load_state_dict_post_hook(put_back, prepend=True)
    try:
        yield
    except BaseException:  # torch's own, or a user's hook: all that is loaded is new objects
        optimizer.state, optimizer.param_groups = had
        for mechanism, attributes in known:
            vars(mechanism).update(attributes)
        raise
    finally:
        before.remove()
        after.remove()


def _check_scopes(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    if not tuner_in(groups):
        return
    own, theirs = [
        list(dict.fromkeys(group.get(SCOPE, "all") for group in some))
        for some in (optimizer.param_groups, groups)
    ]
    if own != theirs:
        raise ValueError(
            f"the checkpoint was made with other scopes: it has a scale for {', '.join(theirs)}, "
            f"and this optimizer for {', '.join(own)}. Nothing was loaded. Call mechanize with the "
            "same scope= as in the run that made it."
        )


def _tuners_for(optimizer: Any, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tuner that a checkpoint's groups hold for each part of an optimizer, checked."""
    found = {}
    for name, _, mechanism in parts_of(optimizer):
        pairs = zip(groups, optimizer.param_groups, strict=True)
        mine = [theirs for theirs, group in pairs if group.get(SCOPE, name) == name]
        found[name] = tuner_in(mine)
        check_tuner(mechanism, found[name])
    return found


def _split_state(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> tuple[dict[Any, Any], dict[Tensor, Tensor]]:
    """The base's state in a checkpoint, and the displacements, both checked."""
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(state_dict["state"])
    displacements: dict[Tensor, Tensor] = {}
    for key, param in zip(ids, params, strict=True):
        if DISPLACEMENT in state.get(key, {}):
            state[key] = own = dict(state[key])
            displacements[param] = own.pop(DISPLACEMENT)
            _check_displacement(optimizer, key, param, displacements[param])
        _check_base_state(optimizer, key, param, state.get(key, {}))
    return state, displacements


def _save(mechanism: Mechanism) -> dict[str, Any]:
    if mechanism.home.type == "meta" or is_traced():
        return {}  # there are no numbers
    numbers = mechanism.scalars.read()._asdict()
    state = numbers.pop("state")._asdict()
    counted = mechanism.counts.read()._asdict()
    tensors = {name: value.tolist() for name, value in (state | numbers | counted).items()}
    lrs = [float(lr) for lr in mechanism.history.lrs]
    own = {"preset": mechanism.options.preset, "lrs": lrs, "frozen": mechanism.frozen}
    return own | ({_EDITED: True} if edits.are_followed(mechanism) else {}) | tensors


def tuner_in(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The tuner that a checkpoint's groups hold; nothing if it is a plain optimizer's."""
    saved: dict[str, Any] = groups[0].get(TUNER, {}) if groups else {}
    return saved


def load_tuner(mechanism: Mechanism, saved: dict[str, Any]) -> None:
    """Set the tuner to what was saved, or start it anew where nothing was."""

    mechanism.reset()
    edits.resume(mechanism, are_followed=saved.get(_EDITED, False))
    if not saved:
        return
    scalars, counts = mechanism.scalars.packed, mechanism.counts.packed

    def read(name: str) -> Tensor:
        return torch.tensor(saved[name], dtype=scalars.dtype, device=scalars.device)

    kind = tuner.state_type(mechanism.options)
    state = kind(*map(read, kind._fields))
    scalars.copy_(pack(Numbers(state, *map(read, BESIDE_STATE))))
    counts.copy_(torch.tensor([saved[name] for name in Counted._fields], device=counts.device))
    mechanism.counts.skips_on_host = saved["skipped_in_a_row"]
    mechanism.history.resume_at(saved["updates"], saved["lrs"])
    mechanism.frozen, mechanism.scalars.observed = saved["frozen"], None


def _check_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if own != saved:
        raise ValueError(
            f"the checkpoint is of another model: its groups hold {saved} parameters, this "
            f"optimizer's {own}. Nothing was loaded."
        )


def check_tuner(mechanism: Mechanism, saved: dict[str, Any]) -> None:
    """Refuse a tuner that is not of the same kind."""
    if not saved:
        return
    options = mechanism.options
    _check_is_dict(saved)
    own = {"preset": options.preset, "betas": list(options.betas)}
    theirs = own | {key: saved[name] for key, name in _IDENTITY.items() if name in saved}
    differing = [name for name in own if own[name] != theirs[name]]
    if differing:
        what = " and ".join(f"{name}={theirs[name]!r} (here {own[name]!r})" for name in differing)
        fix = ", ".join(f"{name}={theirs[name]!r}" for name in differing)
        raise ValueError(
            f"the checkpoint is of another tuner: it was made with {what}. Nothing was loaded. "
            f"Call mechanize(optimizer, {fix}) to go on from it."
        )
    check_names(saved, tuner.state_type(options))
    for name, value in saved.items():
        if kind := _what_is_wrong(name, value, options):
            raise ValueError(
                f"the checkpoint's tuner is damaged: {name} must be {kind}, and is {value!r}. "
                "Nothing was loaded."
            )


def _check_is_dict(saved: Any) -> None:
    if not isinstance(saved, dict):
        raise ValueError(
            f"the checkpoint's tuner is damaged: it must be a dict, and is {saved!r}. "
            "Nothing was loaded."
        )


def check_names(saved: dict[str, Any], kind: type[tuner.State]) -> None:
    """Refuse a tuner that lacks a number, or has one of which nothing is known."""
    expected = {*_NO_NUMBERS, *kind._fields, *BESIDE_STATE, *Counted._fields}
    if missing := sorted(expected - saved.keys()):
        raise ValueError(
            f"the checkpoint's tuner is incomplete: it lacks {', '.join(missing)}. "
            "Nothing was loaded. It may be of another version of mechanic."
        )
    if unknown := sorted(map(str, saved.keys() - expected - {_EDITED})):
        raise ValueError(
            f"the checkpoint's tuner is of another version of mechanic: it has "
            f"{', '.join(unknown)}, of which this one knows nothing. Nothing was loaded."
        )


def _what_is_wrong(name: str, value: Any, options: Options) -> str | None:
    """What an entry of a saved tuner has to be, if it is not."""
    if name in ("frozen", _EDITED):
        return None if type(value) is bool else "True or False"
    if name in Counted._fields:
        return None if type(value) is int and 0 <= value < 1 << 63 else "a count"
    if name == "preset":
        return None
    least = _LEAST.get(name, 0.0)
    kind = "number" if least < 0 else f"number of at least {least:.2g}"
    if options.skip_nonfinite and name != "signal":  # else a run may go on with NaN
        kind = f"finite {kind}"

    def is_sound(number: Any) -> bool:
        if type(number) is bool or not isinstance(number, (int, float)):
            return False
        is_finite = -_LARGEST <= number <= _LARGEST  # which an int beyond all floats is not
        return number >= least if is_finite else not kind.startswith("finite")

    if name != "lrs" and name not in tuner.PER_BETA:
        return None if is_sound(value) else f"a {kind}"
    is_list = isinstance(value, (list, tuple)) and all(map(is_sound, value))
    if name == "lrs":
        return None if is_list else f"a list, each entry a {kind}"
    count = len(options.betas)
    return None if is_list and len(value) == count else f"{count} times a {kind}"


def _check_displacement(
    optimizer: Optimizer, key: Any, param: Tensor, displacement: Tensor
) -> None:
    """Refuse one that does not fit, or is damaged. Only `skip_nonfinite=False` lets a run go on
    with NaN, and then from there."""
    if not isinstance(displacement, Tensor):
        raise ValueError(
            f"the checkpoint is damaged: the displacement of parameter {key} must be a tensor, and "
            f"is {displacement!r}. Nothing was loaded."
        )
    _check_shape(optimizer, key, "displacement", displacement, vectors.displacement_shape(param))
    own: Any = local(displacement)
    skips = getattr(optimizer, MECHANISM).options.skip_nonfinite
    if skips and own.device.type != "meta" and not is_traced() and not own.isfinite().all():
        raise ValueError(
            f"the checkpoint is damaged: the displacement of parameter {key} holds NaN or inf. "
            "Nothing was loaded."
        )


def _check_settings(optimizer: Any, had: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint of another optimizer, without whose settings every step would fail. Those
    that a new version has added are there once it is loaded."""
    for group, before in zip(optimizer.param_groups, had, strict=True):
        missing = sorted((optimizer.defaults.keys() & before.keys()) - group.keys())
        if missing and _is_of_torch(optimizer):
            raise ValueError(
                f"the checkpoint is of another optimizer: its groups lack {', '.join(missing)}, "
                f"which {type(optimizer)._base.__name__} needs. Nothing was loaded."
            )


def _is_of_torch(optimizer: Any) -> bool:
    return type(optimizer)._base.__module__.split(".")[0] in _SHAPED_IN


def _check_base_state(optimizer: Any, key: Any, param: Tensor, state: Any) -> None:
    if not _is_of_torch(optimizer):
        return
    if isinstance(optimizer, (Adam, AdamW)) and isinstance(state, dict):
        lacking = sorted(_OF_ADAM - state.keys())
        if 0 < len(lacking) < len(_OF_ADAM):
            raise ValueError(
                f"the checkpoint is damaged: the state of parameter {key} lacks "
                f"{', '.join(lacking)}. Nothing was loaded."
            )
    for entry in _SHAPED_LIKE_PARAMETER:
        saved = state.get(entry) if isinstance(state, dict) else None
        if isinstance(saved, Tensor) and saved.dim():  # some keep a single number
            _check_shape(optimizer, key, entry, saved, tuple(param.shape))


def _check_shape(
    optimizer: Optimizer, key: Any, what: str, saved: Tensor, expected: tuple[int, ...]
) -> None:
    if tuple(saved.shape) != expected:
        names = chain.from_iterable(g.get("param_names", []) for g in optimizer.param_groups)
        name = dict(enumerate(names)).get(key, key)
        raise ValueError(
            f"the checkpoint is of another model: the {what} of parameter {name} has shape "
            f"{tuple(saved.shape)} in it, where this model needs {expected}. Nothing was loaded."
        )
