"""Scopes: which parameters share a scale.

A scope is a set of groups, and has a tuner of its own. Its part of the optimizer is an optimizer of
the same class that has the groups of the scope alone, the very dicts that the whole one has, and
the state of the whole one. `mechanic.torch.scoped` has the step.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from mechanic.options import REST, Options, refuse_unmatched
from mechanic.torch import vectors
from mechanic.torch.mechanism import MECHANISM, Mechanism
from mechanic.torch.sharding import Ranks, ranks_of
from mechanic.torch.twin import OWN

SCOPE = "mechanic_scope"
"""The key of a scope's name in `param_groups`."""


class Part(NamedTuple):
    """The part of an optimizer that has a scale of its own: a scope, or all of it."""

    name: str
    optimizer: Any
    mechanism: Mechanism


class Scopes:
    """The tuners of one optimizer, one for each scope."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.mechanisms: dict[str, Mechanism] = {}
        self._optimizers: dict[str, Any] = {}
        self._ranks: Ranks | None = None

    def parts(self, optimizer: Any) -> list[Part]:
        """The parts of the optimizer as its groups are now."""
        name_scopes(optimizer, self.options)
        groups: dict[str, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            groups.setdefault(group[SCOPE], []).append(group)
        for gone in self.mechanisms.keys() - groups.keys():
            del self.mechanisms[gone]
        return [self._part(name, optimizer, own) for name, own in groups.items()]

    def _part(self, name: str, optimizer: Any, groups: list[dict[str, Any]]) -> Part:
        if name not in self.mechanisms:
            options = replace(self.options, scope="all", max_grad_norm=math.inf)
            home = vectors.home_of([], groups) or torch.device("cpu")
            self.mechanisms[name] = Mechanism(options, home)
        if name not in self._optimizers:
            self._optimizers[name] = object.__new__(type(optimizer))
        part = Part(name, self._optimizers[name], self.mechanisms[name])
        shared = {key: value for key, value in vars(optimizer).items() if key not in OWN}
        vars(part.optimizer).clear()
        vars(part.optimizer).update(shared | {MECHANISM: part.mechanism})
        part.optimizer.param_groups, part.optimizer.state = groups, optimizer.state
        return part

    def find_ranks(self, optimizer: Any) -> Ranks | None:
        """The processes that share the parameters of any scope, if any do."""
        self._ranks = ranks_of(optimizer, None, self._ranks)
        return self._ranks if self._ranks.group is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizers": {}, "_ranks": None}  # a copy finds its own


def parts_of(optimizer: Any) -> list[Part]:
    """The parts of a mechanized optimizer that have a scale of their own; all of it, if it has one
    scale."""
    own = getattr(optimizer, MECHANISM)
    return own.parts(optimizer) if isinstance(own, Scopes) else [Part("all", optimizer, own)]


def name_scopes(optimizer: Any, options: Options) -> None:
    """Write into each group the scope that it belongs to. A group whose parameters belong to
    several becomes several groups."""
    groups = optimizer.param_groups
    if all(SCOPE in group for group in groups):
        return
    named = [own for place, group in enumerate(groups) for own in _divide(group, place, options)]
    if not any(SCOPE in group for group in groups):  # what joins later need not match all
        names = [name for group in groups for name in group.get("param_names", ())]
        refuse_unmatched(options, {group[SCOPE] for group in named}, names)
    if len(named) > len(groups) and any("initial_lr" in group for group in groups):
        raise ValueError(
            f"scope={_typed(options.scope)!r} divides the groups of this optimizer, and its "
            "scheduler has been made for the groups that it had. Call mechanize before the "
            "scheduler is made."
        )
    if len(named) > len(groups):
        groups[:] = named
    for group, own in zip(groups, named, strict=True):
        group[SCOPE] = own[SCOPE]


def _divide(group: dict[str, Any], place: int, options: Options) -> Iterator[dict[str, Any]]:
    if SCOPE in group:
        yield group
        return
    scopes = list(_scopes_in(group, place, options))
    if len(set(scopes)) <= 1:
        yield {**group, SCOPE: scopes[0] if scopes else str(place)}
        return
    for scope in dict.fromkeys(scopes):
        chosen = [own == scope for own in scopes]
        name = f"{group['name']}/{scope}" if "name" in group else scope
        yield {
            **group,
            **{key: _only(group[key], chosen) for key in ("params", "param_names") if key in group},
            "name": name,
            SCOPE: scope,
        }


def _scopes_in(group: dict[str, Any], place: int, options: Options) -> Iterator[str]:
    """The scope of each parameter of a group."""
    names, count = group.get("param_names"), len(group["params"])
    scope: Any = options.scope
    if scope == "group":
        yield from [str(group.get("name", place))] * count
    elif scope == "tensor":
        whole = group.get("name", f"group{place}")
        yield from names or (f"{whole}.tensor{i}" for i in range(count))
    elif names is None:
        raise ValueError(
            f"scope={_typed(scope)!r} goes by the names of the parameters, which this "
            "optimizer does not know. Make it from model.named_parameters()."
        )
    else:
        for name in names:
            yield next((own for own, pattern in scope if fnmatchcase(name, pattern)), REST)


def _typed(scope: Any) -> Any:
    """The option as it was typed."""
    return scope if isinstance(scope, str) else dict(scope)


def _only(values: list[Any], chosen: list[bool]) -> list[Any]:
    return [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]
