"""One mechanized step: gradients → sums → tuner → scale → parameters."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from mechanic import tuner
from mechanic.torch import vectors
from mechanic.torch.mechanism import DISPLACEMENT, Mechanism
from mechanic.torch.modes import has_modes, own_view
from mechanic.torch.rates import Rate, at_base_rates, is_proportional, rate_of
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
    with torch.set_grad_enabled(recorded):
        batches = _gather(optimizer)
    if not batches:
        return base_step(optimizer, *args, **kwargs)
    home = vectors.home_of([batch.device for batch in batches], optimizer.param_groups)
    if home.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a mechanized step cannot be captured in a CUDA graph: its replays would not tune. "
            "Capture the model's forward and backward pass, and call optimizer.step() outside."
        )
    mechanism.to(home)
    rule = tuner.RULES[mechanism.options.preset]
    proportional = is_proportional(base_step) and not rule.decays_after_base
    rates = [rate_of(group, proportional=proportional) for group in optimizer.param_groups]

    with torch.no_grad():
        sums = _measure(optimizer, mechanism, batches, rates)
        finite = _is_finite(optimizer, mechanism, sums)
        skips = _skips_by_itself(optimizer, base_step)
        if isinstance(finite, Tensor) and not skips and finite.device.type != "meta":
            finite = bool(finite)  # the one host synchronisation, where the base needs it
            if not finite:
                mechanism.count(finite)
                return loss
        mechanism.start_at([rates[batch.group] for batch in batches], finite)
    with torch.set_grad_enabled(recorded):
        before = [[param.clone() for param in batch.params] for batch in batches]

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
        _admit(optimizer, mechanism, batches, sums)
        if rule.decays_after_base:
            sums = _measure_decay(mechanism, batches, sums)
        sums = _measure_proposals(mechanism, batches, origin, rates, sums, recorded=recorded)
        grow, gain = _tune(mechanism, sums, _takes_part(finite, batches, rates))
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


def _gather(optimizer: Optimizer) -> list[Batch]:
    """The parameters that have a gradient, in batches. New ones get a displacement of zero, which
    `_admit` makes part of the optimizer's state when the base has made its own."""

    def displacement(param: Tensor) -> Tensor:
        stored = optimizer.state.get(param, {}).get(DISPLACEMENT)
        return vectors.new_displacement(param) if stored is None else stored

    return vectors.batches(
        (index, param, param.grad, displacement(param))
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if param.grad is not None
    )


def _measure(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch], rates: list[Rate]
) -> tuner.Sums:
    """The sums that can be taken before the base's step."""
    home, dg = mechanism.scale.device, []
    for batch in batches:
        live = rates[batch.group].live
        terms = vectors.inner(batch.displacements, batch.grads)
        if live is not True:  # no part in h, but a NaN in it must still show
            terms = [term * live for term in terms]
        if optimizer.param_groups[batch.group].get("maximize"):
            terms = [-term for term in terms]
        dg += terms
    x1, d = _reference(optimizer, mechanism, batches)
    sums = tuner.Sums(vectors.total(dg, home) * mechanism.share, 0.0, 0.0, 0.0, 0.0, x1, d)
    if mechanism.options.s_decay:
        gg = [q for batch in batches for q in vectors.squares(batch.grads, batch.dtype)]
        sums = _measure_decay(mechanism, batches, sums._replace(gg=vectors.total(gg, home)))
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is not None:  # a fused base unscales the gradients itself
        unscale = 1 / grad_scale.to(sums.dg).reshape(())
        sums = sums._replace(dg=sums.dg * unscale, gg=sums.gg * unscale**2)
    return sums


def _measure_decay(mechanism: Mechanism, batches: list[Batch], sums: tuner.Sums) -> tuner.Sums:
    home = mechanism.scale.device
    dx = [q for batch in batches for q in vectors.inner(batch.displacements, batch.params)]
    xx = [q for batch in batches for q in vectors.squares(batch.params, batch.dtype)]
    return sums._replace(dx=vectors.total(dx, home) * mechanism.share, xx=vectors.total(xx, home))


def _measure_proposals(
    mechanism: Mechanism,
    batches: list[Batch],
    origin: list[list[Tensor]],
    rates: list[Rate],
    sums: tuner.Sums,
    *,
    recorded: bool,
) -> tuner.Sums:
    """‖u‖², each group's proposals in its own unit."""
    home, parts = mechanism.scale.device, []
    for batch, points in zip(batches, origin, strict=True):
        rate = rates[batch.group]
        if recorded:
            squares = vectors.squares(list(torch._foreach_sub(batch.params, points)), batch.dtype)
        else:
            squares = vectors.propose(batch, points)
        if rate.live is not False:
            unit = rate.unit.to(home) if isinstance(rate.unit, Tensor) else rate.unit
            parts.append(vectors.total(squares, home) * unit**2)
    return sums._replace(uu=sum(parts[1:], parts[0]) if parts else torch.zeros_like(sums.dg))


def _reference(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch]
) -> tuple[Tensor, int]:
    """‖x_1‖² and its size, with the parameters that are seen for the first time."""
    x1, d = mechanism.reference_square, mechanism.size
    for batch in batches:
        new = [
            param
            for owner, param in zip(batch.owners, batch.params, strict=True)
            if DISPLACEMENT not in optimizer.state.get(owner, {})
        ]
        if new:
            x1 = x1 + vectors.total(vectors.squares(new, batch.dtype), x1.device)
            d += sum(param.numel() for param in new)
    return x1, d


def _is_finite(optimizer: Optimizer, mechanism: Mechanism, sums: tuner.Sums) -> Tensor | bool:
    """Whether all gradients are: a NaN or inf in one of them is one in ⟨Δ, g⟩, even at Δ = 0."""
    finite: Tensor | bool = True
    if mechanism.options.skip_nonfinite:
        finite = torch.isfinite(sums.dg)
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:  # GradScaler's, which a fused base honours whatever the option
        finite = finite & (found_inf.to(sums.dg.device).reshape(()) == 0)
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
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch], sums: tuner.Sums
) -> None:
    """Take up new parameters, now that the base has made its own state for them."""
    mechanism.reference_square, mechanism.size = sums.x1, sums.d
    for batch in batches:
        for owner, displacement in zip(batch.owners, batch.displacements, strict=True):
            optimizer.state[owner].setdefault(DISPLACEMENT, displacement)


def _takes_part(finite: Tensor | bool, batches: list[Batch], rates: list[Rate]) -> Tensor | bool:
    """Whether the tuner learns from this step: the gradients are finite, and some lr is not 0."""
    live: Tensor | bool = False
    for batch in batches:
        if batch.device.type != "meta":
            live = live | rates[batch.group].live
    if isinstance(live, Tensor) and isinstance(finite, Tensor):
        live = live.to(finite.device)
    return live & finite


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
    if takes_part is not False and not mechanism.frozen:
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
