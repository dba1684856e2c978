"""The handle on a mechanized optimizer's tuner."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, Optimizer, Rprop
from torch.optim.lr_scheduler import LRScheduler

from mechanic import causes
from mechanic.options import Options
from mechanic.suggestion import suggest
from mechanic.torch.attach import MECHANISM, is_mechanized, take_off, unhooked
from mechanic.torch.call import Call
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.modes import hand_over, has_modes
from mechanic.torch.observation import observe
from mechanic.torch.rates import effective_lrs
from mechanic.torch.scalars import Numbers
from mechanic.torch.sharding import agree
from mechanic.tuner import DefaultState, Sums, had_signal, start

# Learning rates that torch's schedulers and optimizers keep in the groups and in themselves.
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "step_sizes")
_STATE_RATES = ("eta", "step_size")  # ASGD's and Rprop's own
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")


def tuner(optimizer: Optimizer) -> "Tuner":
    """The handle on the tuner of a mechanized optimizer.

    Raises:
        ValueError: if the optimizer is not mechanized.
    """
    while not is_mechanized(optimizer):  # a trainer's wrapper, or ZeroRedundancyOptimizer
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", None))
        if inner is None:
            break
        optimizer = inner
    if not is_mechanized(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is not mechanized, so it has no tuner. "
            "Write optimizer = mechanize(optimizer) first."
        )
    return Tuner(optimizer)


class Tuner:
    """What a mechanized optimizer has learned, and how to stop it learning.

    >>> import torch
    >>> from mechanic.torch import mechanize, tuner
    >>> weights = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = mechanize(torch.optim.SGD([weights], lr=1.0, momentum=0.9))
    >>> for _ in range(20):
    ...     weights.grad = weights.detach() - 2
    ...     optimizer.step()
    >>> sorted(tuner(optimizer).metrics())  # doctest: +NORMALIZE_WHITESPACE
    ['effective_lr/0', 'scale', 'scales', 'signal', 'skipped', 'steps']
    >>> float(tuner(optimizer).scale) > 0
    True
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def _mechanism(self) -> Mechanism:
        mechanism = getattr(self._optimizer, MECHANISM, None)
        if mechanism is None:
            raise ValueError(
                "this optimizer was detached from its tuner; mechanize it anew to tune it."
            )
        return mechanism  # type: ignore[no-any-return]

    @property
    def scale(self) -> Tensor:
        """The learned scale S, a 0-d tensor on the parameters' device."""
        return self._mechanism.scale.clone()

    @property
    def effective_lr(self) -> list[Tensor]:
        """The learning rate in force in each group: the scale times the group's lr."""
        return effective_lrs(self._mechanism.scale, self._optimizer.param_groups)

    @property
    def frozen(self) -> bool:
        """Whether the scale is held."""
        return self._mechanism.frozen

    def metrics(self) -> dict[str, Tensor]:
        """Everything worth logging, as tensors on the device: nothing waits until one is read.

        `scales` has one number for each β; `signal` is ⟨Δ, g⟩, negative while a larger scale would
        have been better.
        """
        numbers = self._mechanism.scalars.read()
        counted = self._mechanism.counts.read()
        rates = {f"effective_lr/{i}": rate for i, rate in enumerate(self.effective_lr)}
        return {
            "scale": numbers.scale.clone(),
            **rates,
            "signal": numbers.signal.clone(),
            "scales": numbers.state.s.clone(),
            "steps": counted.steps.clone(),
            "skipped": counted.skipped.clone(),
        }

    def freeze(self) -> None:
        """Hold the scale where it is; the base goes on with the learning rate it has."""
        self._mechanism.frozen = True

    def unfreeze(self) -> None:
        """Go on tuning, from what was known when the scale was frozen."""
        self._mechanism.frozen, self._mechanism.scalars.observed = False, None

    def observe(self) -> None:
        """Tune on held-out data: learn in the next step from the gradients that the parameters have
        now, in place of the step's own, and from no others.

            for step, batch in enumerate(train_batches):
                if step % 4 == 0:
                    optimizer.zero_grad()
                    loss_of(model, next(held_out_batches)).backward()
                    tuner(optimizer).observe()
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

        In steps without an observation the scale is held, as by `freeze()`; `unfreeze()` goes back
        to the gradients of the steps. Nothing is stored but two numbers. Where parameters are
        sharded, all processes have to observe in the same step.

        Raises:
            ValueError: if no parameter has a gradient.
        """
        base_step = unhooked(type(self._optimizer)._base.step)  # type: ignore[attr-defined]
        observe(Call(self._optimizer, self._mechanism, base_step, (), {}))

    def agrees(self, process_group: Any = None) -> bool:
        """Whether all processes of a group (those that share the parameters, or all there are)
        have learned the same, bit for bit.

        Every one of them has to ask. A step never does: under DistributedDataParallel the
        gradients are the same everywhere, and so is all that follows from them.
        """
        mechanism = self._mechanism
        ranks = mechanism.find_ranks(self._optimizer)
        if process_group is None and ranks is not None:
            process_group = ranks.group
        return agree(mechanism.scalars.shared.reshape(-1), process_group)

    def suggest_lr(self) -> list[float]:
        """The learning rate to type for the plain optimizer, one for each group: with the same
        schedule, it would have added up to the same over the run.

        Where a schedule runs, it is the rate to start the schedule with; with OneCycleLR, `max_lr`.
        """
        mean_scale = float(self._mechanism.scalars.read().mean_scale)
        return list(suggest(mean_scale, self._optimizer.param_groups))

    def diagnose(self) -> str:
        """What looks wrong so far, each cause in a line with its fix, or a line that says that
        nothing does. It waits for the device.

        A tuner knows its present numbers and little of its past. It cannot see that the scale has
        fallen; `mechanic doctor` sees that, in the log of a run.

        >>> import torch
        >>> from mechanic.torch import mechanize, tuner
        >>> optimizer = mechanize(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0))
        >>> optimizer.step()
        >>> print(tuner(optimizer).diagnose())
        the scale stayed at 0: no step had a gradient. Either ...
        """
        found = list(_causes(self._mechanism))
        return (
            "\n".join(found) or f"healthy: nothing looks wrong, and the scale is {self.scale:.3g}"
        )

    def detach(self) -> Optimizer:
        """Give the plain optimizer back: the same object, of its own class again, with its own
        state, the learned lr in its groups, and its schedules at the learned scale."""
        optimizer, carrier = self._optimizer, self._mechanism.carrier
        scale = float(self.scale) or 1.0  # nothing learned yet: the lr that was typed
        base = type(optimizer)._base  # type: ignore[attr-defined]
        if has_modes(base):
            with torch.no_grad():
                hand_over(optimizer, self._mechanism)
        take_off(optimizer)
        outer = optimizer
        if carrier is not None:  # the optimizer is one part of another, which users hold
            carrier.let_go()
            outer = carrier.optimizer
        for own in dict.fromkeys((optimizer, outer)):
            for scheduler in _schedulers_of(own):
                _rescale(vars(scheduler), _SCHEDULER_RATES, scale)
            for group in own.param_groups:
                _rescale(group, _GROUP_RATES, scale)
        if isinstance(optimizer, (ASGD, Rprop)):
            for state in optimizer.state.values():
                _rescale(state, _STATE_RATES, scale)
        return outer


def _causes(mechanism: Mechanism) -> Iterator[str]:
    """What looks wrong, from what a tuner knows."""
    steps, updates, skipped, in_a_row = mechanism.counts.packed.tolist()
    skips = causes.Skips(steps + skipped, skipped, in_a_row)
    is_skipped = skipped and not skips.are_rare
    numbers, options = mechanism.scalars.read(), mechanism.options
    state, scale = numbers.state, float(numbers.scale)
    if is_skipped:
        yield causes.of_skips(skips)
    if not updates:
        if not skips.steps:
            yield causes.NO_GRADIENT
        elif steps:
            yield causes.ZERO_LR
    elif updates > 1 and not had_signal(state):
        yield causes.ZERO_GRADIENT
    elif skips.are_few_left and not is_skipped:
        yield causes.too_few(steps)
    elif skips.are_few_left or mechanism.frozen:
        return  # there is nothing to say about the scale
    elif causes.is_at_cap(scale, options.max_scale):
        yield causes.of_cap(options.max_scale, ", and is there now")
    elif said := _of_growth(options, numbers):
        yield said
    elif isinstance(state, DefaultState) and not state.hesitation:
        yield causes.STILL_GROWING


def _of_growth(options: Options, numbers: Numbers) -> str:
    """What is wrong with how far the scale is from its start, if anything."""
    zero = torch.zeros_like(numbers.scale)
    sums = Sums(*(zero,) * len(Sums._fields))
    sums = sums._replace(x1=numbers.reference_square, d=numbers.size)
    first, _ = start(options, numbers.state, sums)
    growth = float(numbers.scale) / (float(first) or 1.0)
    return causes.of_growth(growth, is_relative=options.s_init == "relative")


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """An optimizer does not know its schedulers, so they are looked for: among what refers to it,
    and among the owners of what does."""
    holders = gc.get_referrers(optimizer)
    dicts = [holder for holder in holders if type(holder) is dict]
    owners = gc.get_referrers(*dicts) if dicts else []
    found = {id(own): own for own in (*holders, *owners) if issubclass(type(own), LRScheduler)}
    return [own for own in found.values() if getattr(own, "optimizer", None) is optimizer]


def _rescale(rates: dict[str, Any], names: tuple[str, ...], scale: float) -> None:
    for name in names:
        if name in rates:
            rates[name] = _times(rates[name], scale)


def _times(rate: Any, scale: float) -> Any:
    if isinstance(rate, (list, tuple)):
        return type(rate)(_times(one, scale) for one in rate)
    return rate * scale
