"""In the script's process: every optimizer it makes is mechanized when its constructor returns.

It has to be then, not at the first step: checkpoints are loaded and schedulers, scalers and
trainers attached in between. And no frame of ours may stand in the traceback of a constructor that
fails, nor a signature change: so no constructor is wrapped. See `_Init`.

This module is loaded while torch is still loading: it takes nothing from torch that comes later.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from mechanic.run.record import Watch
from mechanic.run.settings import Settings, from_environment


class Process:
    """The optimizers of this process, and what becomes of each."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mechanize: Callable[..., Any] | None = None
        """The original, where `mechanic.torch.mechanize` is ours"""
        self._watches: weakref.WeakKeyDictionary[Optimizer, Watch | None] = (
            weakref.WeakKeyDictionary()
        )
        self._under_construction: dict[int, weakref.ref[Any]] = {}
        self._tuned: set[type] = set()
        """Classes that optimizers got from us, and that copies of them have"""

    def construct(self, optimizer: Optimizer, bound: Any) -> None:
        """Take the optimizer in when `bound`, the call of its constructor, is over."""
        key = id(optimizer)
        if key in self._under_construction or optimizer in self._watches:
            return

        def over(_: Any) -> None:
            del self._under_construction[key]
            if "param_groups" in vars(optimizer):  # else the constructor has failed
                self.take_in(optimizer)

        self._under_construction[key] = weakref.ref(bound, over)

    def revive(self, optimizer: Optimizer) -> None:
        """Take in an optimizer that came of a copy or a pickle, and had no constructor."""
        if id(optimizer) not in self._under_construction:
            self.take_in(optimizer)

    def take_in(self, optimizer: Optimizer) -> Watch | None:
        """Mechanize an optimizer if it is to be, and watch it; None for a wrapper of others."""
        if optimizer not in self._watches:
            if _holds_optimizers(optimizer):
                self._watches[optimizer] = None
                self._tune_shards(optimizer)
            else:
                name = type(optimizer).__name__
                status, reason = self._treat(optimizer)
                watch = Watch(self.settings, optimizer, name, status, reason)
                self._watches[optimizer] = watch
        return self._watches[optimizer]

    def _tune_shards(self, wrapper: Any) -> None:
        """ZeRO's inner optimizers are one over all processes, which only the wrapper knows."""
        from mechanic.torch.attach import take_off

        inner: Any = getattr(wrapper, "optim", None)
        watch = self._watches.get(inner) if _is_zero(wrapper) and inner is not None else None
        if watch is not None and watch.status == "tuned" and self.mechanize is not None:
            take_off(inner)
            try:
                self.mechanize(wrapper, **self.settings.tuner)
            except ValueError as error:
                watch.describe(inner, "refused", str(error))

    def _treat(self, optimizer: Optimizer) -> tuple[str, str]:
        from mechanic.torch.attach import Mechanized, mechanize

        if isinstance(optimizer, Mechanized):
            return ("tuned" if type(optimizer) in self._tuned else "own"), ""
        if self.settings.dry_run:
            return "dry", ""
        if not self.settings.chooses(type(optimizer).__name__):
            return "left", "--skip" if self.settings.skip else "--only"
        try:
            (self.mechanize or mechanize)(optimizer, **self.settings.tuner)
        except ValueError as error:
            return "refused", str(error)
        self._tuned.add(type(optimizer))
        return "tuned", ""

    def note(self, optimizer: Optimizer) -> None:
        """After every step of every optimizer."""
        watch = self._watches.get(optimizer)
        if watch is None and optimizer not in self._watches:
            watch = self.take_in(optimizer)
        if watch is not None:
            watch.note(optimizer)

    def mechanize_by_script(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """`mechanize` as the script calls it: what it asks for goes before what we did."""
        from mechanic.torch.attach import take_off

        assert self.mechanize is not None
        inner = optimizer.optim if _is_zero(optimizer) else optimizer
        watch = self._watches.get(inner) if isinstance(inner, Optimizer) else None
        if watch is not None and watch.status == "tuned" and not watch.steps:
            take_off(inner)
        made = self.mechanize(optimizer, *args, **options)
        if watch is not None:
            watch.describe(inner, "own", "")
        return made

    def forked(self) -> None:
        """In the child of a fork: what it steps from now on is its own story."""
        for watch in self._watches.values():
            if watch is not None:
                watch.forget()


class _Init:
    """Stands for the `__init__` of a class of optimizers, and gives it out unchanged.

    From the class one gets the function itself. From an instance, one gets a bound method as ever,
    and its deallocation, right after the call, tells that the constructor is done.
    """

    def __init__(self, function: Any, process: Process) -> None:
        self._function, self._process = function, process

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        bound = self._function.__get__(instance, owner)
        if isinstance(instance, Optimizer):
            self._process.construct(instance, bound)
        return bound


def watch_torch(module: ModuleType) -> None:
    """Called when `torch.optim.optimizer` has loaded: look at each optimizer as it is made."""
    process = _process()

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        _instrument(cls, process)
        following = super(Optimizer, cls).__new__
        return following(cls) if following is object.__new__ else following(cls, *args, **kwargs)

    restore = Optimizer.__setstate__

    @functools.wraps(restore)
    def setstate(self: Optimizer, state: dict[str, Any]) -> None:
        restore(self, state)
        process.revive(self)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        process.note(optimizer)

    # torch.compile breaks its graph here, as it does in every step of torch's own.
    # torch.compiler.disable does no more, but loads the whole compiler.
    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    Optimizer.__new__ = staticmethod(new)  # type: ignore[method-assign]
    Optimizer.__setstate__ = setstate  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_step)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=process.forked)


def watch_mechanize(module: Any) -> None:
    """Called when `mechanic.torch.attach` has loaded: the script may call `mechanize` itself, on
    what is mechanized already."""
    process = _process()
    process.mechanize = module.mechanize

    @functools.wraps(module.mechanize)
    def mechanize(optimizer: Any, *args: Any, **options: Any) -> Any:
        return process.mechanize_by_script(optimizer, *args, **options)

    module.mechanize = mechanize


@functools.cache
def _process() -> Process:
    return Process(from_environment())


def _instrument(cls: type[Any], process: Process) -> None:
    """Put an `_Init` where a class finds its constructor; nothing if there is one."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            function = vars(base)["__init__"]
            if base is not object and not isinstance(function, _Init):
                base.__init__ = _Init(function, process)  # type: ignore[misc]
            return


def _holds_optimizers(optimizer: Optimizer) -> bool:
    """Whether it wraps others (SAM, Lookahead, ZeRO, accelerate's): the inner ones are tuned."""

    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            return any(isinstance(one, Optimizer) for one in value.values())
        if isinstance(value, (list, tuple)):
            return any(isinstance(one, Optimizer) for one in value)
        return isinstance(value, Optimizer)

    own: Iterable[Any] = vars(optimizer).values()
    return any(holds(value) for value in own)


def _is_zero(optimizer: Any) -> bool:
    from mechanic.torch.zero import is_zero

    return is_zero(optimizer)
