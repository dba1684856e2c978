"""What the host has to know of a step that the device makes."""

import torch
from torch import Tensor

from mechanic.torch.capture import refuse_to_decide
from mechanic.torch.kernels.upload import upload


class Question:
    """A question of yes or no that the device answers; what is launched later is not waited for."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._answer = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=is_cuda)
        self._is_asked = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def ask(self, question: Tensor) -> None:
        """Have the device answer."""
        refuse_to_decide(question.device)
        self._answer.copy_(question, non_blocking=True)
        if self._is_asked is not None:
            self._is_asked.record()

    def wait(self) -> bool:
        """The answer, when the device has come to it."""
        if self._is_asked is not None:
            self._is_asked.synchronize()
        return bool(self._answer)


class StepCounters:
    """The steps that a base counts for each parameter. Where it counts on the host, the device has
    counters of its own that are kept equal to them."""

    def __init__(self, steps: list[Tensor], device: torch.device) -> None:
        self.steps = steps
        """The base's own counters; none where it does not count"""
        self.is_on_host = bool(steps) and steps[0].device != device
        self._mirrored: list[float] = []
        self._mirror = torch.zeros(max(len(steps), 1), dtype=torch.float32, device=device)

    def address_of(self, place: int) -> int:
        """Where the kernels find the counter of a parameter."""
        if self.steps and not self.is_on_host:
            return self.steps[place].data_ptr()
        return self._mirror.data_ptr() + 4 * min(place, len(self._mirror) - 1)

    def mirror(self) -> None:
        """Bring the device's counters to the host's."""
        steps = [float(step) for step in self.steps]
        if steps != self._mirrored:
            self._mirror.copy_(upload(steps, torch.float32, self._mirror.device))
            self._mirrored = steps

    def count(self, addresses: list[int]) -> None:
        """Count a step on the host, for the parameters whose gradient has an address; the device
        has done so already."""
        moved = [step for step, at in zip(self.steps, addresses, strict=True) if at]
        torch._foreach_add_(moved, 1.0)
        self._mirrored = [
            count + (at != 0) for count, at in zip(self._mirrored, addresses, strict=True)
        ]
