"""The hooks that tell when a gradient has arrived, to sum it up at once."""

import functools
import weakref

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from mechanic.torch.capture import is_capturing
from mechanic.torch.mechanism import Mechanism


def listen(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Put a hook on each parameter, where `sums_in_backward` asks for it."""
    if not mechanism.options.sums_in_backward:
        return
    listening = mechanism.kernels.listening
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in listening and param.requires_grad and param.is_leaf:
                hook = functools.partial(_arrive, weakref.ref(mechanism))
                listening[param] = param.register_post_accumulate_grad_hook(hook)


def stop_listening(mechanism: Mechanism) -> None:
    """Take the hooks off the parameters."""
    for handle in mechanism.kernels.listening.values():
        handle.remove()
    mechanism.kernels.listening.clear()


def _arrive(owner: "weakref.ref[Mechanism]", param: Tensor) -> None:
    mechanism = owner()
    if mechanism is None or mechanism.kernels.arrivals is None or is_capturing(mechanism.home):
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return  # where processes share the gradients, this is not yet their mean
    from mechanic.torch.kernels import launch

    arrived, plan = mechanism.kernels.arrivals.note(param), mechanism.kernels.plan
    if arrived is not None:
        section, address, groups = arrived
        with torch.no_grad(), plan.on_device():
            launch.sum_one(plan, mechanism, section, address, groups, plan.layout.table)
