"""The passes over the parameters: the sums that the tuner reads, and the update it scales.

This is the plain path: torch operators on lists of tensors, on any device, with no host
synchronisation. A parameter's displacement is float32 (float64 for float64 parameters, bfloat16 on
request) and has the parameter's shape; complex numbers stand in it as pairs of real ones.

It is stored up to one factor for all parameters, Δ = share·stored, so that a rule that forgets a
part of Δ changes a number instead of passing over the parameters.
"""

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.options import Options
from mechanic.torch.sharding import local

# Below this many elements a tensor is cheaper in one call for a whole list, above it in fewer
# passes (on a CPU; docs/performance.md has the times).
_SMALL = 1 << 14

# Narrow parameters are worked on in pieces of this many elements.
_PIECE = 1 << 15


class Batch(NamedTuple):
    """Parameters with gradients, of one group, device and dtype; all tensors are real, and the
    local parts of what is sharded."""

    group: int
    owners: list[Tensor]
    """The parameters themselves, which key the optimizer's state"""
    params: list[Tensor]
    grads: list[Tensor]
    stored: list[Tensor]
    """The displacements as the optimizer's state holds them, sharded like the parameters"""
    displacements: list[Tensor]
    counts: bool = True
    """Whether its part of the sums counts here, or on another process that holds the same"""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.params[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is computed in."""
        return working_dtype(self.params[0])

    @property
    def is_narrow(self) -> bool:
        """Whether parameters or displacements are held less exactly than they are computed."""
        return {self.params[0].dtype, self.displacements[0].dtype} != {self.dtype}


class Coefficients(NamedTuple):
    """How a step moves the parameters of a batch, p being what the base proposed:
    x ← x + grow·stored + scale·p and then stored ← stored + gain·p."""

    grow: Tensor
    scale: Tensor
    gain: Tensor

    def like(self, batch: Batch) -> "Coefficients":
        """The same on the device of a batch, and in the dtype that it is computed in."""
        return Coefficients(*(value.to(batch.device, batch.dtype) for value in self))


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def new_displacement(param: Tensor, options: Options) -> Tensor:
    """A displacement of zero."""
    return torch.zeros_like(real(param.detach()), dtype=displacement_dtype(param, options))


def displacement_dtype(param: Tensor, options: Options) -> torch.dtype:
    """The dtype of a parameter's displacement."""
    working = working_dtype(param)
    narrow = options.displacement == "bfloat16" and working == torch.float32
    return torch.bfloat16 if narrow else working


def working_dtype(param: Tensor) -> torch.dtype:
    """The dtype that a parameter's step is computed in."""
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


def displacement_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of a parameter's displacement."""
    return (*param.shape, 2) if param.is_complex() else tuple(param.shape)


def inner(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """⟨a, b⟩ of each pair, in the dtype that `a` is computed in; `b` may be sparse."""
    return [_inner(*pair) for pair in zip(a, b, strict=True)]


def _inner(a: Tensor, b: Tensor) -> Tensor:
    if b.is_sparse:
        b = b.coalesce()
        a, b = a.sparse_mask(b).values(), b.values()
    dtype = working_dtype(a)
    if a.numel() <= _SMALL:
        return torch.mul(a.to(dtype), b.to(dtype)).sum()
    if b.dtype == a.dtype == dtype and a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.view(-1), b.view(-1))
    parts = [torch.mul(x.to(dtype), y.to(dtype)).sum() for _, (x, y) in _pieces(a, b)]
    return torch.stack(parts).sum()


def squares(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """‖a‖² of each tensor, in `dtype`; they may be sparse."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    norms = torch._foreach_norm([t.to(dtype) for t in dense])
    return list(torch._foreach_mul(norms, norms))


def total(terms: Iterable[Tensor], home: torch.device) -> Tensor:
    """The sum of scalars that live on any device, in the dtype of `home`'s scalars."""
    dtype = scalar_dtype(home)
    of_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for term in terms:
        if term.device.type != "meta" or home.type == "meta":
            of_kind.setdefault((term.device, term.dtype), []).append(term)
    sums = [
        torch.stack(own).sum(dtype=dtype).to(home, non_blocking=True) for own in of_kind.values()
    ]
    if not sums:
        return torch.zeros((), dtype=dtype, device=home)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def scalar_dtype(device: torch.device) -> torch.dtype:
    """float64, so that h² neither overflows nor vanishes; float32 where there is none."""
    return torch.float32 if device.type == "mps" else torch.float64


def home_of(devices: list[torch.device], groups: list[dict[str, Any]]) -> torch.device | None:
    """Where the tuner's scalars live: with the parameters of this step, on an accelerator if one
    holds any; where none of them has memory, with the optimizer's others, if there are any."""
    found = list(dict.fromkeys(devices))
    if all(device.type == "meta" for device in found):
        found = list(dict.fromkeys(param.device for group in groups for param in group["params"]))
    for kind in ("meta", "cpu"):
        found = [device for device in found if device.type != kind] or found
    return found[0] if found else None


def batches(
    entries: Iterable[tuple[int, Tensor, Tensor | None, Tensor]],
    counted: Container[Tensor] | None = None,
) -> list[Batch]:
    """Batches of parameters, given by their group, gradient and displacement. Where some are
    sharded, `counted` are those whose local part counts here."""
    made: dict[tuple[int, torch.device, torch.dtype, bool], Batch] = {}
    for group, param, grad, displacement in entries:
        counts = counted is None or param in counted
        key = (group, param.device, param.dtype, counts)
        if key not in made:
            made[key] = Batch(group, [], [], [], [], [], counts)
        batch = made[key]
        batch.owners.append(param)
        # A conjugate view is worked on as what it is a view of.
        conjugate = param.is_complex() and param.is_conj()
        batch.params.append(real(local(param.conj() if conjugate else param)))
        batch.stored.append(displacement)
        batch.displacements.append(local(displacement))
        if grad is not None:
            grad = grad.conj() if conjugate else grad
            batch.grads.append(real(local(grad, like=param)))
    return list(made.values())


def shift(batch: Batch, by: Tensor) -> None:
    """Move the parameters by a multiple of the stored displacement."""
    if batch.is_narrow:
        for param, delta in zip(batch.params, batch.displacements, strict=True):
            param.copy_(torch.addcmul(param.to(batch.dtype), delta.to(batch.dtype), by))
    elif _one_by_one(batch.params):
        for param, delta in zip(batch.params, batch.displacements, strict=True):
            param.addcmul_(delta, by)
    else:
        torch._foreach_addcmul_(batch.params, batch.displacements, [by] * len(batch.params))


def propose(batch: Batch, origin: list[Tensor]) -> None:
    """Leave in each parameter what the base has added to it, which it found at `origin`; not in a
    narrow one, which could not hold it."""
    if batch.is_narrow:
        return
    if _one_by_one(batch.params):
        for param, x in zip(batch.params, origin, strict=True):
            param.sub_(x)
    else:
        torch._foreach_sub_(batch.params, origin)


def proposal_squares(batch: Batch, origin: list[Tensor]) -> list[Tensor]:
    """‖p‖² of what `propose` found, for each parameter or in pieces."""
    if not batch.is_narrow:
        return squares(batch.params, batch.dtype)
    added = (
        param.to(batch.dtype) - x
        for pair in zip(batch.params, origin, strict=True)
        for _, (param, x) in _pieces(*pair)
    )
    return [q for proposal in added for q in squares([proposal], batch.dtype)]


def apply(
    batch: Batch, before: list[Tensor], origin: list[Tensor], by: Coefficients, step: Tensor
) -> None:
    """Play the next point. On entry the parameters hold what `propose` left there."""
    params, stored, count = batch.params, batch.displacements, len(before)
    if batch.is_narrow:
        for tensors in zip(params, before, origin, stored, strict=True):
            for first, (param, x, base_x, delta) in _pieces(*tensors):
                proposal = param.to(batch.dtype) - base_x
                wide = delta.to(batch.dtype)
                point = torch.addcmul(x, wide, by.grow).addcmul_(proposal, by.scale)
                moved = torch.addcmul(wide, proposal, by.gain)
                delta.copy_(dither(moved, delta.dtype, step, first, later=True))
                param.copy_(dither(point, param.dtype, step, first))
        return
    if _one_by_one(params):
        for param, x, delta in zip(params, before, stored, strict=True):
            point = torch.addcmul(x, delta, by.grow).addcmul_(param, by.scale)
            delta.addcmul_(param, by.gain)
            param.copy_(point)
        return
    torch._foreach_addcmul_(before, stored, [by.grow] * count)
    torch._foreach_addcmul_(stored, params, [by.gain] * count)
    if sum(param.numel() for param in params) > count * _SMALL:
        for param, x in zip(params, before, strict=True):
            torch.addcmul(x, param, by.scale, out=param)
    else:
        torch._foreach_addcmul_(before, params, [by.scale] * count)
        torch._foreach_copy_(params, before)


def apply_recorded(batch: Batch, before: list[Tensor], by: Coefficients) -> list[Tensor]:
    """`apply` for autograd to record, the coefficients taken as constants; returns the next
    displacements. On entry the parameters are where the base has put them."""
    moved = []
    for param, x, delta in zip(batch.params, before, batch.displacements, strict=True):
        proposal = param - x
        param.copy_(x + by.grow * delta + by.scale * proposal)
        moved.append(delta + by.gain * proposal)
    return moved


def _pieces(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Tensors side by side in pieces, each with its place: what is made of one stays small."""
    if tensors[0].dim() == 0:
        yield 0, tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    row = max(math.prod(tensors[0].shape[1:]), 1)
    rows = max(_PIECE // row, 1)
    pieces = zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
    for index, piece in enumerate(pieces):
        yield index * rows * row, piece


def put_back(batches: list[Batch], before: list[list[Tensor]]) -> None:
    """Bring the parameters to where they were `before`."""
    with torch.no_grad():
        for batch, points in zip(batches, before, strict=True):
            copy(batch.params, points)


def copy(to: list[Tensor], values: list[Tensor]) -> None:
    """Write in place."""
    if _one_by_one(to):
        for one, value in zip(to, values, strict=True):
            one.copy_(value)
    else:
        torch._foreach_copy_(to, values)


def _one_by_one(to: list[Tensor]) -> bool:
    """Whether tensors are to be written to one by one. Compiled, what is written to a list of them
    on a GPU becomes something else in torch 2.11, and to a single float64 on a CPU is lost in
    torch 2.13."""
    return torch.compiler.is_compiling() and to[0].is_cuda


def clip(batch: Batch, factor: Tensor) -> None:
    """Multiply the gradients with a factor, in place."""
    for grad in batch.grads:
        grad.mul_(factor.to(grad.device, grad.dtype))


def dither(
    point: Tensor, dtype: torch.dtype, step: Tensor, first: int = 0, *, later: bool = False
) -> Tensor:
    """Round to a narrow dtype so that many small steps add up to what they should.

    Rounding to nearest would swallow every step below half a unit in the last place. Here an
    element is rounded down or up in proportion to where it lies between its neighbours, against
    a threshold that runs evenly through [0, 1) from step to step and from element to element
    (Roberts' R2 sequence), so that it is reproducible and needs no random state. A value that
    `dtype` can represent is left as it is. `first` is the place of the first element in its tensor;
    what is rounded `later` has thresholds that lie half a turn on.
    """
    if point.dtype == dtype:
        return point
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    smallest = round(math.log2(info.smallest_normal) + math.log2(info.eps))
    exponent = torch.frexp(point).exponent - digits
    unit = torch.exp2(exponent.clamp_(min=smallest).to(point.dtype))
    index = torch.arange(first, first + point.numel(), device=point.device).view(point.shape)
    sequence = index * 0xC13FA9A9 + step.to(point.device) * 0x91E10DA5  # 2³²/ρ and 2³²/ρ²
    sequence = sequence + (later << 31)
    threshold = (sequence >> 8 & 0xFFFFFF).to(point.dtype) / (1 << 24)
    steps = point / unit
    below = steps.floor()
    return torch.where(steps - below > threshold, below + 1, below).mul_(unit).to(dtype)
