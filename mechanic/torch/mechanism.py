"""What a mechanized optimizer carries beside its own state, each part in a room of its own."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.options import Options
from mechanic.torch.copies import CopyCache
from mechanic.torch.counts import Counts
from mechanic.torch.history import RateHistory
from mechanic.torch.kernel_cache import KernelCache
from mechanic.torch.scalars import Scalars
from mechanic.torch.sharding import Ranks, ranks_of

MECHANISM = "_mechanic"
"""The attribute of a mechanized optimizer that holds its `Mechanism`, or its `Scopes`."""

CHECKS = 10
"""The number of first steps in which a base that nothing is known of is watched."""

NO_PICKLE = (
    "an optimizer that was mechanized with process_group= cannot be pickled: a group does not "
    "leave its process. Save optimizer.state_dict()."
)


class Mechanism:
    """The tuner of one optimizer."""

    def __init__(self, options: Options, home: torch.device, process_group: Any = None) -> None:
        self.options = options
        self.process_group = process_group
        """The processes that the parameters are spread over, where the user named them"""
        self._ranks: Ranks | None = None
        self.carrier: Any = None
        """What carries the tuner in its checkpoints, where that is not the optimizer itself"""
        self.steps_in_place = False
        """Whether the base has to be run on the parameters themselves (see `base.py`)"""
        self.checks_left = CHECKS
        """The number of further steps in which the base is watched for that"""
        self.copies = CopyCache()
        self.kernels = KernelCache()
        self._start(home)

    def _start(self, home: torch.device) -> None:
        self.kernels.drop_plan()
        self.scalars = Scalars(self.options, home)
        self.counts = Counts(home)
        self.history = RateHistory()
        self.frozen = False
        """Whether the scale is held where it is"""

    def reset(self) -> None:
        """Start anew."""
        self._start(self.home)

    @property
    def home(self) -> torch.device:
        """The device that the tuner's numbers live on."""
        return self.scalars.packed.device

    @property
    def scale(self) -> Tensor:
        """The learned scale S, as a view of what is stored."""
        return self.scalars.scale

    def to(self, home: torch.device) -> None:
        """Follow the parameters to another device."""
        if self.home == home:
            return
        if self.home.type == "meta":  # the model has been given its memory
            self._start(home)
            return
        self.scalars.to(home)
        self.counts.to(home)

    def find_ranks(self, optimizer: Optimizer) -> Ranks | None:
        """The processes that share the optimizer's parameters, if any do."""
        self._ranks = ranks_of(optimizer, self.process_group, self._ranks)
        return self._ranks if self._ranks.group is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mechanism":
        # A process group is what it is; a copy works in the same one.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            shared = name in ("process_group", "_ranks", "carrier")
            setattr(copied, name, value if shared else copy.deepcopy(value, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise ValueError(NO_PICKLE)
        return {**vars(self), "_ranks": None}
