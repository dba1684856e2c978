"""CUDA graphs: what is captured once and replayed without the host."""

import torch


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
