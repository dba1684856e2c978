"""In the script's process: mechanizes every optimizer as soon as its constructor returns.

The first step would be too late: checkpoints are loaded, and schedulers, scalers and trainers are
attached, before it. No constructor is wrapped: a wrapper would show up in the traceback of a
constructor that fails, and would change its signature. `_InitDescriptor` says what is done instead.

This module is imported while torch is still being imported. It may use nothing of torch that is
loaded later.
"""

import functools
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mechanic.run.record import Recorder
from mechanic.run.settings import RunSettings, from_environment


class OptimizerRegistry:
    """The optimizers of this process: mechanizes them and records their steps."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.mechanize: Callable[..., Any] | None = None
        """The original `mechanize`, once `patch_mechanize` has replaced it."""
        self._recorders: weakref.WeakKeyDictionary[Optimizer, Recorder | None] = (
            weakref.WeakKeyDictionary()
        )
        self._under_construction: dict[int, weakref.ref[Any]] = {}
        self._tuned_classes: set[type] = set()
        """The classes that `mechanize` has given to optimizers here. Their copies have them too."""

    def adopt_when_constructed(self, optimizer: Optimizer, init: Any) -> None:
        """Adopt the optimizer when its bound `__init__` is released, right after the call."""
        key = id(optimizer)
        if key in self._under_construction or optimizer in self._recorders:
            return

        def constructed(_: Any) -> None:
            del self._under_construction[key]
            if "param_groups" in vars(optimizer):  # otherwise the constructor has failed
                self.adopt(optimizer)

        self._under_construction[key] = weakref.ref(init, constructed)

    def adopt_restored(self, optimizer: Optimizer) -> None:
        """Adopt an optimizer that comes from a copy or a pickle, which call no constructor."""
        if id(optimizer) not in self._under_construction:
            self.adopt(optimizer)

    def adopt(self, optimizer: Optimizer) -> Recorder | None:
        """Mechanize an optimizer if the settings choose it, and record it from now on. Returns None
        for an optimizer that wraps others."""
        if optimizer not in self._recorders:
            if _holds_optimizers(optimizer):
                self._recorders[optimizer] = None
                self._move_to_zero(optimizer)
            else:
                status, reason = self._tune(optimizer)
                own, name = _parts_of(optimizer)[0]
                recorder = Recorder(self.settings, own, name, status, reason)
                self._recorders[optimizer] = recorder
        return self._recorders[optimizer]

    def _move_to_zero(self, wrapper: Any) -> None:
        """Mechanize ZeRO's wrapper in place of its inner optimizer: only the wrapper knows the
        other processes that hold the rest of the parameters."""
        from mechanic.torch.attach import take_off

        inner: Any = getattr(wrapper, "optim", None)
        recorder = self._recorders.get(inner) if _is_zero(wrapper) and inner is not None else None
        if recorder is not None and recorder.status == "tuned" and self.mechanize is not None:
            take_off(inner)
            try:
                self.mechanize(wrapper, **self.settings.tuner)
            except (Exception, SystemExit) as error:
                recorder.describe(inner, "refused", _reason(error))

    def _tune(self, optimizer: Optimizer) -> tuple[str, str]:
        """Mechanize an optimizer if the settings choose it. Returns its status and the reason."""
        from mechanic.torch.attach import is_mechanized, mechanize

        if is_mechanized(optimizer):
            return ("tuned" if type(optimizer) in self._tuned_classes else "own"), ""
        if self.settings.dry_run:
            return "dry", ""
        if not self.settings.chooses(type(optimizer).__name__):
            return "left", "--skip" if self.settings.skip else "--only"
        try:
            (self.mechanize or mechanize)(optimizer, **self.settings.tuner)
        except (Exception, SystemExit) as error:  # a script that runs plainly is not to end here
            return "refused", _reason(error)
        self._tuned_classes.add(type(optimizer))
        return "tuned", ""

    def record_step(self, optimizer: Optimizer) -> None:
        """Called after every step of every optimizer."""
        recorder = self._recorders.get(optimizer)
        if recorder is None and optimizer not in self._recorders:
            recorder = self.adopt(optimizer)
        if recorder is None:
            return
        (first, _), *others = _parts_of(optimizer)
        recorder.record_step(first)
        for own, name in others:
            if own not in self._recorders:
                status = recorder.status
                self._recorders[own] = Recorder(self.settings, own, name, status, "")
            self._recorders[own].record_step(own)  # type: ignore[union-attr]

    def mechanize_for_script(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """`mechanize` as the script calls it. The options of the script replace those of
        `mechanic run`."""
        from mechanic.torch.attach import take_off

        assert self.mechanize is not None
        inner = optimizer.optim if _is_zero(optimizer) else optimizer
        recorder = self._recorders.get(inner) if isinstance(inner, Optimizer) else None
        if recorder is not None and recorder.status == "tuned" and not recorder.steps:
            take_off(inner)
        mechanized = self.mechanize(optimizer, *args, **options)
        if recorder is not None:
            own, recorder.name = _parts_of(inner)[0]
            recorder.describe(own, "own", "")
        return mechanized

    def after_fork(self) -> None:
        """In the child of a fork: its steps are recorded apart from those of the parent."""
        for recorder in self._recorders.values():
            if recorder is not None:
                recorder.start_over()


class _InitDescriptor:
    """Replaces the `__init__` of an optimizer class without wrapping it.

    Looked up on the class, it gives the original function. Looked up on an instance, it gives the
    usual bound method. Python releases that bound method right after the call, and a weak reference
    to it tells that the constructor has returned.
    """

    def __init__(self, function: Any, registry: OptimizerRegistry) -> None:
        self._function, self._registry = function, registry

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        init = self._function.__get__(instance, owner)
        if isinstance(instance, Optimizer):
            self._registry.adopt_when_constructed(instance, init)
        return init


def patch_torch(module: ModuleType) -> None:
    """Called when `torch.optim.optimizer` has been imported: see every optimizer that is made."""
    registry = _registry()

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        _instrument(cls, registry)
        next_new = super(Optimizer, cls).__new__
        return next_new(cls) if next_new is object.__new__ else next_new(cls, *args, **kwargs)

    original_setstate = Optimizer.__setstate__

    @functools.wraps(original_setstate)
    def setstate(self: Optimizer, state: dict[str, Any]) -> None:
        original_setstate(self, state)
        registry.adopt_restored(self)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        registry.record_step(optimizer)

    # torch.compile breaks its graph here, as it does in every step of torch's own optimizers.
    # torch.compiler.disable would only set this attribute too, but imports the whole compiler.
    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    Optimizer.__new__ = staticmethod(new)  # type: ignore[method-assign]
    Optimizer.__setstate__ = setstate  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_step)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=registry.after_fork)


def patch_mechanize(module: Any) -> None:
    """Called when `mechanic.torch.attach` has been imported: the script may itself call `mechanize`
    on an optimizer that is mechanized already."""
    registry = _registry()
    registry.mechanize = module.mechanize

    @functools.wraps(module.mechanize)
    def mechanize(optimizer: Any, *args: Any, **options: Any) -> Any:
        return registry.mechanize_for_script(optimizer, *args, **options)

    module.mechanize = mechanize


@functools.cache
def _registry() -> OptimizerRegistry:
    return OptimizerRegistry(from_environment())


def _instrument(cls: type[Any], registry: OptimizerRegistry) -> None:
    """Put an `_InitDescriptor` where a class finds its constructor, unless one is there."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            function = vars(base)["__init__"]
            if base is not object and not isinstance(function, _InitDescriptor):
                base.__init__ = _InitDescriptor(function, registry)  # type: ignore[misc]
            return


def _holds_optimizers(optimizer: Optimizer) -> bool:
    """Whether it wraps others (SAM, Lookahead, ZeRO, accelerate's): those are tuned instead."""

    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            return any(isinstance(item, Optimizer) for item in value.values())
        if isinstance(value, (list, tuple)):
            return any(isinstance(item, Optimizer) for item in value)
        return isinstance(value, Optimizer)

    return any(holds(value) for value in vars(optimizer).values())


def _parts_of(optimizer: Any) -> list[tuple[Any, str]]:
    """The parts of an optimizer that have a scale of their own, with their names; itself, if it has
    one scale or none. Each is recorded as if it were an optimizer of its own."""
    from mechanic.torch.attach import is_mechanized
    from mechanic.torch.scopes import parts_of

    name = type(optimizer).__name__
    if not is_mechanized(optimizer):
        return [(optimizer, name)]
    parts = parts_of(optimizer)
    return [(one.optimizer, f"{name} {one.name}" if len(parts) > 1 else name) for one in parts]


def _is_zero(optimizer: Any) -> bool:
    from mechanic.torch.zero import is_zero

    return is_zero(optimizer)


def _reason(error: BaseException) -> str:
    """Why an optimizer stays plain: the words of `mechanize`, or an error that no one foresaw."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
