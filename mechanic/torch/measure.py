"""The sums that a step takes: this process's part of them, completed by `sharding.begin_sums`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import vectors
from mechanic.torch.mechanism import DISPLACEMENT, Mechanism
from mechanic.torch.rates import Rate
from mechanic.torch.vectors import Batch


class Parts(NamedTuple):
    """This process's part of the sums that are taken before the base's step, and then the sums.
    A process that shares no parameters has the sums at once."""

    dg: Tensor
    dx: Tensor | float
    gg: Tensor | float
    """‖g‖² of all groups, which is clipped by"""
    live_gg: Tensor | float
    """‖g‖² of those whose lr is not 0"""
    xx: Tensor | float
    dd: Tensor | float
    x1: Tensor | float
    """‖x‖² of the parameters that are seen for the first time"""
    d: int | Tensor
    """Their number"""
    live: Tensor | bool
    """Whether there is a gradient in a group whose lr is not 0"""
    found_inf: Tensor | float
    """GradScaler's word for it, which a fused base honours whatever the options"""
    waits: Tensor | bool
    """Whether a process wants to wait for the norm of the update itself"""


def measure(
    optimizer: Optimizer,
    mechanism: Mechanism,
    batches: list[Batch],
    rates: list[Rate],
    *,
    waits: bool,
) -> Parts:
    """Everything that the base's step need not be waited for."""
    options, home = mechanism.options, mechanism.scale.device
    dg: list[Tensor] = []
    live: Tensor | bool = False
    for batch in batches:
        is_live = rates[batch.group].live
        terms = vectors.inner(batch.displacements, batch.grads)
        if is_live is not True or not batch.counts:
            # no part in h, but a NaN in it must still show
            terms = [term * is_live * batch.counts for term in terms]
        if optimizer.param_groups[batch.group].get("maximize"):
            terms = [-term for term in terms]
        dg += terms
        if batch.device.type != "meta":
            live = live | (is_live.to(home) if isinstance(is_live, Tensor) else is_live)
    grad_scale = getattr(optimizer, "grad_scale", None)  # a fused base unscales by itself
    unscale = 1.0 if grad_scale is None else 1 / grad_scale.to(home).reshape(())
    gg, live_gg = _gradient_squares(mechanism, batches, rates)
    dx, xx = _decay_sums(mechanism, batches) if options.s_decay else (0.0, 0.0)
    x1, d = _new_reference(optimizer, mechanism, batches)
    return Parts(
        dg=vectors.total(dg, home) * mechanism.share * unscale,
        dx=dx,
        gg=gg * unscale**2,
        live_gg=live_gg * unscale**2,
        xx=xx,
        dd=_displacement_square(optimizer, mechanism, batches),
        x1=x1,
        d=d,
        live=live,
        found_inf=getattr(optimizer, "found_inf", 0.0),
        waits=waits,
    )


def _gradient_squares(
    mechanism: Mechanism, batches: list[Batch], rates: list[Rate]
) -> tuple[Tensor | float, Tensor | float]:
    """‖g‖² of all groups, and of those whose lr is not 0."""
    options, home = mechanism.options, mechanism.scale.device
    takes_cosine = tuner.RULES[options.preset].takes_cosine
    if not (options.s_decay or options.max_grad_norm < math.inf or takes_cosine):
        return 0.0, 0.0
    own = [(vectors.squares(b.grads, b.dtype), rates[b.group].live) for b in batches if b.counts]
    gg = vectors.total([q for squares, _ in own for q in squares], home)
    if all(is_live is True for _, is_live in own):
        return gg, gg
    # Not by a product: inf · 0 is NaN.
    live = [torch.where(_as(flag, q), q, 0.0) for squares, flag in own for q in squares]
    return gg, vectors.total(live, home)


def _as(flag: Tensor | bool, like: Tensor) -> Tensor:
    return torch.as_tensor(flag, dtype=torch.bool, device=like.device)


def _decay_sums(mechanism: Mechanism, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """⟨Δ, x⟩ and ‖x‖²."""
    home, counted = mechanism.scale.device, [batch for batch in batches if batch.counts]
    dx = [q for batch in counted for q in vectors.inner(batch.displacements, batch.params)]
    xx = [q for batch in counted for q in vectors.squares(batch.params, batch.dtype)]
    return vectors.total(dx, home) * mechanism.share, vectors.total(xx, home)


def _displacement_square(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch]
) -> Tensor | float:
    """‖Δ‖², of the parameters that have no gradient too: it is compared from step to step."""
    options = mechanism.options
    if options.s_init != "relative" and not tuner.RULES[options.preset].takes_cosine:
        return 0.0
    stored = [
        (index, param, None, optimizer.state[param][DISPLACEMENT])
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.grad is None and DISPLACEMENT in optimizer.state.get(param, {})
    ]
    idle = vectors.batches(stored, counted=mechanism.counted)
    squares = [
        q
        for batch in (*batches, *idle)
        if batch.counts
        for q in vectors.squares(batch.displacements, batch.dtype)
    ]
    return vectors.total(squares, mechanism.scale.device) * mechanism.share**2


def propose(
    mechanism: Mechanism,
    batches: list[Batch],
    origin: list[list[Tensor]],
    rates: list[Rate],
    *,
    waits: bool,
    recorded: bool,
) -> dict[str, Tensor]:
    """Leave what the base proposes in the parameters; gives the sums that had to wait for it."""
    options, home = mechanism.options, mechanism.scale.device
    late: dict[str, Tensor] = {}
    if tuner.RULES[options.preset].decays_after_base:
        late["dx"], late["xx"] = _decay_sums(mechanism, batches)
    uu = torch.zeros_like(mechanism.scale)
    for batch, points in zip(batches, origin, strict=True):
        rate = rates[batch.group]
        if not recorded:
            vectors.propose(batch, points)
        if not waits or not batch.counts or rate.live is False:
            continue
        if recorded:
            squares = vectors.squares(list(torch._foreach_sub(batch.params, points)), batch.dtype)
        else:
            squares = vectors.proposal_squares(batch, points)
        unit = rate.unit.to(home) if isinstance(rate.unit, Tensor) else rate.unit
        uu = uu + vectors.total(squares, home) * unit**2
    if waits:
        late["uu"] = uu
    return late


def expected_size(optimizer: Optimizer, batches: list[Batch]) -> int:
    """The number of elements that are seen for the first time, as this process knows of them."""
    owners = [owner for batch in batches for owner in batch.owners]
    return sum(o.numel() for o in owners if DISPLACEMENT not in optimizer.state.get(o, {}))


def _new_reference(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch]
) -> tuple[Tensor | float, int]:
    """‖x‖² of the parameters that are seen for the first time, and their number."""
    x1: Tensor | float = 0.0
    d = 0
    for batch in batches:
        new = [
            param
            for owner, param in zip(batch.owners, batch.params, strict=True)
            if batch.counts and DISPLACEMENT not in optimizer.state.get(owner, {})
        ]
        if new:
            x1 = x1 + vectors.total(vectors.squares(new, batch.dtype), mechanism.scale.device)
            d += sum(param.numel() for param in new)
    return x1, d


def is_finite(options: Options, dg: Tensor, found_inf: Any) -> Tensor | bool:
    """Whether all gradients are: a NaN or inf in one of them is one in ⟨Δ, g⟩, even at Δ = 0.
    `found_inf` is GradScaler's word for it, a tensor where there is one."""
    finite: Tensor | bool = True
    if options.skip_nonfinite:
        finite = torch.isfinite(dg)
    if isinstance(found_inf, Tensor):
        finite = finite & (found_inf.to(dg.device).reshape(()) == 0)
    return finite
