"""What the kernels know of an optimizer. It is made once, and holds as long as the tensors stay
where they are; only gradients may move."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from mechanic.torch.kernels.copies import PackedCopies
from mechanic.torch.kernels.gradients import Gradients
from mechanic.torch.kernels.groups import GroupTable
from mechanic.torch.kernels.host import Question, StepCounters
from mechanic.torch.kernels.known import ANY, KnownBase
from mechanic.torch.kernels.layout import Entry, Layout, enter
from mechanic.torch.kernels.placement import Placement
from mechanic.torch.measure import Parts
from mechanic.torch.sharding import Ranks, new_message
from mechanic.torch.vectors import DISPLACEMENT


class Plan:
    """The parts, each with a room of its own, and the little memory that belongs to none."""

    def __init__(
        self,
        optimizer: Optimizer,
        bases: list[KnownBase],
        entries: list[Entry],
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        entries = sorted(entries, key=lambda entry: repr(entry.kind))
        self.is_known = bases[0] is not ANY
        """Whether the base's update is computed by the kernels"""
        steps = [entry.state["step"] for entry in entries] if bases[0].has_steps else []
        self.counters = StepCounters(steps, device)
        self.layout = Layout(entries, self.counters, device)
        self.placement = Placement(optimizer, entries)
        self.gradients = Gradients(entries, device)
        self.groups = GroupTable(bases, entries, device)
        self.copies = None if self.is_known else PackedCopies(optimizer, self.layout)
        self.message = None if ranks is None else new_message(ranks, len(Parts._fields), device)
        """What travels between the processes that share the parameters, if any do"""
        self.question = Question(device)
        self.verdict = torch.zeros(2, dtype=torch.int64, device=device)
        """Whether the last step was made, and its number"""
        self.biases = torch.ones(len(entries), 2, dtype=torch.float32, device=device)
        """The corrections of a bias, for a base that counts its steps"""
        self.compiled: dict[Any, Any] = {}
        """The kernels that were launched before"""

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.layout.device

    @property
    def ranks(self) -> Ranks | None:
        """The processes that share the parameters, if any do."""
        return None if self.message is None else self.message.ranks

    def on_device(self) -> Any:
        """Launch on the plan's device."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)


def make(
    optimizer: Optimizer,
    bases: list[KnownBase] | None,
    home: torch.device,
    ranks: Ranks | None,
    *,
    is_arriving: bool,
) -> Plan | None:
    """A plan for all parameters that have moved; None where one of them is not for the kernels, or
    not at `home`. `bases` has the known base of each group, and is None for a base that runs by
    itself. `ranks` are the processes that share the parameters: one that holds nothing has a plan,
    too. If `is_arriving`, large gradients are summed up one by one as they arrive."""
    bases = bases or [ANY] * len(optimizer.param_groups)
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    if devices - {home} or not bases:
        return None
    entries = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if param.grad is None and DISPLACEMENT not in state:
                continue
            counts = ranks is None or param in ranks.counted
            own = param, index, bases[index], state
            entry = enter(*own, counts=counts, is_arriving=is_arriving)
            if entry is None:
                return None
            entries.append(entry)
    step_devices = {e.state["step"].device for e in entries if e.kind.base.has_steps}
    holds_nothing = not sum(entry.part.numel() for entry in entries)
    if len(step_devices) > 1 or (holds_nothing and ranks is None):
        return None
    return Plan(optimizer, bases, entries, home, ranks)
