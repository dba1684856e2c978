"""`mechanize`: an optimizer goes in, the same optimizer comes out, tuned.

The optimizer's class is exchanged for a subclass of it that overrides `step`, the two state-dict
methods and what pickles it; nothing is proxied. `mechanic.torch.step` has the step itself.
"""

import copyreg
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

from torch.optim import LBFGS, Optimizer

from mechanic.options import Options, Preset
from mechanic.torch import checkpoint, sharding, vectors, zero
from mechanic.torch.call import unhooked
from mechanic.torch.kernels.listen import listen, stop_listening
from mechanic.torch.mechanism import MECHANISM, NO_PICKLE, Mechanism
from mechanic.torch.modes import MODES, change_mode, has_modes
from mechanic.torch.rates import publish_rates
from mechanic.torch.scopes import Scopes, parts_of
from mechanic.torch.step import step
from mechanic.torch.twin import holds

O = TypeVar("O", bound=Optimizer)
T = TypeVar("T", bound=Optimizer | type[Optimizer])

INNER = ("optimizer", "base_optimizer", "_base_optimizer")
"""Where wrappers such as those of trainers, SAM and Lookahead have the optimizer that they wrap."""

_mechanized: WeakSet[Any] = WeakSet()
"""The optimizers that write their tuner into their groups."""


def mechanize(
    optimizer: T,
    *,
    preset: Preset = "default",
    s_init: float | Literal["relative"] | None = None,
    s_decay: float | None = None,
    betas: Iterable[float] | None = None,
    max_scale: float = float("inf"),
    skip_nonfinite: bool = True,
    max_grad_norm: float = float("inf"),
    sums_in_backward: bool = False,
    displacement: Literal["float32", "bfloat16"] = "float32",
    process_group: Any = None,
    scope: Literal["all", "group", "tensor"] | Mapping[str, str] = "all",
) -> T:
    """Tune the learning rate of an optimizer while it trains.

    The learning rates of the groups become ratios under one learned scale, and a schedule its
    shape; their size no longer matters. The update is

        x_{t+1} = x_ref + S_{t+1}·Δ_{t+1}

    where Δ is the sum of the updates that the base optimizer proposes, of which the default rule
    forgets a part when S changes, and S is learned (`mechanic.tuner`).

    Args:
        optimizer: an optimizer, which is changed in place and returned, or a class of them.
        preset: the rule: the `default`, or `paper`, `mechanic-pytorch` or `optax` as published.
        s_init: the first scale: a number, or `"relative"` to the problem.
        s_decay: the paper's λ, which keeps the weights smaller: 0 in the default preset, 0.01 in
            the others.
        betas: the discounts of the tuners.
        max_scale: a cap: the effective lr is at most this many times the lr that is typed.
        skip_nonfinite: skip a step whose gradients hold NaN or inf, as a whole.
        max_grad_norm: clip the gradients to this norm, in the step, as `clip_grad_norm_` would
            before it.
        sums_in_backward: on a GPU, take the sums over each gradient as it arrives. A gradient must
            not be changed through `.data` after that.
        displacement: the dtype of the displacements, the one slot that is added to the state.
        process_group: the processes that the parameters are spread over, where each holds a part
            of its own: FSDP1, pipeline stages. DTensors (FSDP2, tensor parallelism) and
            ZeroRedundancyOptimizer bring theirs along, and DistributedDataParallel needs none.
        scope: which parameters share a scale: `"all"`, those of each `"group"`, each `"tensor"`
            alone, or those whose names match a pattern, as in `{"text": "text_encoder.*", "unet":
            "unet.*"}`. A group whose parameters belong to several scopes becomes several groups.

    Returns:
        The same optimizer, tuned, or a subclass of the class.

    Raises:
        ValueError: for a bad option, or an optimizer that is mechanized already or cannot be.

    Examples:
        >>> import torch
        >>> from mechanic.torch import mechanize
        >>> weights = torch.nn.Parameter(torch.ones(8))
        >>> optimizer = mechanize(torch.optim.AdamW([weights], lr=1.0))
        >>> isinstance(optimizer, torch.optim.AdamW)
        True
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     ((weights - 3) ** 2).sum().backward()
        ...     optimizer.step()
        >>> bool(((weights - 3).abs() < 0.1).all())
        True

    References:
        Cutkosky, Defazio and Mehta, "Mechanic: A Learning Rate Tuner", 2023.
    """
    options = Options(
        preset=preset,
        s_init=s_init,
        s_decay=s_decay,
        betas=betas,  # type: ignore[arg-type]
        max_scale=max_scale,
        skip_nonfinite=skip_nonfinite,
        max_grad_norm=max_grad_norm,
        sums_in_backward=sums_in_backward,
        displacement=displacement,
        scope=scope,  # type: ignore[arg-type]
    )
    wrapped: Any = _wrap(optimizer, options, process_group)
    return wrapped  # type: ignore[no-any-return]


def _wrap(optimizer: Any, options: Options, process_group: Any) -> Any:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        _refuse_twice(optimizer)
        return mechanized_class(optimizer, options, process_group)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"mechanize takes a torch.optim.Optimizer or a class of them, got {_named(optimizer)}. "
            "Write mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))."
        )
    if zero.is_zero(optimizer):
        zero.check(optimizer, options)
        outer: Any = optimizer
        mechanism = _mechanize(outer.optim, options, outer.process_group)._mechanic
        mechanism.carrier = zero.Carrier(optimizer, mechanism)
        return optimizer
    return _mechanize(optimizer, options, process_group)


def _named(value: object) -> str:
    """What was given, in a few words: a model may take pages."""
    shown = repr(value)
    return shown if len(shown) < 80 and "\n" not in shown else f"a {type(value).__name__}"


def _mechanize(optimizer: O, options: Options, process_group: Any) -> O:
    base = type(optimizer)
    _refuse_twice(base)
    _refuse_replaced_step(optimizer)
    _refuse_what_is_not_tuned(optimizer, options)
    _refuse_several_scales(optimizer, options, process_group)
    sharding.ranks_of(optimizer, process_group)  # what cannot be spread is refused untouched
    mechanized = mechanized_class(base, options)
    with _as_it_was_if_this_fails(optimizer):
        optimizer.__class__ = mechanized
        _attach(optimizer, options, process_group)
    return optimizer


@contextmanager
def _as_it_was_if_this_fails(optimizer: Optimizer) -> Iterator[None]:
    base, had = type(optimizer), dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    state = {k: dict(v) if isinstance(v, dict) else v for k, v in optimizer.state.items()}
    try:
        yield
    except BaseException:
        optimizer.__class__ = base
        _stop_listening(optimizer)
        vars(optimizer).clear()
        vars(optimizer).update(had)
        optimizer.param_groups[:] = [group for group, _ in groups]  # scopes may have divided them
        for group, before in groups:
            group.clear()
            group.update(before)
        optimizer.state.update(state)
        raise


def _attach(optimizer: Optimizer, options: Options, process_group: Any = None) -> None:
    _own_groups(optimizer)
    checkpoint.strip(optimizer)  # what a plain optimizer took from a mechanized one's checkpoint
    setattr(optimizer, MECHANISM, _new_tuner(optimizer, options, process_group))
    for _, part, mechanism in parts_of(optimizer):
        mechanism.find_ranks(part)
        listen(part, mechanism)
        publish_rates(mechanism.scale, part.param_groups)
        checkpoint.publish(part, mechanism)
    optimizer._patch_step_function()
    _rewrap_step(optimizer)
    _mechanized.add(optimizer)


def _new_tuner(optimizer: Optimizer, options: Options, process_group: Any) -> Mechanism | Scopes:
    if options.scope != "all":
        return Scopes(options)
    home = vectors.home_of([], optimizer.param_groups) or sharding.device_of(process_group)
    return Mechanism(options, home, process_group)


def _own_groups(optimizer: Optimizer) -> None:
    """Give an optimizer groups of its own. torch makes the dicts that it is given the groups, so
    that two optimizers made from the same dicts would write into each other's."""
    others = [other for other in _mechanized if other is not optimizer]
    taken = {id(group) for other in others for group in other.param_groups}
    if any(id(group) in taken for group in optimizer.param_groups):
        optimizer.param_groups = [
            dict(group) if id(group) in taken else group for group in optimizer.param_groups
        ]


def take_off(optimizer: Any) -> None:
    """Make a mechanized optimizer one of its own class again, with its own state; what was learned
    is gone."""
    checkpoint.strip(optimizer)
    _stop_listening(optimizer)
    delattr(optimizer, MECHANISM)
    _mechanized.discard(optimizer)
    optimizer.__class__ = type(optimizer)._base
    optimizer._patch_step_function()
    _rewrap_step(optimizer)


def _stop_listening(optimizer: Any) -> None:
    own = vars(optimizer).get(MECHANISM)
    mechanisms = own.mechanisms.values() if isinstance(own, Scopes) else [own] if own else []
    for mechanism in mechanisms:
        stop_listening(mechanism)


def _rewrap_step(optimizer: Optimizer) -> None:
    """Make a scheduler's patch of `optimizer.step` call the step of the present class.

    A scheduler replaces `step` on the instance by a function that notes the call (`_opt_called`)
    and runs the step of the class that the optimizer had then.
    """
    if vars(optimizer).pop("step", None) is None:
        return
    optimizer_ref = ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        own: Any = optimizer_ref()
        own._opt_called = True
        return type(own).step(own, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked  # type: ignore[method-assign]


def _refuse_replaced_step(optimizer: Optimizer) -> None:
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the step of this {type(optimizer).__name__} was replaced on the instance, by "
            f"{patched!r}, which would bypass the tuner. Call mechanize before what replaces it."
        )


def _refuse_what_is_not_tuned(optimizer: Optimizer, options: Options) -> None:
    name = type(optimizer).__name__
    inner = (getattr(optimizer, place, None) for place in INNER)
    if any(isinstance(one, Optimizer) for one in inner):
        raise ValueError(
            f"{name} wraps another optimizer, and a step of it need not be a step of that one. "
            "Mechanize the inner optimizer before it is wrapped."
        )
    if callable(getattr(optimizer, "fused_backward", None)):
        raise ValueError(
            f"{name} moves the weights in the backward pass (fused_backward), where there is no "
            "step to tune. Use a base that moves them in step()."
        )
    several = isinstance(optimizer, LBFGS)  # it evaluates gradients of its own
    if options.max_grad_norm < math.inf and (several or optimizer.defaults.get("differentiable")):
        raise ValueError(
            f"max_grad_norm={options.max_grad_norm} changes the gradients in place, which "
            f"{'LBFGS' if several else 'differentiable=True'} does not allow. Leave it out, and "
            "clip where the gradients are made."
        )


def _refuse_several_scales(optimizer: Any, options: Options, process_group: Any) -> None:
    """Refuse a base or a way of sharding that does not allow several scales."""
    if options.scope == "all":
        return
    reason = None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    if isinstance(optimizer, LBFGS):
        reason = "LBFGS has one direction for all parameters"
    elif process_group is not None:
        reason = "process_group= tells of parts of parameters, whose scopes are not known"
    elif holds(own, params):
        reason = f"{type(optimizer).__name__} knows its parameters by other ways than its groups"
    if reason is not None:
        raise ValueError(f"scope={options.scope!r} is not possible here: {reason}. Leave it out.")


class MechanizedType(type):
    """The classes of mechanized optimizers, which `mechanize` makes. They are pickled as how to
    make them again."""

    _base: type[Optimizer]
    _options: Options
    _process_group: Any


def is_mechanized(optimizer: object) -> bool:
    """Whether `mechanize` has made the class of an optimizer."""
    return isinstance(type(optimizer), MechanizedType)


def _reduce(cls: Any) -> str | tuple[Callable[..., type], tuple[type, Options]]:
    if "_base" not in vars(cls):  # a subclass that someone has written
        name: str = cls.__qualname__
        return name
    if cls._process_group is not None:
        raise ValueError(NO_PICKLE)
    return mechanized_class, (cls._base, cls._options)


copyreg.pickle(MechanizedType, _reduce)  # type: ignore[arg-type]


_classes: WeakValueDictionary[tuple[type[Optimizer], Options, Any], type[Any]]
_classes = WeakValueDictionary()


def mechanized_class(base: type[O], options: Options, process_group: Any = None) -> type[O]:
    """The subclass of `base` whose instances are mechanized; one for each triple."""
    key = (base, options, process_group)
    made = _classes.get(key)
    if made is None:
        made = _classes[key] = _make_class(*key)
    return made


def _make_mode(base: type[Optimizer], mode: str) -> Callable[[Any], Any]:
    @functools.wraps(getattr(base, mode))
    def mechanized_mode(self: Any) -> Any:
        results = [
            change_mode(part, mechanism, getattr(base, mode))
            for _, part, mechanism in parts_of(self)
        ]
        return results[-1]

    return mechanized_mode


def _make_class(base: type[O], options: Options, process_group: Any) -> type[O]:
    """What a mechanized optimizer does differently from its base. The base's methods are looked up
    when they are called, so that whoever patches them is heard."""

    @functools.wraps(base.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        _refuse_what_is_not_tuned(self, options)
        _refuse_several_scales(self, options, process_group)
        _attach(self, options, process_group)

    def mechanized_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, self._mechanic, unhooked(base.step), args, kwargs)

    body: dict[str, Any] = {
        "__doc__": f"{base.__name__}, mechanized.",
        "__module__": "mechanic.torch",
        "__init__": init,
        "step": _like(base.step, mechanized_step),
        "_base": base,
        "_options": options,
        "_process_group": process_group,
        **_ways_to_save(base),
    }
    if has_modes(base):
        body |= {mode: _make_mode(base, mode) for mode in MODES}
    mechanized: type[O] = _metaclass_for(base)(base.__name__, (base,), body)
    return mechanized


def _ways_to_save(base: type[Optimizer]) -> dict[str, Callable[..., Any]]:
    """The methods by which an optimizer is saved, loaded, copied and shown."""

    def state_dict(self: Any) -> dict[str, Any]:
        """The base's state, each parameter's displacement, and in every group the tuner."""
        with checkpoint.publishing(self):
            return checkpoint.with_rates_of_now(base.state_dict(self))

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Go on exactly where a checkpoint left off, or, from a plain optimizer's, start tuning.

        Raises:
            ValueError: if the checkpoint is of another model or tuner. Nothing is loaded then.
        """
        with checkpoint.restoring(self):
            base.load_state_dict(self, state_dict)

    def get_state(self: Any) -> dict[str, Any]:
        # torch leaves out what a subclass keeps as attributes (a fused base's flags, Lion's
        # settings); a copy needs them. Hooks stay behind, as in torch's own.
        if base.__getstate__ is not Optimizer.__getstate__:
            return {MECHANISM: self._mechanic, **base.__getstate__(self)}
        own = {
            k: v for k, v in vars(self).items() if not k.startswith("_optimizer_") and k != "step"
        }
        return own | base.__getstate__(self)

    def show(self: Any) -> str:
        # The tuner's numbers in the groups are for checkpoints, not for people.
        lines = base.__repr__(self).split("\n")
        return "\n".join(x for x in lines if not x.startswith(f"    {checkpoint.TUNER}: "))

    return {
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__getstate__": get_state,
        "__repr__": show,
    }


def _like(base_step: Any, mechanized_step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with the name and the signature of the base's, if that is a function."""
    own = unhooked(base_step)
    return functools.wraps(own)(mechanized_step) if inspect.isfunction(own) else mechanized_step


def _metaclass_for(base: type[Optimizer]) -> type:
    if issubclass(MechanizedType, type(base)):
        return MechanizedType
    metaclass = type("MechanizedType", (MechanizedType, type(base)), {})
    copyreg.pickle(metaclass, _reduce)
    return metaclass


def _refuse_twice(base: type[Optimizer]) -> None:
    if isinstance(base, MechanizedType):
        raise ValueError(
            f"this {base.__name__} is mechanized already, and its scale would be tuned twice. "
            "Call mechanize once; tuner(optimizer).detach() gives the plain optimizer back."
        )
