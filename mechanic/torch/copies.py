"""The copies of the parameters that the base steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch import vectors
from mechanic.torch.sharding import PLAIN, is_spread
from mechanic.torch.twin import StandIns, stand_in
from mechanic.torch.vectors import Batch


class Copies(NamedTuple):
    """Copies of the parameters of a step."""

    points: list[list[Tensor]]
    """The copies, as each batch has its parameters"""
    stand_ins: StandIns
    """The same copies as parameters for a twin; none where the base is run in place"""
    are_kept: bool = False
    """Whether they are the tensors of a step before"""


def moved(copies: Copies, batches: list[Batch]) -> list[list[Tensor]]:
    """The copies, after the base has moved them: it may have given them other memory."""
    return [batch.like_params([copies.stand_ins[o] for o in batch.owners]) for batch in batches]


class _Kept(NamedTuple):
    own: Tensor
    """The stand-in"""
    point: Tensor
    """The stand-in in the form of a batch: real numbers, and the local part"""
    size: int
    """Its bytes"""


class CopyCache:
    """Stand-ins of parameters. Making a DTensor costs more than copying one, so they are made once.
    Their memory exists only during a step, so they are used only for bases that are known to keep
    no reference to them."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, _Kept] = {}

    def fill(self, batches: list[Batch]) -> Copies:
        """Copies of the parameters as they are now."""
        points = []
        for batch in batches:
            own = [self._allocate(o, p) for o, p in zip(batch.owners, batch.params, strict=True)]
            vectors.copy(own, batch.params)
            points.append(own)
        owners = [owner for batch in batches for owner in batch.owners]
        if len(self._kept) > len(owners):
            self._kept = {owner: self._kept[owner] for owner in owners}
        return Copies(points, {o: self._kept[o].own for o in owners}, are_kept=True)

    def free(self) -> None:
        """Give the memory back."""
        for kept in self._kept.values():
            kept.own.grad = None
            kept.point.untyped_storage().resize_(0)

    def _allocate(self, owner: Tensor, param: Tensor) -> Tensor:
        kept = self._kept.get(owner)
        if kept is None or not _is_like(kept, owner, param):
            own = stand_in(owner, owner.detach().clone())
            point = vectors.view(own, owner)
            kept = self._kept[owner] = _Kept(own, point, point.untyped_storage().nbytes())
        kept.point.untyped_storage().resize_(kept.size)
        return kept.point

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopyCache":
        return CopyCache()

    def __reduce__(self) -> tuple[type["CopyCache"], tuple[()]]:
        return CopyCache, ()


def _is_like(kept: _Kept, owner: Tensor, param: Tensor) -> bool:
    point = kept.point
    return (
        point.dtype == param.dtype
        and point.device == param.device
        and point.shape == param.shape
        and point.stride() == param.stride()
        and kept.own.requires_grad == owner.requires_grad
        and kept.own.is_inference() == torch.is_inference_mode_enabled()
    )


def can_be_kept(batches: list[Batch]) -> bool:
    """Whether stand-ins of these parameters may be kept: they are plain tensors or DTensors, no
    conjugate views, and no two of them share their memory."""
    owners = [owner for batch in batches for owner in batch.owners]
    plain = [owner for owner in owners if not is_spread(owner)]
    return (
        all(type(owner) in PLAIN for owner in plain)
        and not any(owner.is_complex() and owner.is_conj() for owner in plain)
        and len({owner.untyped_storage().data_ptr() for owner in plain if owner.numel()})
        == sum(owner.numel() > 0 for owner in plain)
    )


def record_copies(batches: list[Batch]) -> Copies:
    """Copies for one time, which autograd records where it is at work."""
    stand_ins = {
        owner: stand_in(owner, owner.clone()) for batch in batches for owner in batch.owners
    }
    points = [batch.like_params([stand_ins[o] for o in batch.owners]) for batch in batches]
    return Copies(points, stand_ins)


def plain_copies(batches: list[Batch]) -> Copies:
    """Copies to put the parameters back from, where the base is run on these themselves."""
    points = [[param.detach().clone() for param in batch.params] for batch in batches]
    return Copies(points, {})
