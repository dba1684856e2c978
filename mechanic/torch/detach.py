"""Taking the tuner off an optimizer: the learned scale goes into its learning rates."""

import gc
from typing import Any

import torch
from torch.optim import ASGD, Optimizer, Rprop
from torch.optim.lr_scheduler import LRScheduler

from mechanic.torch.attach import take_off
from mechanic.torch.modes import hand_over, has_modes
from mechanic.torch.scopes import Part

# Learning rates that torch's schedulers and optimizers keep in the groups and in themselves.
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "step_sizes")
_STATE_RATES = ("eta", "step_size")  # ASGD's and Rprop's own
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")


def detach(optimizer: Any, parts: list[Part], scales: list[float]) -> Optimizer:
    """Give the plain optimizer back, each group at its scale times the lr that was typed."""
    _refuse_common_rates(_schedulers_of(optimizer), scales)
    if has_modes(type(optimizer)._base):
        with torch.no_grad():
            for part in parts:
                hand_over(part.optimizer, part.mechanism)
    carrier = parts[0].mechanism.carrier
    take_off(optimizer)
    outer: Optimizer = optimizer
    if carrier is not None:  # the optimizer is one part of another, which users hold
        carrier.let_go()
        outer = carrier.optimizer
    for own in dict.fromkeys((optimizer, outer)):
        for scheduler in _schedulers_of(own):
            _rescale(vars(scheduler), _SCHEDULER_RATES, scales)
        for group, scale in zip(own.param_groups, scales, strict=True):
            _rescale(group, _GROUP_RATES, [scale])
    if isinstance(optimizer, (ASGD, Rprop)):
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            for param in group["params"]:
                _rescale(optimizer.state.get(param, {}), _STATE_RATES, [scale])
    return outer


def _refuse_common_rates(schedulers: list[LRScheduler], scales: list[float]) -> None:
    """Refuse schedulers with a rate for all groups where these have several scales."""
    if len(set(scales)) == 1:
        return
    for scheduler in schedulers:
        for name in _SCHEDULER_RATES:
            rate = vars(scheduler).get(name, 0)
            if not isinstance(rate, (list, tuple)) and rate != 0:
                raise ValueError(
                    f"{type(scheduler).__name__} has {name}={rate} for all groups, whose learned "
                    f"scales differ: {scales}. Nothing was changed. Set it to 0 before you detach, "
                    "or make a scheduler anew."
                )


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """An optimizer does not know its schedulers, so they are looked for: among what refers to it,
    and among the owners of what does."""
    holders = gc.get_referrers(optimizer)
    dicts = [holder for holder in holders if type(holder) is dict]
    owners = gc.get_referrers(*dicts) if dicts else []
    found = {id(own): own for own in (*holders, *owners) if issubclass(type(own), LRScheduler)}
    return [own for own in found.values() if getattr(own, "optimizer", None) is optimizer]


def _rescale(rates: dict[str, Any], names: tuple[str, ...], scales: list[float]) -> None:
    """Multiply the rates of these names, a list with one for each group by the scale of each."""
    for name in names:
        rate = rates.get(name)
        if rate is None:  # as of a base that finds its rate by itself
            continue
        if isinstance(rate, (list, tuple)):
            each = scales if len(scales) == len(rate) else scales[:1] * len(rate)
            rates[name] = type(rate)(one * scale for one, scale in zip(rate, each, strict=True))
        else:
            rates[name] = rate * scales[0]
