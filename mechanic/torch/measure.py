"""The sums that a step takes: this process's part of them, completed by `sharding.begin_sums`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mechanic import tuner
from mechanic.advance import ABSURD, FIRST_STEPS, SAMPLE
from mechanic.options import Options
from mechanic.torch import sharding, vectors
from mechanic.torch.base import Proposal
from mechanic.torch.flag import NO, Flag
from mechanic.torch.history import StepRates
from mechanic.torch.rates import Rate, as_factor, proportional_lr
from mechanic.torch.scalars import Numbers, can_look, can_wait, scalar_dtype
from mechanic.torch.sharding import Ranks
from mechanic.torch.vectors import DISPLACEMENT, Batch

FARTHEST = 1e36
"""A hundredth of float32's largest number: what it bounds grows by a few times in one step."""

# Sums within these bounds are right in float32: no square in them that matters has vanished, and
# none has become infinite.
LEAST, MOST = 1e-30, 1e30
TOO_LARGE = (FARTHEST / proportional_lr(half=False)) ** 2
"""A square of gradients from which on an update may overflow, at the lr that bases are run at. The
kernels take such gradients for infinite."""


_has_infinite: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Whether an optimizer has a weight that is NaN or inf, as far as the host has looked."""


class Ready(NamedTuple):
    """A step that is ready to be made: what there is to know before anything is computed."""

    options: Options
    batches: list[Batch]
    """The parameters that have a gradient"""
    rates: StepRates
    numbers: Numbers
    """What the tuner knows before the step"""
    ranks: Ranks | None
    """The processes that share the parameters, if any do"""
    found_inf: Tensor | None
    """Above 0 if someone has found NaN or inf in the gradients; None where no one has looked"""
    doubts_update: bool = False
    """Whether the update is looked at for NaN and inf before it is applied"""
    has_infinite: bool = False
    """Whether a weight is known to be infinite"""
    overlap: bool = False
    """Whether two parameters are one and the same memory"""

    @property
    def home(self) -> torch.device:
        """The device of the tuner's numbers."""
        device: torch.device = self.numbers.scale.device
        return device

    def rate_of(self, batch: Batch) -> Rate:
        """How the group of a batch takes part."""
        return self.rates.rates[batch.group]


class Parts(NamedTuple):
    """This process's part of the sums that are taken before the base's step; added up over all
    processes, the sums. They travel in one message, a number for each field."""

    dg: Tensor
    dx: Tensor | float
    gg: Tensor | float
    """‖g‖² of the groups whose lr is not 0"""
    all_gg: Tensor | float
    """‖g‖² of all groups, by which gradients are clipped"""
    xx: Tensor | float
    dd: Tensor | float
    new_x1: Tensor | float
    """‖x‖² of the parameters that are seen for the first time"""
    new_d: Tensor | float
    """Their number"""
    live: Tensor | float
    """Above 0 if there is a gradient in a group whose lr is not 0"""
    found_inf: Tensor | float
    """GradScaler's word for NaN and inf, which a fused base honours whatever the options"""
    measures_update: Tensor | float
    """Above 0 if a process wants the norm of the update itself to be measured"""


def _looked_at(ready: Ready, take: Callable[[bool], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Sums in the dtype that is computed in, and once more in float64 where float32 may be too
    narrow for them. On a GPU, where looking would mean to wait, they stay as they are."""
    sums = take(False)
    if not can_look(ready.home) or all(LEAST < abs(float(own)) < MOST for own in sums):
        return sums
    return take(True)


def measure(optimizer: Any, ready: Ready) -> Parts:
    """Everything that need not wait for the base's step."""
    options, home = ready.options, ready.home
    live = NO
    for batch in ready.batches:
        if batch.device.type != "meta":
            live = live | ready.rate_of(batch).live.to(home)
    dg, gg, all_gg = measure_gradients(optimizer, ready)
    needs_x = tuner.reads_x(options) and not tuner.RULES[options.preset].decays_after_base
    params = [batch.params for batch in ready.batches]
    dx, xx = decay_sums(ready, params) if needs_x else (0.0, 0.0)
    new_x1, new_d = _new_reference(optimizer, ready)
    return Parts(
        dg=dg,
        dx=dx,
        gg=gg,
        all_gg=all_gg,
        xx=xx,
        dd=_displacement_square(optimizer, ready),
        new_x1=new_x1,
        new_d=new_d,
        live=live.value,
        found_inf=0.0 if ready.found_inf is None else ready.found_inf,
        measures_update=ready.rates.measures_update,
    )


def measure_gradients(
    optimizer: Any, ready: Ready
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """⟨Δ, g⟩, and ‖g‖² of the groups whose lr is not 0 and of all."""
    (dg,) = _looked_at(ready, lambda exact: (_signal(optimizer, ready, exact),))
    dg, (gg, all_gg) = dg * ready.numbers.share, _gradient_squares(ready)
    grad_scale = getattr(optimizer, "grad_scale", None)  # a fused base unscales by itself
    if grad_scale is None:
        return dg, gg, all_gg
    unscale = 1 / grad_scale.to(ready.home).reshape(())
    return dg * unscale, gg * unscale**2, all_gg * unscale**2


def needs_gradient_squares(options: Options) -> bool:
    """Whether ‖g‖² is among the sums."""
    takes_cosine = tuner.RULES[options.preset].takes_cosine
    return tuner.reads_x(options) or options.max_grad_norm < math.inf or takes_cosine


def needs_displacement_square(options: Options) -> bool:
    """Whether ‖Δ‖² is among the sums."""
    return options.s_init == "relative" or tuner.RULES[options.preset].takes_cosine


def _signal(optimizer: Any, ready: Ready, exact: bool) -> Tensor:
    """⟨Δ, g⟩, where Δ are the displacements as they are stored."""
    dg: list[Tensor] = []
    for batch in ready.batches:
        is_live = ready.rate_of(batch).live
        terms = vectors.inner(batch.displacements, batch.grads, exact=exact)
        if not is_live.is_yes or not batch.counts:
            # Such a group has no part in h, but a NaN in its gradients must still show.
            terms = [term * is_live.value * batch.counts for term in terms]
        if optimizer.param_groups[batch.group].get("maximize"):
            terms = [-term for term in terms]
        dg += terms
    return vectors.total(dg, ready.home)


def _gradient_squares(ready: Ready) -> tuple[Tensor | float, Tensor | float]:
    """‖g‖² of the groups whose lr is not 0, and of all."""
    if not needs_gradient_squares(ready.options):
        return 0.0, 0.0

    def take(exact: bool) -> tuple[Tensor, ...]:
        own = [
            (square, ready.rate_of(batch).live)
            for batch in ready.batches
            if batch.counts
            for square in vectors.squares(batch.grads, batch.dtype, exact=exact)
        ]
        all_gg = vectors.total([square for square, _ in own], ready.home)
        if all(is_live.is_yes for _, is_live in own):
            return all_gg, all_gg
        # Not by a product: inf · 0 is NaN.
        squares = [is_live.choose(square, 0.0) for square, is_live in own]
        return vectors.total(squares, ready.home), all_gg

    gg, all_gg = _looked_at(ready, take)
    return gg, all_gg


def decay_sums(ready: Ready, points: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """⟨Δ, x⟩ and ‖x‖², where x are points of each batch."""
    counted = [(b, own) for b, own in zip(ready.batches, points, strict=True) if b.counts]

    def take(exact: bool) -> tuple[Tensor, ...]:
        dx = [q for b, own in counted for q in vectors.inner(b.displacements, own, exact=exact)]
        xx = [q for b, own in counted for q in vectors.squares(own, b.dtype, exact=exact)]
        return vectors.total(dx, ready.home), vectors.total(xx, ready.home)

    dx, xx = _looked_at(ready, take)
    return dx * ready.numbers.share, xx


def _displacement_square(optimizer: Any, ready: Ready) -> Any:
    """‖Δ‖², of the parameters that have no gradient too: it is compared from step to step."""
    if not needs_displacement_square(ready.options):
        return 0.0
    stored = [
        (index, param, None, optimizer.state[param][DISPLACEMENT])
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.grad is None and DISPLACEMENT in optimizer.state.get(param, {})
    ]
    idle = vectors.batches(stored, counted=None if ready.ranks is None else ready.ranks.counted)
    counted = [batch for batch in (*ready.batches, *idle) if batch.counts]

    def take(exact: bool) -> tuple[Tensor, ...]:
        own = [vectors.squares(b.displacements, b.dtype, exact=exact) for b in counted]
        return (vectors.total([square for squares in own for square in squares], ready.home),)

    (square,) = _looked_at(ready, take)
    return square * ready.numbers.share**2


def _new_reference(optimizer: Any, ready: Ready) -> tuple[Tensor | float, int]:
    """‖x‖² of the parameters that are seen for the first time, and their number."""
    new = [
        (param, batch.counts)
        for batch in ready.batches
        for owner, param in zip(batch.owners, batch.params, strict=True)
        if DISPLACEMENT not in optimizer.state.get(owner, {})
    ]
    _look_for_infinite(optimizer, ready, [param for param, _ in new])
    counted = [param for param, counts in new if counts]
    x1 = robust_square(counted, ready.home) if counted else 0.0
    return x1, sum(param.numel() for param in counted)


def robust_square(tensors: list[Tensor], home: torch.device) -> Tensor:
    """‖x‖² without the elements that are no measure of the others: NaN, inf, and those `ABSURD`
    times as large as is typical. A single one of them could be all of ‖x‖."""
    held = [t for t in tensors if t.numel() and (t.device.type != "meta" or home.type == "meta")]
    if not held:
        return torch.zeros((), dtype=scalar_dtype(home), device=home)
    typical = torch.stack([_typical_size(tensor).to(home) for tensor in held]).median()
    bound = ABSURD * typical.clamp(min=tuner.FLOOR)
    terms = []
    for tensor in held:
        most = bound.to(tensor.device)
        for _, (piece,) in vectors.split(vectors.PIECE, tensor):
            wide = piece.to(most.dtype)
            terms.append(torch.where(wide.abs() <= most, wide, 0.0).square().sum())
    return vectors.total(terms, home)


def _typical_size(tensor: Tensor) -> Tensor:
    """The median of |x| in a sample of the elements; 0 if they are NaN."""
    sample = tensor.detach().reshape(-1)[:: -(-tensor.numel() // SAMPLE)]
    sizes = sample.abs().to(scalar_dtype(tensor.device))
    return torch.where(sizes.isnan(), 0.0, sizes).median()


def _look_for_infinite(optimizer: Any, ready: Ready, new: list[Tensor]) -> None:
    """Note whether weights are infinite: of all parameters the first time, then of new ones."""
    if not can_wait(ready.home):
        return
    known = _has_infinite.get(optimizer)
    if known is None:
        new = [param for batch in ready.batches for param in batch.params]
    if new or known is None:
        _has_infinite[optimizer] = bool(known) or not _are_finite(new)


def _are_finite(params: list[Tensor]) -> bool:
    held = [param for param in params if param.numel() and param.device.type != "meta"]
    largest = torch._foreach_norm(held, ord=math.inf) if held else []
    return all(math.isfinite(size) for size in largest)


def has_infinite(optimizer: Any) -> bool:
    """Whether a weight of an optimizer is known to be infinite."""
    return _has_infinite.get(optimizer, False)


def is_known_finite(optimizer: Any) -> bool:
    """Whether no weight of an optimizer is infinite, as far as the host has looked. It looks the
    first time that it is asked."""
    if optimizer not in _has_infinite:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        with_gradient = [param.detach() for param in params if param.grad is not None]
        _has_infinite[optimizer] = not _are_finite(with_gradient)
    return not _has_infinite[optimizer]


def expected_size(optimizer: Any, batches: list[Batch]) -> int:
    """The number of elements that are seen for the first time, as this process knows of them."""
    owners = [owner for batch in batches for owner in batch.owners]
    return sum(o.numel() for o in owners if DISPLACEMENT not in optimizer.state.get(o, {}))


def measure_proposal(ready: Ready, proposal: Proposal) -> dict[str, Tensor]:
    """This process's part of the sums that have to wait for the base, by their names in
    `tuner.Sums`. There are none in most steps."""
    late: dict[str, Tensor] = {}
    if tuner.RULES[ready.options.preset].decays_after_base:
        late["dx"], late["xx"] = decay_sums(ready, proposal.points)
    if not ready.rates.measures_update and not ready.doubts_update:
        return late
    (uu,) = _looked_at(ready, lambda exact: (_update_square(ready, proposal, exact),))
    return late | {"uu": uu}


def counted_update(ready: Ready, uu: Tensor, updates: Tensor) -> Tensor:
    """‖u‖² as the rule is told of it: 0 but in the first steps, and when a rate has risen. Whether
    it has, only the device may know."""
    if not ready.rates.measures_update:
        return torch.zeros_like(uu)
    is_needed = Flag(updates < FIRST_STEPS) | ready.rates.has_risen.to(ready.home)
    return is_needed.choose(uu, 0.0)


def is_extreme(ready: Ready, parts: Parts) -> bool:
    """Whether gradients are so large or small that a base may not be able to square them, as far as
    the host can look."""
    if not can_look(ready.home) or not isinstance(parts.gg, Tensor):
        return False
    gg = float(parts.gg)
    return gg > 0 and not LEAST < gg < MOST


def has_extremes(optimizer: Any, home: torch.device) -> bool:
    """Whether a base has numbers in its state that only extreme gradients leave there, as far as
    the host can look."""
    if not can_look(home):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    entries = [own for own in map(optimizer.state.get, params) if isinstance(own, dict)]
    held = [
        value
        for own in entries
        for name, value in own.items()
        if name != DISPLACEMENT and isinstance(value, Tensor)
    ]
    return any(map(_is_huge, map(sharding.here, held)))


def _is_huge(value: Tensor) -> bool:
    is_plain = type(value) in sharding.PLAIN and value.device.type == "cpu"
    if not is_plain or value.is_sparse or not value.is_floating_point() or not value.numel():
        return False
    return not float(value.abs().max()) < MOST


def _update_square(ready: Ready, proposal: Proposal, exact: bool) -> Tensor:
    """‖u‖² of the updates that count here."""
    uu = torch.zeros_like(ready.numbers.scale)
    for batch, *points in zip(ready.batches, proposal.points, proposal.origin, strict=True):
        rate = ready.rate_of(batch)
        if batch.counts and not rate.live.is_no:
            unit = as_factor(rate.unit, uu)
            squares = vectors.proposal_squares(
                batch, *points, has_infinite=ready.has_infinite, exact=exact
            )
            uu = uu + vectors.total(squares, ready.home) * unit**2
    return uu
