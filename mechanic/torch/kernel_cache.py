"""What the kernels keep from step to step."""

from typing import Any

from torch import Tensor


class KernelCache:
    """The kernels' memory of one optimizer; a copy of the optimizer finds everything anew."""

    def __init__(self) -> None:
        self.captured: list[Any] = []
        """What the replays of CUDA graphs read, and so must outlive the step"""
        self.listening: dict[Tensor, Any] = {}
        """The hooks on the parameters that tell when a gradient has arrived"""
        self.newcomers: Any = None
        """The parameters that are seen for the first time, until their first step is made
        (`kernels.newcomers.Newcomers`)"""
        self.drop_plan()

    def drop_plan(self) -> None:
        """Have the kernels find everything anew."""
        newcomers, self.newcomers = self.newcomers, None
        if newcomers is not None:
            newcomers.take_back()
        self.plan: Any = None
        """Where the kernels find everything (`kernels.plan.Plan`)"""
        self.arrivals: Any = None
        """What was summed up as it arrived (`kernels.arrivals.Arrivals`)"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelCache":
        return KernelCache()

    def __reduce__(self) -> tuple[type["KernelCache"], tuple[()]]:
        return KernelCache, ()
