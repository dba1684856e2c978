"""What a mechanized optimizer carries beside its own state: the tuner's scalars, on the device."""

import copy
import ctypes
import warnings
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import vectors
from mechanic.torch.rates import Rate, has_risen, rate_of, typed_rates
from mechanic.torch.sharding import Ranks, ranks_of

DISPLACEMENT = "mechanic_displacement"
"""The key of a parameter's displacement in `optimizer.state[parameter]`."""

EFFECTIVE_LR = "effective_lr"
"""The key in `param_groups` under which loggers find the learning rate that is in force."""

PATIENCE = 10
"""Warn when so many steps in a row were skipped."""

EXACT = 10
"""The norm of the update itself is waited for in so many steps, when what a base does is least like
what it did the step before: a warm-up from 0, a first batch without a gradient."""

SCALARS = ("scale", "share", "signal", "reference_square", "size")
COUNTERS = ("steps", "updates", "skipped", "skipped_in_a_row")

# What a copy of a tuner has to find anew.
_OF_THIS_ONE: dict[str, Any] = {"plan": None, "arrivals": None, "captured": [], "listening": {}}

NO_PICKLE = (
    "an optimizer that was mechanized with process_group= cannot be pickled: a group does not "
    "leave its process. Save optimizer.state_dict()."
)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now is captured in a CUDA graph."""
    if device.type != "cuda" or torch.compiler.is_compiling():  # which cannot ask
        return False
    return torch.cuda.is_current_stream_capturing()


class Pace(NamedTuple):
    """The learning rates of a step."""

    rates: list[Rate]
    lrs: list[Any]
    """As they are typed"""
    risen: Tensor | bool
    """Whether one has risen so much that an update says little about the next"""
    waits: bool
    """Whether the norm of the update itself is, or may be, waited for"""


class Mechanism:
    """The tuner of one optimizer. All tensors are 0-d, or one number a β, on one device, and are
    written in place: the replays of a CUDA graph find them where they were captured."""

    def __init__(self, options: Options, home: torch.device, process_group: Any = None) -> None:
        self.options = options
        self.process_group = process_group
        """The processes that the parameters are spread over, where that was said"""
        self._ranks: Ranks | None = None
        self.captured: list[Any] = []
        """What the replays of CUDA graphs read"""
        self.listening: dict[Tensor, Any] = {}
        """The hooks on the parameters that tell when a gradient has arrived"""
        self.carrier: Any = None
        """What carries the tuner in its checkpoints, where it is not the optimizer itself"""
        self._start(home)

    def drop_plan(self) -> None:
        """Have the kernels find everything anew."""
        self.plan: Any = None
        """Where the kernels find everything (`kernels.plan.Plan`), on a GPU"""
        self.arrivals: Any = None
        """What was summed up as it arrived (`kernels.arrivals.Arrivals`)"""

    def tensors(self) -> list[Tensor]:
        """All that a step writes to."""
        return [*self.state, *(getattr(self, name) for name in (*SCALARS, *COUNTERS))]

    def reset(self) -> None:
        """Start anew."""
        self._start(self.scale.device)

    def _start(self, home: torch.device) -> None:
        self.drop_plan()
        dtype = vectors.scalar_dtype(home)
        zero = torch.zeros((), dtype=dtype, device=home)
        options = self.options
        state = tuner.init(options, torch.tensor(options.betas, dtype=dtype, device=home))
        self.state = tuner.State(*(value.clone() for value in state))
        self.scale: Tensor = self.state.s.sum()
        self.share = torch.ones_like(zero)
        """Δ is this share of what the optimizer's state stores"""
        self.started = False
        """Whether `share` was set, by the first step at an lr above 0"""
        self.signal = torch.zeros_like(zero)
        """⟨Δ, g⟩ of the last step"""
        self.reference_square = torch.zeros_like(zero)
        """‖x‖² of the parameters when they were first seen"""
        self.size = torch.zeros_like(zero)
        """The number of elements behind `reference_square`"""
        self.lrs: list[Any] = []
        """The learning rate of each group when it last took part"""
        self.updates = torch.zeros((), dtype=torch.int64, device=home)
        """How many steps the tuner has learned from"""
        self._sure = self._unsure = 0
        self.steps = torch.zeros((), dtype=torch.int64, device=home)
        self.skipped = torch.zeros((), dtype=torch.int64, device=home)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=home)
        self.frozen = False
        self.skips_on_host = 0
        """`skipped_in_a_row` where the host decides on skipping"""
        self._calls = 0
        self._warned = False
        self._seen: Tensor | None = None

    def to(self, home: torch.device) -> None:
        """Follow the parameters to another device."""
        if self.scale.device == home:
            return
        if self.scale.device.type == "meta":  # the model has been given its memory
            self._start(home)
            return
        dtype = vectors.scalar_dtype(home)
        self.state = tuner.State(*(value.to(home, dtype) for value in self.state))
        for name in SCALARS:
            setattr(self, name, getattr(self, name).to(home, dtype))
        for name in COUNTERS:
            setattr(self, name, getattr(self, name).to(home))
        self._seen = None

    def find_ranks(self, optimizer: Optimizer) -> Ranks | None:
        """The processes that share the optimizer's parameters, if any do."""
        self._ranks = ranks_of(optimizer, self.process_group, self._ranks)
        return self._ranks if self._ranks.group is not None else None

    @property
    def counted(self) -> frozenset[Tensor] | None:
        """The parameters whose local part counts here; None where none are shared."""
        return None if self._ranks is None or self._ranks.group is None else self._ranks.counted

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mechanism":
        # A process group is what it is; a copy works in the same one.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in {**vars(self), **_OF_THIS_ONE}.items():
            shared = name in ("process_group", "_ranks", "carrier")
            setattr(copied, name, value if shared else copy.deepcopy(value, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise ValueError(NO_PICKLE)
        return {**vars(self), **_OF_THIS_ONE, "_ranks": None, "_seen": None}

    def start_at(self, rates: list[Rate], finite: Tensor | bool) -> None:
        """Before the first update, choose the unit that displacements are stored in: that of the
        proposals. So they are the same numbers whatever the learning rate that is typed."""
        live = [rate.unit for rate in rates if rate.live is not False]
        if self.started or not live or self.process_group is not None:
            return  # over a group the unit is 1: its processes may have other rates
        unit = live[0]
        if isinstance(unit, Tensor):
            unit = unit.to(self.share)
        first = (self.updates == 0) & (unit > 0) & finite
        vectors.copy([self.share], [torch.where(first, unit, self.share)])
        # Where the device decides on skipping, the first steps may all have been skipped.
        self.started = finite is True or self._calls >= PATIENCE

    @property
    def is_starting(self) -> bool:
        """Whether these may be the first steps, as far as the host knows."""
        if torch.compiler.is_compiling():
            return True  # a count on the host would have every step compiled anew
        return self._sure < EXACT and self._unsure < 2 * EXACT

    def learn(self, takes_part: Tensor | bool) -> None:
        """Count a step that the tuner learns from; whether it does, the device may decide."""
        self.updates.add_(takes_part)
        if torch.compiler.is_compiling():
            return
        if isinstance(takes_part, Tensor):
            self._unsure += self.is_starting
        else:
            self._sure += takes_part and self.is_starting

    def resume_at(self, updates: int) -> None:
        """Go on after so many updates."""
        self._sure, self._unsure = min(updates, EXACT), 0

    def set(self, state: tuner.State, share: Tensor) -> None:
        """Take over what the tuner has learned."""
        vectors.copy([*self.state, self.scale, self.share], [*state, state.s.sum(), share])

    def look_at_rates(
        self, optimizer: Optimizer, *, proportional: bool, half: Container[int] | None = None
    ) -> "Pace":
        """How the groups take part in a step. `half` are those that hold float16, where that is
        known."""
        rates = [
            rate_of(group, proportional=proportional, half=None if half is None else i in half)
            for i, group in enumerate(optimizer.param_groups)
        ]
        lrs = typed_rates(optimizer, self.lrs)
        # What LBFGS proposes says nothing of what it will propose next.
        risen = isinstance(optimizer, torch.optim.LBFGS) or has_risen(lrs, self.lrs)
        waits = self.is_starting or risen is not False
        return Pace(rates, lrs, risen, waits and self.options.s_init == "relative")

    def note_rates(self, lrs: list[Any], risen: Tensor | bool) -> None:
        """Keep the learning rates of a step whose update was waited for."""
        if risen is False and not self.is_starting:
            return
        kept = self.lrs + [None] * (len(lrs) - len(self.lrs))
        for i, lr in enumerate(lrs):
            own = kept[i]
            if not isinstance(lr, Tensor):
                kept[i] = lr
                continue
            if isinstance(risen, Tensor) and own is not None and not self.is_starting:
                lr = torch.where(risen, lr, own)
            if isinstance(own, Tensor) and own.device == lr.device and own.dtype == lr.dtype:
                own.copy_(lr)
            else:
                kept[i] = lr.clone()
        self.lrs = kept

    def count_on_device(self, *, may_learn: bool) -> None:
        """After a step that the device has counted, and may have learned from."""
        self._unsure += may_learn and self.is_starting
        self.skips_on_host = 0
        self._look_later()

    def count(self, finite: Tensor | bool) -> None:
        """Count a step as done or skipped, and warn, once, when many are skipped in a row."""
        if finite is True:
            self.steps.add_(1)
            if self.skips_on_host:
                self.skips_on_host = 0
                self.skipped_in_a_row.zero_()
            return
        done = torch.as_tensor(finite, device=self.steps.device).to(torch.int64)
        self.steps.add_(done)
        self.skipped.add_(1 - done)
        self.skipped_in_a_row.add_(1).mul_(1 - done)
        if finite is False:
            self.skips_on_host += 1
            if self.skips_on_host == PATIENCE:
                self._warn(PATIENCE)
        elif self.steps.device.type != "meta" and not torch.compiler.is_compiling():
            self._look_later()

    def _look_later(self) -> None:
        """Look at the count through a copy in host memory that the device writes when it comes
        to it: no step waits, and from a GPU the warning may come a few steps late."""
        if is_capturing(self.steps.device):
            return  # a replay counts, but there is no one to look
        self._calls += 1
        if self._seen is None:
            pinned = self.steps.device.type == "cuda"
            self._seen = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._seen.copy_(self.skipped_in_a_row, non_blocking=True)
        count = ctypes.c_int64.from_address(self._seen.data_ptr()).value
        if count < PATIENCE:
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._warn(count)

    @staticmethod
    def _warn(count: int) -> None:
        warnings.warn(
            f"mechanic: the last {count} steps were skipped, because their gradients held NaN or "
            "inf, and the weights have not moved since. Look for a loss that overflows (half "
            "precision without GradScaler, a logarithm of 0, a division by 0); if the effective "
            "learning rate has grown too large, limit it with max_scale=.",
            RuntimeWarning,
            stacklevel=2,
        )

    def publish_rates(self, optimizer: Optimizer) -> None:
        """Write the learning rates in force into the groups, for loggers that look there."""
        for group, rate in zip(optimizer.param_groups, self.effective_lr(optimizer), strict=True):
            own = group.get(EFFECTIVE_LR)
            if isinstance(own, Tensor) and own.device == rate.device:
                own.copy_(rate)
            else:
                group[EFFECTIVE_LR] = rate

    def effective_lr(self, optimizer: Optimizer) -> list[Tensor]:
        """The learning rate in force, one a group: the scale times the group's own lr."""
        scale = self.scale.to(torch.float32)
        lrs = [group.get("lr", 1.0) for group in optimizer.param_groups]
        return [scale * (lr.to(scale).reshape(()) if isinstance(lr, Tensor) else lr) for lr in lrs]
