"""One mechanized step: gradients → sums → tuner → scale → parameters."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from mechanic import tuner
from mechanic.torch import vectors
from mechanic.torch.mechanism import DISPLACEMENT, EXACT, Mechanism
from mechanic.torch.modes import has_modes, own_view
from mechanic.torch.rates import (
    Rate,
    at_base_rates,
    is_proportional,
    rate_of,
    rise,
    typed_rates,
)
from mechanic.torch.sharding import Ranks, begin_sums
from mechanic.torch.vectors import Batch, Coefficients


def step(
    optimizer: Optimizer,
    mechanism: Mechanism,
    base_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the base's step, and put the parameters where the tuner says.

    Parameters without a gradient stay where they are, and so do those of a group whose lr is 0.
    """
    loss, args, kwargs = _evaluate(optimizer, mechanism, args, kwargs)
    recorded = bool(optimizer.defaults.get("differentiable"))
    ranks = mechanism.find_ranks(optimizer)
    with torch.set_grad_enabled(recorded):
        batches = _gather(optimizer, ranks)
    if not batches and ranks is None:
        return base_step(optimizer, *args, **kwargs)
    _follow(optimizer, mechanism, batches)
    rule = tuner.RULES[mechanism.options.preset]
    proportional = is_proportional(base_step) and not rule.decays_after_base
    rates = [rate_of(group, proportional=proportional) for group in optimizer.param_groups]
    lrs = typed_rates(optimizer, mechanism.lrs)

    with torch.no_grad():
        parts = _measure(optimizer, mechanism, batches, rates, rise(lrs, mechanism.lrs))
        finish = begin_sums(ranks, parts)
    with torch.set_grad_enabled(recorded):
        before = [[param.clone() for param in batch.params] for batch in batches]
    with torch.no_grad():
        parts = _Parts(*finish())
        finite = _is_finite(optimizer, mechanism, parts)
        skips = bool(batches) and _skips_by_itself(optimizer, base_step)
        if isinstance(finite, Tensor) and not skips and finite.device.type != "meta":
            finite = bool(finite)  # the one host synchronisation, where the base needs it
            if not finite:
                mechanism.count(finite)
                return loss
        mechanism.start_at(rates, finite)

    skipping = (
        _skipping(optimizer, batches, finite)
        if skips and isinstance(finite, Tensor)
        else nullcontext()
    )
    has_own = has_modes(type(optimizer))
    view = own_view(mechanism, batches, before) if has_own else nullcontext()
    # LBFGS evaluates its closure several times, and may meet a NaN half-way; and it moves
    # parameters that have no gradient along directions of earlier steps.
    is_lbfgs = isinstance(optimizer, LBFGS)
    saved = _copy_state(optimizer) if is_lbfgs else {}
    idle = _without_gradient(optimizer) if is_lbfgs else []
    at_rest = [param.detach().clone() for param in idle]
    try:
        with at_base_rates(optimizer, rates), skipping, view as shown:
            result = base_step(optimizer, *args, **kwargs)
    except _NonFinite:
        with torch.no_grad():
            for batch, points in zip(batches, before, strict=True):
                torch._foreach_copy_(batch.params, points)
            _put_back(idle, at_rest)
        optimizer.state.clear()
        optimizer.state.update(saved)
        mechanism.count(False)
        return loss

    origin = before if shown is None else shown
    if is_lbfgs:
        _forget_curvature(optimizer)
    with torch.no_grad():
        _put_back(idle, at_rest)
        sums = _admit(optimizer, mechanism, batches, parts)
        late = _propose(mechanism, batches, origin, rates, recorded=recorded)
        if late:
            names, values = late.keys(), begin_sums(ranks, tuple(late.values()))()
            sums = sums._replace(**dict(zip(names, values, strict=True)))
        grow, gain = _tune(mechanism, sums, _takes_part(mechanism, parts, finite))
    with torch.set_grad_enabled(recorded):
        for batch, points, base_points in zip(batches, before, origin, strict=True):
            rate = rates[batch.group]
            if rate.live is False:
                torch._foreach_copy_(batch.params, points)
                continue
            by = _gated(Coefficients(grow, mechanism.scale, gain), rate).like(batch)
            if recorded:
                moved = vectors.apply_recorded(batch, points, by)
                for owner, displacement in zip(batch.owners, moved, strict=True):
                    optimizer.state[owner][DISPLACEMENT] = displacement
            else:
                vectors.apply(batch, points, base_points, by, mechanism.steps)
    mechanism.lrs = lrs
    mechanism.count(finite)
    mechanism.publish_rates(optimizer)
    return result


class _NonFinite(Exception):  # noqa: N818 - it is no error, and never leaves this file
    """A later evaluation of a closure gave NaN or inf."""


def _evaluate(
    optimizer: Optimizer, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Evaluate a closure, so that there are gradients to look at before the base sees them.

    The base gets one that returns this evaluation first, and evaluates anew from then on.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        loss = closure()
    checked = isinstance(optimizer, LBFGS) and mechanism.options.skip_nonfinite
    evaluations = 0

    def replay() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1:
            return loss
        again = closure()
        if checked and not _has_finite_gradients(optimizer):
            raise _NonFinite
        return again

    if args:
        return loss, (replay, *args[1:]), kwargs
    return loss, args, {**kwargs, "closure": replay}


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sums = [param.grad.sum() * 0 for param in params if param.grad is not None]
    return bool(torch.stack(sums).isfinite().all()) if sums else True


def _forget_curvature(optimizer: Optimizer) -> None:
    """LBFGS learns curvature from how far it has moved, and from step to step that is S·u."""
    for state in optimizer.state.values():
        if "n_iter" in state:
            state["n_iter"] = 0


def _copy_state(optimizer: Optimizer) -> dict[Any, Any]:
    return {param: copy.deepcopy(state) for param, state in optimizer.state.items()}


def _without_gradient(optimizer: Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in params if param.grad is None]


def _put_back(params: list[Tensor], points: list[Tensor]) -> None:
    for param, point in zip(params, points, strict=True):
        param.copy_(point)


def _gather(optimizer: Optimizer, ranks: Ranks | None) -> list[Batch]:
    """The parameters that have a gradient, in batches. New ones get a displacement of zero, which
    `_admit` makes part of the optimizer's state when the base has made its own."""

    def displacement(param: Tensor) -> Tensor:
        stored = optimizer.state.get(param, {}).get(DISPLACEMENT)
        return vectors.new_displacement(param) if stored is None else stored

    return vectors.batches(
        (
            (index, param, param.grad, displacement(param))
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if param.grad is not None
        ),
        counted=None if ranks is None else ranks.counted,
    )


def _follow(optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch]) -> None:
    """Take the tuner to where the parameters are."""
    home = vectors.home_of([batch.device for batch in batches], optimizer.param_groups)
    if home is None:  # this process holds none
        return
    if home.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a mechanized step cannot be captured in a CUDA graph: its replays would not tune. "
            "Capture the model's forward and backward pass, and call optimizer.step() outside."
        )
    mechanism.to(home)


class _Parts(NamedTuple):
    """This process's part of the sums that are taken before the base's step, and then the sums.
    A process that shares no parameters has the sums at once."""

    dg: Tensor
    dx: Tensor | float
    gg: Tensor | float
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
    rise: Tensor | float
    processes: int | Tensor


def _measure(
    optimizer: Optimizer,
    mechanism: Mechanism,
    batches: list[Batch],
    rates: list[Rate],
    rise: Tensor | float,
) -> _Parts:
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
    gg: Tensor | float = 0.0
    dx, xx = _decay_sums(mechanism, batches) if options.s_decay else (0.0, 0.0)
    if options.s_decay:
        squares = [vectors.squares(b.grads, b.dtype) for b in batches if b.counts]
        gg = vectors.total(chain.from_iterable(squares), home) * unscale**2
    x1, d = _new_reference(optimizer, mechanism, batches)
    return _Parts(
        dg=vectors.total(dg, home) * mechanism.share * unscale,
        dx=dx,
        gg=gg,
        xx=xx,
        dd=_displacement_square(optimizer, mechanism, batches),
        x1=x1,
        d=d,
        live=live,
        found_inf=getattr(optimizer, "found_inf", 0.0),
        rise=rise,
        processes=1,
    )


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
    if mechanism.options.s_init != "relative":
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


def _propose(
    mechanism: Mechanism,
    batches: list[Batch],
    origin: list[list[Tensor]],
    rates: list[Rate],
    *,
    recorded: bool,
) -> dict[str, Tensor]:
    """Leave what the base proposes in the parameters; gives the sums that had to wait for it."""
    options, home = mechanism.options, mechanism.scale.device
    late: dict[str, Tensor] = {}
    if tuner.RULES[options.preset].decays_after_base:
        late["dx"], late["xx"] = _decay_sums(mechanism, batches)
    is_exact = options.s_init == "relative" and mechanism.is_starting
    uu = torch.zeros_like(mechanism.scale)
    for batch, points in zip(batches, origin, strict=True):
        rate = rates[batch.group]
        if not recorded:
            vectors.propose(batch, points)
        if not is_exact or not batch.counts or rate.live is False:
            continue
        if recorded:
            squares = vectors.squares(list(torch._foreach_sub(batch.params, points)), batch.dtype)
        else:
            squares = vectors.proposal_squares(batch, points)
        unit = rate.unit.to(home) if isinstance(rate.unit, Tensor) else rate.unit
        uu = uu + vectors.total(squares, home) * unit**2
    if is_exact:
        late["uu"] = torch.where(mechanism.updates < EXACT, uu, 0.0)
    return late


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


def _is_finite(optimizer: Optimizer, mechanism: Mechanism, parts: _Parts) -> Tensor | bool:
    """Whether all gradients are: a NaN or inf in one of them is one in ⟨Δ, g⟩, even at Δ = 0."""
    finite: Tensor | bool = True
    if mechanism.options.skip_nonfinite:
        finite = torch.isfinite(parts.dg)
    if isinstance(parts.found_inf, Tensor) and hasattr(optimizer, "found_inf"):
        finite = finite & (parts.found_inf.to(parts.dg.device).reshape(()) == 0)
    return finite


def _skips_by_itself(optimizer: Optimizer, base_step: Callable[..., Any]) -> bool:
    """Whether the base leaves everything as it is where `found_inf` is set, as torch's fused do.

    Not SGD's with dampening at its first step, which is not dampened: once skipped, it is over.
    """
    if not base_step.__module__.startswith("torch.optim."):
        return False
    return all(
        group.get("fused") and (not group.get("dampening") or all(map(optimizer.state.get, own)))
        for group in optimizer.param_groups
        if (own := [param for param in group["params"] if param.grad is not None])
    )


@contextmanager
def _skipping(optimizer: Optimizer, batches: list[Batch], finite: Tensor) -> Iterator[None]:
    """Let a fused base skip its step by itself where the gradients are not finite."""
    owners = [owner for batch in batches for owner in batch.owners]
    new = [owner for owner in owners if not optimizer.state.get(owner)]
    had = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if had is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = had  # type: ignore[attr-defined]
    for owner in new:  # SGD's momentum is uninitialised memory when its first step is skipped
        for value in optimizer.state.get(owner, {}).values():
            if isinstance(value, Tensor):
                value.masked_fill_(~finite.to(value.device), 0)


def _admit(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch], parts: _Parts
) -> tuner.Sums:
    """Take up new parameters, now that the base has made its own state for them. Returns the sums
    that the tuner reads, but for those that are taken late."""
    mechanism.reference_square = mechanism.reference_square + parts.x1
    mechanism.size = mechanism.size + parts.d
    for batch in batches:
        for owner, displacement in zip(batch.owners, batch.stored, strict=True):
            optimizer.state[owner].setdefault(DISPLACEMENT, displacement)
    return tuner.Sums(
        dg=parts.dg,
        dx=parts.dx,
        gg=parts.gg,
        xx=parts.xx,
        x1=mechanism.reference_square,
        d=mechanism.size,
        dd=parts.dd + torch.zeros_like(parts.dg),
        rise=parts.rise / parts.processes,
        uu=torch.zeros_like(parts.dg),
    )


def _takes_part(mechanism: Mechanism, parts: _Parts, finite: Tensor | bool) -> Tensor | bool:
    """Whether the tuner learns from this step: the gradients are finite, and some lr is not 0."""
    if mechanism.counted is None:
        return parts.live & finite
    takes_part = (parts.live > 0) & finite
    # While sums are taken late, all processes have to know for how long.
    return bool(takes_part) if mechanism.is_starting else takes_part


def _tune(
    mechanism: Mechanism, sums: tuner.Sums, takes_part: Tensor | bool
) -> tuple[Tensor, Tensor]:
    """The tuner's step. Returns what the stored displacement is multiplied with to be added to
    the parameters, and what an update is, to be added to the displacement."""
    scale, share = mechanism.scale, mechanism.share
    if takes_part is True:
        mechanism.signal = sums.dg
    elif isinstance(takes_part, Tensor):
        takes_part = takes_part.to(share.device)
        mechanism.signal = torch.where(takes_part, sums.dg, mechanism.signal)
    if takes_part is not False:
        mechanism.learn(takes_part)
        if mechanism.frozen:
            state, kept = mechanism.state._replace(D=sums.dd.sqrt()), share
        else:
            state, keep = tuner.update(mechanism.options, mechanism.state, sums)
            # keep is 0 only where there is no displacement yet to forget
            kept = torch.where(keep > 0, keep * share, share)
        if isinstance(takes_part, Tensor):
            pairs = zip(state, mechanism.state, strict=True)
            state = tuner.State(*(torch.where(takes_part, new, old) for new, old in pairs))
            kept = torch.where(takes_part, kept, share)
        mechanism.state, mechanism.scale, mechanism.share = state, state.s.sum(), kept
    return mechanism.scale * mechanism.share - scale * share, 1 / mechanism.share


def _gated(by: Coefficients, rate: Rate) -> Coefficients:
    """The coefficients of a group, in its unit; a tensor lr at 0 moves nothing."""
    grow, unit = by.grow, rate.unit
    if isinstance(rate.live, Tensor):
        live = rate.live.to(grow.device)
        grow = grow * live
        unit = unit * live
    if isinstance(unit, Tensor):
        unit = unit.to(grow)
    return Coefficients(grow, by.scale * unit, by.gain * unit)
