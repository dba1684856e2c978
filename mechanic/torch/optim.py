"""The optimizers of `torch.optim`, mechanized, as classes that can be imported by name.

They serve trainers and configurations that name a class, as in
`optimizer: mechanic.torch.optim.AdamW`. The arguments are those of the base, and the options of
`mechanize` with `mechanic_` before their names, since some bases have options of the same name.

Examples:
    >>> import torch
    >>> from mechanic.torch import optim, tuner
    >>> weights = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = optim.AdamW([weights], lr=0.25, betas=(0.9, 0.95), mechanic_max_scale=0.5)
    >>> for _ in range(20):
    ...     weights.grad = torch.ones(3)
    ...     optimizer.step()
    >>> isinstance(optimizer, torch.optim.AdamW), tuner(optimizer)
    (True, Tuner(scale=0.5, steps=20))
"""

import functools
import inspect
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from mechanic.torch.attach import mechanize

O = TypeVar("O", bound=Optimizer)

PREFIX = "mechanic_"

_OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(mechanize).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _named(base: type[O]) -> type[O]:
    """The mechanized class of a base as a class of this module, which takes the options when it is
    called."""
    own = inspect.signature(base.__init__)
    added = [option.replace(name=f"{PREFIX}{name}") for name, option in _OPTIONS.items()]

    @functools.wraps(base.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_unknown(base, [name for name in kwargs if name not in own.parameters])
        names = [name for name in kwargs if name.startswith(PREFIX)]
        options = {name.removeprefix(PREFIX): kwargs.pop(name) for name in names}
        mechanized: Any = mechanize(base, **options)
        mechanized.__init__(self, *args, **kwargs)

    shown: Any = init  # what people and configurations read
    shown.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
    shown.__annotations__ = init.__annotations__ | {one.name: one.annotation for one in added}
    mechanized = mechanize(base)
    metaclass: Any = type(mechanized)
    body = {
        "__doc__": f"`torch.optim.{base.__name__}`, mechanized.",
        "__module__": __name__,
        "__init__": init,
        "_options": property(lambda self: self._mechanic.options),
    }
    named: type[O] = metaclass(base.__name__, (mechanized,), body)
    return named


def _refuse_unknown(base: type[Optimizer], names: list[str]) -> None:
    known = [f"{PREFIX}{name}" for name in _OPTIONS]
    for name in names:
        if name in _OPTIONS:
            raise TypeError(
                f"{base.__name__} has no argument {name}; it is an option of mechanize. "
                f"Write {PREFIX}{name}=."
            )
        if name not in known:
            raise TypeError(
                f"{base.__name__} has no argument {name}. Beside those of "
                f"torch.optim.{base.__name__}, there are {', '.join(known)}."
            )


ASGD = _named(torch.optim.ASGD)
Adadelta = _named(torch.optim.Adadelta)
Adafactor = _named(torch.optim.Adafactor)
Adagrad = _named(torch.optim.Adagrad)
Adam = _named(torch.optim.Adam)
AdamW = _named(torch.optim.AdamW)
Adamax = _named(torch.optim.Adamax)
LBFGS = _named(torch.optim.LBFGS)
NAdam = _named(torch.optim.NAdam)
RAdam = _named(torch.optim.RAdam)
RMSprop = _named(torch.optim.RMSprop)
Rprop = _named(torch.optim.Rprop)
SGD = _named(torch.optim.SGD)
SparseAdam = _named(torch.optim.SparseAdam)
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    Muon = _named(torch.optim.Muon)
