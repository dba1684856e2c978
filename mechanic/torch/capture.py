"""Steps that are recorded to be run later, without the host: compiled, traced, or captured in a
CUDA graph."""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_MODES = torch._C._TorchDispatchModeKey


def is_traced() -> bool:
    """Whether a step is compiled, traced by `make_fx`, or run on fake tensors: then no number can
    be read, and what is decided has to hold for every later run."""
    if torch.compiler.is_compiling():
        return True
    if not is_in_torch_dispatch_mode():
        return False
    return any(torch._C._get_dispatch_mode(mode) for mode in (_MODES.PROXY, _MODES.FAKE))


def is_fake() -> bool:
    """Whether a step is run on fake tensors alone, of which nothing can be known."""
    return is_traced() and not (
        torch.compiler.is_compiling() or torch._C._get_dispatch_mode(_MODES.PROXY)
    )


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now is captured in a CUDA graph."""
    if device.type != "cuda" or torch.compiler.is_compiling():  # compiled code cannot ask
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_to_decide(device: torch.device) -> None:
    """Refuse a decision by the host in a CUDA graph, whose replays it does not see."""
    if is_capturing(device):
        raise RuntimeError(
            "this step cannot be captured in a CUDA graph: the host has to decide whether to skip "
            "it. Use an optimizer with fused=True, or else mechanize(optimizer, "
            "skip_nonfinite=False)."
        )
