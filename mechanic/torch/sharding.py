"""Parameters that are spread over processes: which part is here, and how sums are completed.

The one place that knows of DTensor and of process groups. Everything else works on the local part
of each tensor; a sum over the parameters is this process's part of it, completed by one
all-reduce. An element that several processes hold counts on one of them alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

PLAIN = (Tensor, Parameter)
"""The types of tensors that are whole, and no other than they seem."""


class Ranks(NamedTuple):
    """The processes that share the parameters of an optimizer."""

    group: Any
    """The process group that sums are completed over; None where each process has everything"""
    params: tuple[Tensor, ...]
    """The parameters that this was made for"""
    counted: frozenset[Tensor]
    """Those of them whose local part counts here: no other process counts the same part"""


def begin_sums(ranks: Ranks | None, parts: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """Begin to add up numbers over processes, in one message; what is returned waits for the sums
    and gives them. The first number is a tensor, and the others may be."""
    if ranks is None:
        return lambda: parts
    like: Tensor = parts[0]
    sums = torch.stack(
        [
            part.to(like).reshape(()) if isinstance(part, Tensor) else like.new_full((), part)
            for part in parts
        ]
    )
    finish = begin_sum(ranks, sums)
    return lambda: finish().unbind()


def begin_sum(ranks: Ranks, numbers: Tensor) -> Callable[[], Tensor]:
    """Begin to add up a message over processes, in place. What is returned waits for the sums and
    gives them; on a GPU it is the stream that waits, and not the host."""
    work = dist.all_reduce(numbers, group=ranks.group, async_op=True)

    def finish() -> Tensor:
        if work is not None:  # under the fake backend of tests and tracers there is none
            work.wait()
        return numbers

    return finish


class Message(NamedTuple):
    """What a process tells the others in a step, in memory that stays where it is."""

    ranks: Ranks
    parts: Tensor
    """Its part of the sums, in the order of `measure.Parts`"""
    late: Tensor
    """Its part of the sums that have to wait for them"""


def new_message(ranks: Ranks, size: int, device: torch.device) -> Message:
    """A message of so many sums, and one that is late."""
    numbers = torch.zeros(size, dtype=torch.float64, device=device)
    return Message(ranks, numbers, numbers.new_zeros(1))


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (FSDP2, tensor parallelism)."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part of a tensor that is here, in memory shared with it, placed `like` another."""
    if not is_spread(tensor):
        return tensor
    if like is not None and tensor.placements != like.placements:  # type: ignore[attr-defined]
        tensor = tensor.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here, without asking how it is placed. It is called for every
    tensor in every step, and made to be fast."""
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def here_like(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The part of a tensor that is here, if it is placed `like` another: nothing is sent."""
    if getattr(tensor, "placements", None) != getattr(like, "placements", None):
        return None
    part = here(tensor)
    if type(part) not in PLAIN and hasattr(part, "trigger_wait"):
        part = part.trigger_wait()  # it is still being received; the stream waits
    return part


def ranks_of(optimizer: Optimizer, group: Any, known: Ranks | None = None) -> Ranks:
    """The processes that share an optimizer's parameters: those of the given group, or else of
    the meshes of its DTensors. `known` is what was found before.

    Raises:
        ValueError: for parameters that are spread in a way that needs the group to be given, or
            that cannot be tuned.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return _ALONE
    params = tuple(param for one in optimizer.param_groups for param in one["params"])
    if known is not None and list(map(id, known.params)) == list(map(id, params)):
        return known
    meshes = list({id(p.device_mesh): p.device_mesh for p in params if is_spread(p)}.values())
    flat = frozenset(p for p in params if getattr(p, "_fsdp_flattened", False))
    if group is None and not meshes:
        if flat:
            raise ValueError(
                "these parameters belong to FullyShardedDataParallel, and each process would learn "
                "a scale of its own. Give its group, mechanize(optimizer, "
                "process_group=model.process_group), or use fully_shard (FSDP2), which needs none."
            )
        return Ranks(None, params, frozenset(params))
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS takes sums of its own, over this process's part of the parameters alone. "
            "Use another optimizer where parameters are sharded."
        )
    own = sorted({rank for mesh in meshes for rank in _ranks_in(mesh)}) or [dist.get_rank()]
    if group is None:
        group = _group_of(tuple(own), meshes)
    elif outside := set(own) - set(dist.get_process_group_ranks(group)):
        raise ValueError(
            f"process_group leaves out ranks {sorted(outside)}, which hold parts of the "
            "parameters. Give one with all ranks that do, or none for DTensors alone."
        )
    if flat:  # what FSDP1 was told to ignore is the same on all of its ranks
        first = dist.get_process_group_ranks(group)[0]
        counted = frozenset(p for p in params if p in flat or dist.get_rank() == first)
    else:
        counted = frozenset(p for p in params if _counts(p, own[0]))
    return Ranks(group, params, counted)


_ALONE = Ranks(None, (), frozenset())


def _counts(param: Tensor, first: int) -> bool:
    """Whether the local part of a parameter counts. Beside DTensors a plain tensor is the same
    on all their ranks and counts on the `first`, and so is a DTensor on a part of their mesh."""
    if not is_spread(param):
        return dist.get_rank() == first
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"a parameter is on a mesh of ranks {_ranks_in(mesh)}, of which this, rank "
            f"{dist.get_rank()}, is none. Give the optimizer the parameters of its own rank."
        )
    places = zip(coordinate, param.placements, strict=True)  # type: ignore[attr-defined]
    repeated = any(index > 0 for index, placement in places if placement.is_replicate())
    return not repeated and first in _ranks_in(mesh)


def check_size(found: int, expected: int) -> None:
    """Refuse parameters that no process counts: their meshes are not parts of one another."""
    if found < expected:
        raise ValueError(
            f"of {expected} elements of this rank's parameters only {found} are counted: a "
            "parameter is on a mesh that other ranks of the optimizer know nothing of. Give such "
            "parameters an optimizer of their own, or give process_group=, all ranks that hold "
            "any."
        )


def device_of(group: Any) -> torch.device:
    """Where the scalars of a process that has no parameters live."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def agree(values: Tensor, group: Any) -> bool:
    """Whether all processes of a group hold the same values, bit for bit."""
    bits = values.view(torch.int64) if values.dtype == torch.float64 else values.view(torch.int32)
    extremes = torch.stack([bits, ~bits])  # the complement turns a minimum into a maximum
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return bool((extremes[0] == ~extremes[1]).all())


def _ranks_in(mesh: Any) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _group_of(ranks: tuple[int, ...], meshes: list[Any]) -> Any:
    """A process group of just these ranks: one that there is, or a new one, made once."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for mesh in meshes:
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            return mesh.get_group()
    world, group = _groups.get(ranks, (None, None))
    if world is not dist.group.WORLD:  # none yet, or of a world that is no more
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _groups[ranks] = (dist.group.WORLD, group)
    return group
