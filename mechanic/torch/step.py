"""One mechanized step: gradients → sums → tuner → scale → parameters."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic import tuner
from mechanic.options import Options
from mechanic.torch import closures, fast, sharding, vectors
from mechanic.torch.measure import Parts, expected_size, is_finite, measure, propose
from mechanic.torch.mechanism import DISPLACEMENT, EXACT, Mechanism, is_capturing
from mechanic.torch.modes import has_modes, own_view
from mechanic.torch.rates import Rate, at_base_rates, is_proportional
from mechanic.torch.scalars import advance
from mechanic.torch.sharding import Ranks, begin_sums
from mechanic.torch.skipping import decide, refuse_capture, selecting, skipping, skips_by_itself
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
    loss, args, kwargs = closures.evaluate(optimizer, mechanism, args, kwargs)
    recorded = bool(optimizer.defaults.get("differentiable"))
    ranks = mechanism.find_ranks(optimizer)
    done, result = fast.step(optimizer, mechanism, base_step, args, kwargs, loss)
    if done:
        return result
    mechanism.drop_plan()  # what it knows of the displacements is over with this step
    with torch.set_grad_enabled(recorded):
        batches = _gather(optimizer, mechanism.options, ranks)
    if not batches and ranks is None:
        return base_step(optimizer, *args, **kwargs)
    _follow(optimizer, mechanism, batches)
    rule = tuner.RULES[mechanism.options.preset]
    proportional = is_proportional(base_step) and not rule.decays_after_base
    rates, lrs, risen, waits = mechanism.look_at_rates(optimizer, proportional=proportional)

    with torch.no_grad():
        parts = measure(optimizer, mechanism, batches, rates, waits=waits)
        finish = begin_sums(ranks, parts)
    with torch.set_grad_enabled(recorded):
        before = [[param.clone() for param in batch.params] for batch in batches]
    with torch.no_grad():
        parts = Parts(*finish())
        found_inf = parts.found_inf if hasattr(optimizer, "found_inf") else None
        finite = is_finite(mechanism.options, parts.dg, found_inf)
        compiles = torch.compiler.is_compiling()
        skips = len(batches) > 0 and not compiles and skips_by_itself(optimizer, base_step)
        if mechanism.process_group is not None:  # its processes need not be alike
            waits = risen = bool(parts.waits)
            skips = False
        selects = isinstance(finite, Tensor) and compiles
        if isinstance(finite, Tensor) and not skips and not selects and not finite.is_meta:
            finite = decide(finite)  # the one host synchronisation, where the base needs it
            if not finite:
                mechanism.count(finite)
                return loss
        if mechanism.options.max_grad_norm < math.inf:
            parts = _clip(mechanism, batches, parts)
        mechanism.start_at(rates, finite)

    own_skip: Any = nullcontext()
    if isinstance(finite, Tensor) and (skips or selects):
        own_skip = (
            selecting(optimizer, batches, before, finite)
            if selects
            else skipping(optimizer, batches, finite)
        )
    has_own = has_modes(type(optimizer))
    view = own_view(mechanism, batches, before) if has_own else nullcontext()
    try:
        with (
            at_base_rates(optimizer, rates),
            own_skip,
            closures.undoing(optimizer, batches, before),
            view as shown,
        ):
            result = base_step(optimizer, *args, **kwargs)
    except closures.NonFinite:
        mechanism.count(False)
        return loss
    except BaseException:
        if not recorded:  # the base was run at an lr of its own: nothing of it may stay
            vectors.put_back(batches, before)
        raise

    origin = before if shown is None else shown
    with torch.no_grad():
        if ranks is not None and (expected := expected_size(optimizer, batches)):
            sharding.check_size(int(parts.d), expected)
        sums = _admit(optimizer, mechanism, batches, parts)
        late = propose(mechanism, batches, origin, rates, waits=waits, recorded=recorded)
        if waits:  # what it waits for, only the device may know
            is_needed = (mechanism.updates < EXACT) | risen
            late["uu"] = torch.where(is_needed, late["uu"], 0.0)
        if late:
            names, values = late.keys(), begin_sums(ranks, tuple(late.values()))()
            sums = sums._replace(**dict(zip(names, values, strict=True)))
        grow, gain = _tune(mechanism, sums, _takes_part(mechanism, parts, finite))
    with torch.set_grad_enabled(recorded):
        for batch, points, base_points in zip(batches, before, origin, strict=True):
            rate = rates[batch.group]
            if rate.live is False:
                vectors.copy(batch.params, points)
                continue
            by = _gated(Coefficients(grow, mechanism.scale, gain), rate).like(batch)
            if recorded:
                moved = vectors.apply_recorded(batch, points, by)
                for owner, displacement in zip(batch.owners, moved, strict=True):
                    optimizer.state[owner][DISPLACEMENT] = displacement
            else:
                vectors.apply(batch, points, base_points, by, mechanism.steps)
    mechanism.note_rates(lrs, risen)
    mechanism.count(finite)
    mechanism.publish_rates(optimizer)
    return result


def _gather(optimizer: Optimizer, options: Options, ranks: Ranks | None) -> list[Batch]:
    """The parameters that have a gradient, in batches. New ones get a displacement of zero, which
    `_admit` makes part of the optimizer's state when the base has made its own."""

    def displacement(param: Tensor) -> Tensor:
        stored = optimizer.state.get(param, {}).get(DISPLACEMENT)
        return vectors.new_displacement(param, options) if stored is None else stored

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
    if is_capturing(home):
        refuse_capture(optimizer, mechanism, batches)
    mechanism.to(home)


def _clip(mechanism: Mechanism, batches: list[Batch], parts: Parts) -> Parts:
    """Clip the gradients to a norm; the sums follow."""
    norm = torch.as_tensor(parts.gg, device=parts.dg.device).sqrt()
    factor = (mechanism.options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
    for batch in batches:
        vectors.clip(batch, factor)
    square = factor**2
    return parts._replace(
        dg=parts.dg * factor, gg=parts.gg * square, live_gg=parts.live_gg * square
    )


def _admit(
    optimizer: Optimizer, mechanism: Mechanism, batches: list[Batch], parts: Parts
) -> tuner.Sums:
    """Take up new parameters, now that the base has made its own state for them. Returns the sums
    that the tuner reads, but for those that are taken late."""
    square, size = mechanism.reference_square, mechanism.size
    vectors.copy([square, size], [square + parts.x1, size + parts.d])
    for batch in batches:
        for owner, displacement in zip(batch.owners, batch.stored, strict=True):
            optimizer.state[owner].setdefault(DISPLACEMENT, displacement)
    return tuner.Sums(
        dg=parts.dg,
        dx=parts.dx,
        gg=parts.live_gg,
        xx=parts.xx,
        x1=mechanism.reference_square,
        d=mechanism.size,
        dd=parts.dd + torch.zeros_like(parts.dg),
        uu=torch.zeros_like(parts.dg),
    )


def _takes_part(mechanism: Mechanism, parts: Parts, finite: Tensor | bool) -> Tensor | bool:
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
        vectors.copy([mechanism.signal], [sums.dg])
    elif isinstance(takes_part, Tensor):
        takes_part = takes_part.to(share.device)
        vectors.copy([mechanism.signal], [torch.where(takes_part, sums.dg, mechanism.signal)])
    if takes_part is not False:
        mechanism.learn(takes_part)
        state = mechanism.state
        frozen = mechanism.frozen
        before = scale * share
        mechanism.set(*advance(mechanism.options, state, share, sums, takes_part, frozen=frozen))
        grow = scale * share - before
    else:
        grow = torch.zeros_like(scale)
    return grow, 1 / share


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
