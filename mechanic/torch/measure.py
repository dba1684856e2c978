"""The sums that a step takes: this process's part of them, completed by `sharding.begin_sums`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import vectors
from mechanic.torch.base import Proposal
from mechanic.torch.flag import NO, Flag
from mechanic.torch.history import FIRST_STEPS, StepRates
from mechanic.torch.mechanism import DISPLACEMENT
from mechanic.torch.rates import Rate, as_factor
from mechanic.torch.scalars import Numbers
from mechanic.torch.sharding import Ranks
from mechanic.torch.vectors import Batch


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


def measure(optimizer: Any, ready: Ready) -> Parts:
    """Everything that need not wait for the base's step."""
    options, home, share = ready.options, ready.home, ready.numbers.share
    dg: list[Tensor] = []
    live = NO
    for batch in ready.batches:
        is_live = ready.rate_of(batch).live
        terms = vectors.inner(batch.displacements, batch.grads)
        if not is_live.is_yes or not batch.counts:
            # Such a group has no part in h, but a NaN in its gradients must still show.
            terms = [term * is_live.value * batch.counts for term in terms]
        if optimizer.param_groups[batch.group].get("maximize"):
            terms = [-term for term in terms]
        dg += terms
        if batch.device.type != "meta":
            live = live | is_live.to(home)
    grad_scale = getattr(optimizer, "grad_scale", None)  # a fused base unscales by itself
    dg_sum, (gg, all_gg) = vectors.total(dg, home) * share, _gradient_squares(ready)
    if grad_scale is not None:
        unscale = 1 / grad_scale.to(home).reshape(())
        dg_sum, gg, all_gg = dg_sum * unscale, gg * unscale**2, all_gg * unscale**2
    needs_x = tuner.reads_x(options) and not tuner.RULES[options.preset].decays_after_base
    params = [batch.params for batch in ready.batches]
    dx, xx = decay_sums(ready, params) if needs_x else (0.0, 0.0)
    new_x1, new_d = _new_reference(optimizer, ready)
    return Parts(
        dg=dg_sum,
        dx=dx,
        gg=gg,
        all_gg=all_gg,
        xx=xx,
        dd=_displacement_square(optimizer, ready),
        new_x1=new_x1,
        new_d=new_d,
        live=live.value,
        found_inf=getattr(optimizer, "found_inf", 0.0),
        measures_update=ready.rates.measures_update,
    )


def _gradient_squares(ready: Ready) -> tuple[Tensor | float, Tensor | float]:
    """‖g‖² of the groups whose lr is not 0, and of all."""
    options, home = ready.options, ready.home
    takes_cosine = tuner.RULES[options.preset].takes_cosine
    if not (tuner.reads_x(options) or options.max_grad_norm < math.inf or takes_cosine):
        return 0.0, 0.0
    own = [
        (square, ready.rate_of(batch).live)
        for batch in ready.batches
        if batch.counts
        for square in vectors.squares(batch.grads, batch.dtype)
    ]
    all_gg = vectors.total([square for square, _ in own], home)
    if all(is_live.is_yes for _, is_live in own):
        return all_gg, all_gg
    # Not by a product: inf · 0 is NaN.
    return vectors.total([is_live.choose(square, 0.0) for square, is_live in own], home), all_gg


def decay_sums(ready: Ready, points: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """⟨Δ, x⟩ and ‖x‖², where x are points of each batch."""
    counted = [(b, own) for b, own in zip(ready.batches, points, strict=True) if b.counts]
    dx = [q for batch, own in counted for q in vectors.inner(batch.displacements, own)]
    xx = [q for batch, own in counted for q in vectors.squares(own, batch.dtype)]
    return vectors.total(dx, ready.home) * ready.numbers.share, vectors.total(xx, ready.home)


def _displacement_square(optimizer: Any, ready: Ready) -> Any:
    """‖Δ‖², of the parameters that have no gradient too: it is compared from step to step."""
    options = ready.options
    if options.s_init != "relative" and not tuner.RULES[options.preset].takes_cosine:
        return 0.0
    stored = [
        (index, param, None, optimizer.state[param][DISPLACEMENT])
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.grad is None and DISPLACEMENT in optimizer.state.get(param, {})
    ]
    idle = vectors.batches(stored, counted=None if ready.ranks is None else ready.ranks.counted)
    squares = [
        q
        for batch in (*ready.batches, *idle)
        if batch.counts
        for q in vectors.squares(batch.displacements, batch.dtype)
    ]
    return vectors.total(squares, ready.home) * ready.numbers.share**2


def _new_reference(optimizer: Any, ready: Ready) -> tuple[Tensor | float, int]:
    """‖x‖² of the parameters that are seen for the first time, and their number."""
    x1: Tensor | float = 0.0
    d = 0
    for batch in ready.batches:
        new = [
            param
            for owner, param in zip(batch.owners, batch.params, strict=True)
            if batch.counts and DISPLACEMENT not in optimizer.state.get(owner, {})
        ]
        if new:
            x1 = x1 + vectors.total(vectors.squares(new, batch.dtype), ready.home)
            d += sum(param.numel() for param in new)
    return x1, d


def expected_size(optimizer: Any, batches: list[Batch]) -> int:
    """The number of elements that are seen for the first time, as this process knows of them."""
    owners = [owner for batch in batches for owner in batch.owners]
    return sum(o.numel() for o in owners if DISPLACEMENT not in optimizer.state.get(o, {}))


def measure_proposal(ready: Ready, proposal: Proposal, updates: Tensor) -> dict[str, Tensor]:
    """This process's part of the sums that have to wait for the base, by their names in
    `tuner.Sums`. There are none in most steps."""
    late: dict[str, Tensor] = {}
    if tuner.RULES[ready.options.preset].decays_after_base:
        late["dx"], late["xx"] = decay_sums(ready, proposal.points)
    if not ready.rates.measures_update:
        return late
    uu = torch.zeros_like(ready.numbers.scale)
    for batch, *points in zip(ready.batches, proposal.points, proposal.origin, strict=True):
        rate = ready.rate_of(batch)
        if batch.counts and not rate.live.is_no:
            unit = as_factor(rate.unit, uu)
            squares = vectors.proposal_squares(batch, *points)
            uu = uu + vectors.total(squares, ready.home) * unit**2
    # Whether it is needed, only the device may know.
    is_needed = Flag(updates < FIRST_STEPS) | ready.rates.has_risen.to(ready.home)
    return late | {"uu": is_needed.choose(uu, 0.0)}
