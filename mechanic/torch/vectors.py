"""The passes over the parameters: the sums that the tuner reads, and the update it scales.

This is the plain path: torch operators on lists of tensors, on any device, with no host
synchronisation. A parameter's displacement is float32 (float64 for float64 parameters, bfloat16 on
request) and has the parameter's shape; complex numbers stand in it as pairs of real ones.

It is stored up to one factor for all parameters, Δ = share·stored, so that a rule that forgets a
part of Δ changes a number instead of passing over the parameters.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.arrays import Array
from mechanic.options import Options
from mechanic.torch.scalars import scalar_dtype
from mechanic.torch.sharding import local

DISPLACEMENT = "mechanic_displacement"
"""The key of a parameter's displacement in `optimizer.state[parameter]`."""

# Below this many elements a tensor is cheaper in one call for a whole list, above it in fewer
# passes (on a CPU; docs/performance.md has the times).
_SMALL = 1 << 14

_WIDE = (torch.float32, torch.float64)  # what is computed in

# So many elements are moved at a time: few enough to need little memory, and enough for the calls
# not to cost more than the work.
PIECE = 1 << 18
"""The elements that are copied at a time, on a CPU."""
_PIECE_ON_GPU = 1 << 21
_NARROW_PIECE = 1 << 15  # rounding takes some 15 numbers for each element
_NARROW_PIECE_ON_GPU = 1 << 19


class Batch(NamedTuple):
    """Parameters with gradients, of one group, device and dtype; all tensors are real, and the
    local parts of what is sharded."""

    group: int
    device: torch.device
    dtype: torch.dtype
    """The dtype that is computed in"""
    owners: list[Tensor]
    """The parameters themselves, which key the optimizer's state"""
    params: list[Tensor]
    grads: list[Tensor]
    stored: list[Tensor]
    """The displacements as the optimizer's state holds them, sharded like the parameters"""
    displacements: list[Tensor]
    counts: bool = True
    """Whether its part of the sums counts here, or on another process that holds the same"""

    def like_params(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors that are like the owners, as `params` has those."""
        return [view(tensor, owner) for tensor, owner in zip(tensors, self.owners, strict=True)]

    @property
    def is_narrow(self) -> bool:
        """Whether parameters or displacements are held less exactly than they are computed."""
        return {self.params[0].dtype, self.displacements[0].dtype} != {self.dtype}


class Coefficients(NamedTuple):
    """How a step moves the parameters of a batch, where p is what the base proposes:
    x ← x + x_per_stored·stored + x_per_proposal·p and stored ← kept·stored + stored_per_proposal·p.
    """

    x_per_stored: Array
    x_per_proposal: Array
    stored_per_proposal: Array
    kept: Array = 1.0

    def times(self, unit: Array) -> "Coefficients":
        """The same for proposals in another unit."""
        proposals = self.x_per_proposal * unit, self.stored_per_proposal * unit
        return Coefficients(self.x_per_stored, *proposals, self.kept)

    def like(self, batch: Batch) -> "Coefficients":
        """The same on the device of a batch, and in the dtype that it is computed in, within which
        they stay: a proposal of 0 times inf is NaN."""
        device, dtype = batch.device, batch.dtype
        *values, kept = self
        moved = (torch.as_tensor(v, dtype=dtype, device=device) for v in values)
        own = Coefficients(*(value.nan_to_num(nan=math.nan) for value in moved))
        if self.keeps_all:
            return own
        return own._replace(kept=torch.as_tensor(kept, dtype=dtype, device=device))

    @property
    def keeps_all(self) -> bool:
        """Whether the host knows that no displacement is forgotten."""
        return type(self.kept) is float and self.kept == 1.0

    def of_stored(self, stored: list[Tensor]) -> list[Tensor]:
        """What is kept of displacements."""
        if self.keeps_all:
            return stored
        return [displacement * self.kept for displacement in stored]


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


def inner(a: list[Tensor], b: list[Tensor], *, exact: bool = False) -> list[Tensor]:
    """⟨a, b⟩ in terms that are to be added up: one for each pair, or for several small ones. They
    are in the dtype that `a` is computed in, if `exact` in float64, and `b` may be sparse."""
    if exact:
        return [_inner(x, y, torch.float64) for x, y in zip(a, b, strict=True)]
    terms: list[Tensor] = []
    small: list[tuple[Tensor, Tensor]] = []
    size = 0
    for x, y in zip(a, b, strict=True):
        if x.numel() > _SMALL or x.dtype is not y.dtype or x.dtype not in _WIDE or y.is_sparse:
            terms.append(_inner(x, y))
            continue
        small.append((x, y))
        size += x.numel()
        if size > _SMALL:
            terms.append(_inner_of_small(small))
            small, size = [], 0
    return [*terms, _inner_of_small(small)] if small else terms


def _inner_of_small(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    if len(pairs) == 1:
        return _inner(*pairs[0])
    products = torch._foreach_mul([x for x, _ in pairs], [y for _, y in pairs])
    flat = torch.cat([product.reshape(-1) for product in products])
    return flat.sum(dtype=scalar_dtype(flat.device))


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if b.is_sparse:
        b = b.coalesce()
        a, b = a.sparse_mask(b).values(), b.values()
    dtype = dtype or working_dtype(a)
    if a.numel() <= _SMALL:
        return torch.mul(a.to(dtype), b.to(dtype)).sum(dtype=scalar_dtype(a.device))
    if b.dtype == a.dtype == dtype and a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.view(-1), b.view(-1))
    parts = [torch.mul(x.to(dtype), y.to(dtype)).sum() for _, (x, y) in split(PIECE, a, b)]
    return torch.stack(parts).sum()


def squares(tensors: list[Tensor], dtype: torch.dtype, *, exact: bool = False) -> list[Tensor]:
    """The sum of ‖a‖² over tensors of one device, as a term that is to be added to others; the
    norms are taken in `dtype`, if `exact` in float64, and the tensors may be sparse."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if not dense:
        return []
    if exact:
        norms = torch._foreach_norm(dense, dtype=torch.float64)
    else:
        norms = torch._foreach_norm([t if t.dtype is dtype else t.to(dtype) for t in dense])
    wide = torch.stack(norms).to(scalar_dtype(norms[0].device))
    return [(wide * wide).sum()]


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
    by_key: dict[tuple[int, torch.device, torch.dtype, bool], Batch] = {}
    for group, param, grad, displacement in entries:
        counts = counted is None or param in counted
        key = (group, param.device, param.dtype, counts)
        if key not in by_key:
            dtype = working_dtype(param)
            by_key[key] = Batch(group, param.device, dtype, [], [], [], [], [], counts)
        batch = by_key[key]
        batch.owners.append(param)
        batch.params.append(view(param, param))
        batch.stored.append(displacement)
        batch.displacements.append(local(displacement))
        if grad is not None:
            batch.grads.append(view(grad, param))
    return list(by_key.values())


def view(tensor: Tensor, param: Tensor) -> Tensor:
    """A parameter, or a tensor like it, as a batch has it: real, and the local part. A conjugate
    view is worked on as what it is a view of."""
    if param.is_complex() and param.is_conj():
        tensor = tensor.conj()
    return real(local(tensor, like=param))


def shift(batch: Batch, points: list[Tensor], by: Tensor) -> None:
    """Move points, one for each parameter, by a multiple of the stored displacement."""
    for point, delta in zip(points, batch.displacements, strict=True):
        point.copy_(torch.addcmul(point.to(batch.dtype), delta.to(batch.dtype), by))


class Piece(NamedTuple):
    """A part of a batch that is moved at a time: whole small tensors, or a piece of a large one."""

    params: list[Tensor]
    stored: list[Tensor]
    points: list[Tensor]
    """Where the base has put the parameters"""
    origin: list[Tensor]
    """Where it found them"""
    first: int
    """The place of the first element in its tensor"""


def pieces(batch: Batch, points: list[Tensor], origin: list[Tensor]) -> Iterator[Piece]:
    """A batch in pieces that are moved one after the other."""
    limit = _NARROW_PIECE_ON_GPU if batch.is_narrow else _PIECE_ON_GPU
    if batch.device.type == "cpu":
        limit = _NARROW_PIECE if batch.is_narrow else PIECE
    rows = zip(batch.params, batch.displacements, points, origin, strict=True)
    together: list[tuple[Tensor, ...]] = []
    size = 0
    for tensors in rows:
        numel = tensors[0].numel()
        if numel > limit or batch.is_narrow:
            for first, parts in split(limit, *tensors):
                yield _piece([parts], first)
            continue
        if together and size + numel > limit:
            yield _piece(together, 0)
            together, size = [], 0
        together.append(tensors)
        size += numel
    if together:
        yield _piece(together, 0)


def _piece(rows: list[tuple[Tensor, ...]], first: int) -> Piece:
    params, stored, points, origin = (list(column) for column in zip(*rows, strict=True))
    return Piece(params, stored, points, origin, first)


def split(limit: int, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Tensors side by side in parts of about so many elements, each with its place."""
    if tensors[0].dim() == 0 or tensors[0].numel() <= limit:
        yield 0, tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    row = max(math.prod(tensors[0].shape[1:]), 1)
    rows = max(limit // row, 1)
    parts = zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
    for index, part in enumerate(parts):
        yield index * rows * row, part


def proposal_squares(
    batch: Batch,
    points: list[Tensor],
    origin: list[Tensor],
    *,
    has_infinite: bool = False,
    exact: bool = False,
) -> list[Tensor]:
    """‖p‖² of what the base proposes, for each parameter or in pieces."""
    return [
        square
        for piece in pieces(batch, points, origin)
        for square in squares(
            _proposals(piece, batch.dtype, has_infinite), batch.dtype, exact=exact
        )
    ]


def _proposals(piece: Piece, dtype: torch.dtype, has_infinite: bool) -> list[Tensor]:
    """What the base proposes. If some weights may be infinite, the others have to be told apart
    from them: inf − inf is NaN, but an infinite weight has not moved."""
    if piece.points[0].dtype == dtype:
        proposals = list(torch._foreach_sub(piece.points, piece.origin))
    else:
        pairs = zip(piece.points, piece.origin, strict=True)
        proposals = [point.to(dtype) - origin for point, origin in pairs]
    if has_infinite:
        for proposal, origin in zip(proposals, piece.origin, strict=True):
            proposal.masked_fill_(~origin.isfinite(), 0.0)
    return proposals


def moves(
    batch: Batch,
    points: list[Tensor],
    origin: list[Tensor],
    by: Coefficients,
    step: Tensor,
    *,
    has_infinite: bool = False,
) -> list[Callable[[], tuple[list[Tensor], list[Tensor]]]]:
    """What moves the parameters of a batch, for `commit`: one write for each piece. `step` is the
    number of the step, which decides how narrow numbers are rounded."""
    parts = pieces(batch, points, origin)
    return [
        functools.partial(_moved, piece, by, batch.dtype, step, has_infinite) for piece in parts
    ]


def _moved(
    piece: Piece, by: Coefficients, dtype: torch.dtype, step: Tensor, has_infinite: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What a step writes, and the values that it writes there: the next parameters and stored
    displacements of a piece. Nothing is written yet."""
    proposals, count = _proposals(piece, dtype, has_infinite), len(piece.params)
    targets = [*piece.stored, *piece.params]
    if {tensor.dtype for tensor in targets} == {dtype}:
        nexts = torch._foreach_addcmul(piece.params, piece.stored, [by.x_per_stored] * count)
        torch._foreach_addcmul_(nexts, proposals, [by.x_per_proposal] * count)
        kept = by.of_stored(piece.stored)
        stored = torch._foreach_addcmul(kept, proposals, [by.stored_per_proposal] * count)
        return targets, [*stored, *nexts]
    (x,), (narrow,), (proposal,) = piece.params, piece.stored, proposals
    wide = narrow.to(dtype)
    point = torch.addcmul(x, wide, by.x_per_stored).addcmul_(proposal, by.x_per_proposal)
    (wide,) = by.of_stored([wide])
    wide = torch.addcmul(wide, proposal, by.stored_per_proposal)
    rounded = dither(wide, narrow.dtype, step, piece.first, later=True)
    return targets, [rounded, dither(point, x.dtype, step, piece.first)]


def move_recorded(batch: Batch, points: list[Tensor], by: Coefficients) -> list[Tensor]:
    """Move the parameters for autograd to record, the coefficients taken as constants; returns the
    next displacements."""
    stored = []
    for param, point, delta in zip(batch.params, points, batch.displacements, strict=True):
        proposal = point - param
        (kept,) = by.of_stored([delta])
        stored.append(kept + by.stored_per_proposal * proposal)
        param.copy_(param + by.x_per_stored * delta + by.x_per_proposal * proposal)
    return stored


def put_back(batches: list[Batch], before: list[list[Tensor]]) -> None:
    """Bring the parameters to where they were `before`."""
    with torch.no_grad():
        for batch, points in zip(batches, before, strict=True):
            copy(batch.params, points)


def copy(to: list[Tensor], values: list[Tensor]) -> None:
    """Write in place, with one call where that is right.

    Compiled, a write to a list of tensors on a GPU becomes something else in torch 2.11, and a
    write to a single float64 tensor on a CPU is lost in torch 2.13.
    """
    if not to:
        return
    if torch.compiler.is_compiling() and to[0].is_cuda:
        for one, value in zip(to, values, strict=True):
            one.copy_(value)
    else:
        torch._foreach_copy_(to, values)


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
    what is rounded `later` has thresholds that are shifted by one half.
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
