"""From the host to the device, without waiting."""

from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Any, dtype: torch.dtype, device: torch.device, captured: list[Any] | None = None
) -> Tensor:
    """Numbers on the device. A CUDA graph copies them again at each replay: while one is captured,
    their memory on the host is put into `captured`, so that it stays."""
    pinned = device.type == "cuda"
    values = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned)
    if captured is not None:
        captured.append(values)
    return values.to(device, non_blocking=True, copy=True)
