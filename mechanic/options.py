"""The options of a tuner: one frozen dataclass that checks its values."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

REST = "rest"
"""The scope of the parameters that no pattern matches."""

Scope = Literal["all", "group", "tensor"] | tuple[tuple[str, str], ...]
Preset = Literal["default", "paper", "mechanic-pytorch", "optax"]
"""The name of a rule, as a type for annotations."""

# Algorithm 1, line 1: β = (0.9, 0.99, ..., 0.999999).
PAPER_BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


class _Values(NamedTuple):
    """What a preset uses for the options that are not given."""

    s_init: float | Literal["relative"]
    s_decay: float
    betas: tuple[float, ...] = PAPER_BETAS


_PRESETS: dict[Preset, _Values] = {
    "default": _Values(s_init="relative", s_decay=0.0, betas=(0.99,)),
    "paper": _Values(s_init=1e-8, s_decay=0.01),  # Algorithm 1, line 1
    "mechanic-pytorch": _Values(s_init=1e-8, s_decay=0.01),  # its version 0.0.1
    "optax": _Values(s_init=1e-6, s_decay=0.01),  # optax.contrib.mechanize, 0.2.8
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the tuner. `None` stands for the value of the preset.

    Raises:
        ValueError: if a value is out of range, with the range and what to use.

    Examples:
        >>> from mechanic import Options
        >>> Options(preset="paper").s_init
        1e-08
        >>> Options(s_decay=-1.0)
        Traceback (most recent call last):
            ...
        ValueError: s_decay must be a finite number of at least 0, got -1.0. Use 0.01 for ...
    """

    preset: Preset = "default"
    """The rule that tunes: `default`, or one as published: `paper`, `mechanic-pytorch`, `optax`."""

    s_init: float | Literal["relative"] | None = None
    """The first non-zero scale: a number, or `"relative"` to the size of the weights, as
    `tuner.start` computes it."""

    s_decay: float | None = None
    """The λ of Algorithm 1. In the presets other than the default, a value above 0 makes the result
    depend on the learning rate that is typed."""

    betas: tuple[float, ...] = None  # type: ignore[assignment]
    """The discount of each tuner; the scales of the tuners are added up."""

    max_scale: float = math.inf
    """A cap: the effective learning rate is at most `max_scale` times the one that is typed."""

    skip_nonfinite: bool = True
    """Skip a step whose gradients hold NaN or inf. On a GPU, fused optimizers need no host
    synchronisation for this; the others copy one scalar to the host in each step."""

    max_grad_norm: float = math.inf
    """Clip the gradients to this norm within the step, as `torch.nn.utils.clip_grad_norm_` does."""

    sums_in_backward: bool = False
    """On a GPU, take the sums over each gradient while backward runs, as soon as it is complete."""

    displacement: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which displacements are stored. In bfloat16 they are rounded in such a way
    that many small updates still add up."""

    scope: Scope = "all"
    """Which parameters share a scale: `all`, those of a `group`, each `tensor` alone, or those of a
    scope that is given by its name and a pattern of the parameters' names, in a dict of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in _PRESETS:
            known = ", ".join(repr(name) for name in get_args(Preset))
            raise ValueError(f"preset must be one of {known}, got {self.preset!r}.")
        preset = _PRESETS[self.preset]
        if self.s_init is None:
            object.__setattr__(self, "s_init", preset.s_init)
        if self.s_decay is None:
            object.__setattr__(self, "s_decay", preset.s_decay)
        is_relative = isinstance(self.s_init, str) and self.s_init == "relative"
        if not is_relative and not (_is_real(self.s_init) and self.s_init > 0):
            raise ValueError(
                f"s_init must be a finite number above 0 or 'relative', got {self.s_init!r}. "
                "Leave it out for the preset's own start."
            )
        if not (_is_real(self.s_decay) and self.s_decay >= 0):
            raise ValueError(
                f"s_decay must be a finite number of at least 0, got {self.s_decay!r}. "
                "Use 0.01 for the paper's decay, 0 for none."
            )
        betas = preset.betas if self.betas is None else _checked_betas(self.betas)
        object.__setattr__(self, "betas", betas)
        if not (self.max_scale == math.inf or (_is_real(self.max_scale) and self.max_scale > 0)):
            raise ValueError(
                f"max_scale must be a number above 0, got {self.max_scale!r}. "
                "Leave it out for no cap."
            )
        limit = self.max_grad_norm
        if not (limit == math.inf or (_is_real(limit) and limit > 0)):
            raise ValueError(
                f"max_grad_norm must be a number above 0, got {limit!r}. Leave it out for no clip."
            )
        for name in ("s_init", "s_decay", "max_scale", "max_grad_norm"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if isinstance(value, str) else float(value))
        for name in ("skip_nonfinite", "sums_in_backward"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}.")
        if self.displacement not in ("float32", "bfloat16"):
            raise ValueError(
                f"displacement must be 'float32' or 'bfloat16', got {self.displacement!r}."
            )
        object.__setattr__(self, "scope", _checked_scope(self.scope))


def _is_real(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number, of any library that registers its types as `Real`."""
    if type(value) is bool or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _checked_betas(betas: Any) -> tuple[float, ...]:
    fix = f"Use a sequence of numbers from 0 to 1, such as {PAPER_BETAS}."
    try:
        if isinstance(betas, str):
            raise TypeError
        values = tuple(float(beta) for beta in betas)
    except (TypeError, ValueError):
        raise ValueError(f"betas must be a sequence of numbers, got {betas!r}. {fix}") from None
    if not values or not all(0.0 <= beta <= 1.0 for beta in values):
        raise ValueError(f"betas must be at least one number from 0 to 1, got {values}. {fix}")
    return values


def _checked_scope(scope: Any) -> Scope:
    if isinstance(scope, str) and scope in ("all", "group", "tensor"):
        return scope  # type: ignore[return-value]
    pairs = tuple(scope.items()) if isinstance(scope, Mapping) else scope
    is_sound = isinstance(pairs, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(one, str) for one in pair)
        for pair in pairs
    )
    if not is_sound or not pairs:
        raise ValueError(
            "scope must be 'all', 'group', 'tensor' or a dict of names and patterns, got "
            f"{scope!r}. Write scope={{'text': 'text_encoder.*', 'unet': 'unet.*'}} for two scales."
        )
    if REST in dict(pairs):
        raise ValueError(
            f"scope must not name a part {REST!r}, which is that of the parameters that no pattern "
            f"matches; got {scope!r}."
        )
    return pairs


def refuse_unmatched(options: Options, scopes: Collection[str], names: list[str]) -> None:
    """Refuse patterns that match none of the parameters of these names, or only such as an earlier
    one matches."""
    pairs = () if isinstance(options.scope, str) else options.scope
    for scope, pattern in pairs:
        if scope not in scopes:
            known = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise ValueError(
                f"scope: no parameter is left for {scope!r}, whose pattern is {pattern!r}. "
                f"The names are {known}. Patterns are those of a shell: 'encoder.*', '*.bias'."
            )
