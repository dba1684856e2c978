"""The methods of `step_cost.py` over sharded parameters: DTensors on a mesh of one process."""

import dataclasses
import functools

import gpu_cases
import torch
from gpu_cases import Method, Params, Row
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

SHARDED = ("adamw", "mechanic", "prodigy", "schedule-free")
"""The rows that are also measured over DTensors; torch's fused SGD does not take them"""


@functools.cache
def mesh() -> DeviceMesh:
    """A mesh of this process alone."""
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def leave() -> None:
    """Leave the group that `mesh` has made, if it has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def over_dtensors(make: Method) -> Method:
    """A method over DTensors in the memory of the parameters and their gradients."""

    def make_sharded(params: Params) -> Optimizer:
        sharded = []
        for param in params:
            own = nn.Parameter(DTensor.from_local(param.detach(), mesh(), [Shard(0)]))
            own.grad = DTensor.from_local(param.grad, mesh(), [Shard(0)])
            sharded.append(own)
        return make(sharded)

    return make_sharded


def sharded(row: Row) -> Row:
    return dataclasses.replace(
        row,
        label=f"{row.label} over DTensors",
        make=over_dtensors(row.make),
        base=f"{row.base}-dtensor",
    )


ROWS = gpu_cases.ROWS | {f"{name}-dtensor": sharded(gpu_cases.ROWS[name]) for name in SHARDED}
