"""The step with torch's own operators, on any device: the plain path.

    prepare → measure → decide → run the base → tune → move

The base runs on copies of the parameters, and the tuner computes new numbers beside the old ones.
Only the last part writes to what users see, and once it has begun it is finished.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mechanic import tuner
from mechanic.advance import advance
from mechanic.arrays import Array
from mechanic.torch import base, closures, modes, sharding, vectors
from mechanic.torch.base import Proposal
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing, is_fake, is_traced
from mechanic.torch.commit import Values, commit
from mechanic.torch.copies import Copies
from mechanic.torch.flag import NO, YES, Flag
from mechanic.torch.measure import (
    FARTHEST,
    Parts,
    Ready,
    counted_update,
    expected_size,
    has_infinite,
    is_extreme,
    measure,
    measure_proposal,
)
from mechanic.torch.rates import (
    Rate,
    as_factor,
    is_proportional,
    proportional_lr,
    publish_rates,
    step_name,
    typed_lr,
)
from mechanic.torch.scalars import Numbers, are_floats, can_look, can_wait, pack, scalar_dtype
from mechanic.torch.skipping import decide, is_finite, skips_by_itself
from mechanic.torch.vectors import DISPLACEMENT, Batch, Coefficients

# An update of SGD is as small or large as the gradient. Where the norm of that is outside of these
# bounds, an update at the usual lr could vanish beside the parameter, or overflow.
_SMALL_GRADIENT, _LARGE_GRADIENT = 1e-6, 1e12


def step(call: Call) -> Any:
    """Run the base's step, and put the parameters where the tuner says."""
    call.mechanism.kernels.drop_plan()  # its knowledge of the displacements ends with this step
    ready = prepare(call)
    if ready is None:
        return call.run_base(call.optimizer)
    try:
        parts, copies = _measure(call, ready)
        ready = ready._replace(has_infinite=has_infinite(call.optimizer))
        if call.mechanism.process_group is not None:
            ready = _agree(ready, parts)
        finite = _decide(call, ready, parts)
        if finite.is_no:
            _skip_with_others(call, ready)
            return _skip(call)
        parts = _clip(ready, parts)
        ready = _suit_gradients(call, ready, parts)
        proposal = base.propose(call, ready.batches, copies, ready.rates.rates, finite)
        numbers, by, takes_part = _tune(call, ready, parts, proposal, finite)
        _move(call, ready, proposal, numbers, by, finite, takes_part)
    except closures.NonFinite:
        return _skip(call)
    finally:
        call.mechanism.copies.free()
    return proposal.result


def _is_recorded(call: Call) -> bool:
    """Whether autograd records the step."""
    return bool(call.optimizer.defaults.get("differentiable"))


def prepare(call: Call) -> Ready | None:
    """Gather what takes part; None where nothing does. New parameters get a displacement of zero,
    which `_move` makes part of the optimizer's state."""
    optimizer, mechanism = call.optimizer, call.mechanism
    ranks = mechanism.find_ranks(optimizer)

    def displacement(param: Tensor) -> Tensor:
        stored = optimizer.state.get(param, {}).get(DISPLACEMENT)
        return vectors.new_displacement(param, mechanism.options) if stored is None else stored

    with torch.set_grad_enabled(_is_recorded(call)):
        batches = vectors.batches(
            (
                (index, param, param.grad, displacement(param))
                for index, group in enumerate(optimizer.param_groups)
                for param in group["params"]
                if param.grad is not None
            ),
            counted=None if ranks is None else ranks.counted,
        )
    if not batches and ranks is None:
        return None
    _follow(call, batches)
    rule = tuner.RULES[mechanism.options.preset]
    # At a large lr the step of one would begin where that of the other has thrown the weights.
    overlap = base.do_overlap(batches)
    is_scaled = is_proportional(call.base_step) and not overlap
    rates = mechanism.history.look(
        optimizer,
        proportional=is_scaled and not rule.decays_after_base,
        is_relative=mechanism.options.s_init == "relative",
    )
    numbers = mechanism.scalars.read()
    own = mechanism.options, batches, rates, numbers, ranks, call.found_inf
    return Ready(*own, overlap=overlap)


def _follow(call: Call, batches: list[Batch]) -> None:
    """Take the tuner to where the parameters are."""
    optimizer, mechanism = call.optimizer, call.mechanism
    home = vectors.home_of([batch.device for batch in batches], optimizer.param_groups)
    if home is None:  # this process holds no parameters
        return
    if is_capturing(home) and (
        mechanism.home.type != "cuda"
        or any(DISPLACEMENT not in optimizer.state.get(o, {}) for b in batches for o in b.owners)
    ):
        raise RuntimeError(
            "the first step of a mechanized optimizer cannot be captured in a CUDA graph: it makes "
            "the optimizer's state. Make a few steps first, at best ten, as torch advises for any "
            "capture."
        )
    mechanism.to(home)


def _measure(call: Call, ready: Ready) -> tuple[Parts, Copies]:
    """Take the sums that need not wait for the base, and copy the parameters while the sums of
    other processes are on their way."""
    with torch.no_grad():
        finish = sharding.begin_sums(ready.ranks, measure(call.optimizer, ready))
    with torch.set_grad_enabled(_is_recorded(call)):
        copies = base.copy_params(
            *(call, ready.batches), is_recorded=_is_recorded(call), overlap=ready.overlap
        )
    with torch.no_grad():
        parts = Parts(*finish())
    if ready.ranks is not None and (expected := expected_size(call.optimizer, ready.batches)):
        sharding.check_size(int(parts.new_d), expected)
    return parts, copies


def _agree(ready: Ready, parts: Parts) -> Ready:
    """Have all processes measure the update if one of them wants to."""
    measures = bool(parts.measures_update)
    rates = ready.rates._replace(measures_update=measures, has_risen=Flag(measures))
    return ready._replace(rates=rates)


def _decide(call: Call, ready: Ready, parts: Parts) -> Flag:
    """Whether all gradients are finite, so that the step is made. Only where the base cannot skip
    a step by itself does the host wait for the answer."""
    found_inf: Any = None if ready.found_inf is None else parts.found_inf
    finite = is_finite(ready.options, parts.dg, found_inf) & _is_near(ready, parts)
    if is_fake():
        return YES
    if is_traced():
        return finite
    is_alike = call.mechanism.process_group is None  # the processes of a group need not be
    is_left_to_base = (
        is_alike
        and len(ready.batches) > 0
        and not are_floats(ready.options, ready.home)
        and skips_by_itself(call)
    )
    return finite if is_left_to_base else decide(finite)


def _is_near(ready: Ready, parts: Parts) -> Flag:
    """Whether S·Δ, the stored Δ and the factors of the proposals are all so small that the next
    step cannot overflow. On a loss without a minimum S grows for ever."""
    if not ready.options.skip_nonfinite or not isinstance(parts.dd, Tensor):
        return YES
    unit = max([0.0, *(r.unit for r in ready.rates.rates if isinstance(r.unit, float))])
    scale, share = ready.numbers.scale, ready.numbers.share
    if can_look(ready.home):
        length = max(math.sqrt(float(parts.dd)), unit)
        return Flag(not (length * float(scale) > FARTHEST or length > FARTHEST * float(share)))
    per_delta = torch.maximum(scale, 1 / share)
    return Flag(~(per_delta**2 * parts.dd.clamp(min=unit**2) > FARTHEST**2))


def _skip_with_others(call: Call, ready: Ready) -> None:
    """Do what a process does whose device decides on the step: where the norm of the update is due,
    it sends it in any case, and has then measured it at these rates."""
    if ready.ranks is None or tuner.RULES[ready.options.preset].decays_after_base:
        return
    if ready.rates.measures_update:
        sharding.begin_sums(ready.ranks, [torch.zeros_like(ready.numbers.scale)])()
    call.mechanism.history.note(ready.rates)


def _skip(call: Call) -> Any:
    counts = call.mechanism.counts
    commit([lambda: ([counts.packed], [counts.after(is_done=NO, learns=NO)])])
    counts.watch(NO)
    return call.loss


def _clip(ready: Ready, parts: Parts) -> Parts:
    """Clip the gradients to a norm, as `torch.nn.utils.clip_grad_norm_` does; the sums follow."""
    if ready.options.max_grad_norm == math.inf:
        return parts
    with torch.no_grad():
        factor = clip_factor(ready, parts.all_gg)
        for batch in ready.batches:
            vectors.clip(batch, factor)
        square = factor**2
        return parts._replace(
            dg=parts.dg * factor, gg=parts.gg * square, all_gg=parts.all_gg * square
        )


def clip_factor(ready: Ready, square: Tensor | float) -> Tensor:
    """What gradients are multiplied with, whose norm has this square."""
    norm = torch.as_tensor(square, device=ready.home).sqrt()
    return (ready.options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)


def _suit_gradients(call: Call, ready: Ready, parts: Parts) -> Ready:
    """Where gradients are or were extreme, look at the update, and have the base run at a learning
    rate that makes neither it nor what is computed on the way to it too large or too small. By a
    power of two, so that nothing is rounded. The update of a base of which nothing is known is
    always looked at: it may hold NaN whatever the gradients."""
    if not can_wait(ready.home):
        return ready
    history = call.mechanism.history
    history.has_met_extremes = history.has_met_extremes or is_extreme(ready, parts)
    is_unknown = not is_proportional(call.base_step) and ready.ranks is None
    ready = ready._replace(doubts_update=history.has_met_extremes or is_unknown)
    if not can_look(ready.home):
        return ready
    factor = _suitable_factor(call, ready, parts)
    if factor == 1:
        return ready
    rates = [
        rate._replace(base_lr=rate.base_lr * factor, unit=rate.unit / factor)
        if rate.live.is_yes and isinstance(rate.base_lr, float)
        else rate
        for rate in ready.rates.rates
    ]
    return ready._replace(rates=ready.rates._replace(rates=rates))


def _suitable_factor(call: Call, ready: Ready, parts: Parts) -> float:
    """What the learning rate that the base is run at is multiplied with. An update of SGD is as
    large as the gradient; others may have huge numbers in their state after a huge gradient."""
    if step_name(call.base_step) == "torch.optim.sgd.SGD.step":
        norm = math.sqrt(float(parts.gg))
        is_usual = _SMALL_GRADIENT < norm < _LARGE_GRADIENT
        if is_usual or norm == 0 or not math.isfinite(norm):
            return 1.0
        return 2.0 ** -min(max(round(math.log2(norm)), -100), 100)  # of a number in float32
    is_scaled = is_proportional(call.base_step) and ready.doubts_update
    return 1 / proportional_lr(half=False) if is_scaled else 1.0


def _tune(
    call: Call, ready: Ready, parts: Parts, proposal: Proposal, finite: Flag
) -> tuple[Numbers, Coefficients, Flag]:
    """What the tuner knows after the step, how the parameters move, and whether the tuner has
    learned from the step."""
    mechanism, had = call.mechanism, ready.numbers
    with torch.no_grad():
        sums = _complete(call, ready, parts, proposal)
        first_share: Array = _first_share(call, ready, finite)
        takes_part = (Flag.of(parts.live > 0) & finite).to(ready.home)
        observed = mechanism.scalars.observed
        if observed is not None:
            sums, takes_part = observed.put_into(sums), takes_part & Flag(observed.dg.isfinite())
        if ready.ranks is not None and mechanism.history.is_starting:
            # All processes have to know for how long sums are taken late.
            takes_part = takes_part.wait()
        if are_floats(ready.options, ready.home):
            takes_part, had, first_share = takes_part.wait(), had.as_floats(), float(first_share)
            sums = tuner.Sums(*map(float, sums))
        state, scale, share, signal = had.state, had.scale, first_share, had.signal
        kept: Array = 1.0
        lr: Array = 0.0
        if not takes_part.is_no:
            state, share, kept = advance(
                *(ready.options, state, share, sums, takes_part.value),
                frozen=mechanism.frozen and observed is None,
            )
            scale = takes_part.choose(tuner.scale_of(state), scale)
            signal = takes_part.choose(sums.dg, signal)
            lr = takes_part.choose(_sum_of_rates(call.optimizer.param_groups, scale), 0.0)
        totals = had.typed_total + lr, had.applied_total + scale * lr
        numbers = Numbers(state, scale, share, signal, sums.x1, sums.d, *totals)
        pull = (scale * share - had.scale * first_share) * kept
        by = Coefficients(pull, scale, 1 / share, kept)
    return numbers, by, takes_part


def _sum_of_rates(groups: list[dict[str, Any]], like: Array) -> Array:
    rates = [typed_lr(group) for group in groups]
    if type(like) is float:
        return sum(map(float, rates))
    return torch.zeros_like(like) + sum(as_factor(rate, like) for rate in rates)


def _complete(call: Call, ready: Ready, parts: Parts, proposal: Proposal) -> tuner.Sums:
    """The sums of the step, with those that have to wait for the base."""
    had, zero = ready.numbers, torch.zeros_like(parts.dg)
    sums = tuner.Sums(
        dg=parts.dg,
        dx=parts.dx,
        gg=parts.gg,
        xx=parts.xx,
        x1=had.reference_square + parts.new_x1,
        d=had.size + parts.new_d,
        dd=parts.dd + zero,
        uu=zero,
    )
    late = measure_proposal(ready, proposal)
    if not late:
        return sums
    values = sharding.begin_sums(ready.ranks, tuple(late.values()))()
    late = dict(zip(late, values, strict=True))
    if "uu" in late:
        _refuse_nonfinite_update(call, ready, late["uu"])
        late["uu"] = counted_update(ready, late["uu"], call.mechanism.counts.read().updates)
    return sums._replace(**late)


def _refuse_nonfinite_update(call: Call, ready: Ready, uu: Tensor) -> None:
    """Skip a step whose gradients are finite but whose update is not, where the update is measured
    before it is applied."""
    looks = ready.doubts_update or can_look(ready.home)
    if not ready.options.skip_nonfinite or not looks or math.isfinite(float(uu)):
        return
    warnings.warn(
        f"mechanic: a step was skipped, because the update of {type(call.optimizer).__name__} "
        "held NaN or inf, although its gradients did not. Either they are too large or too small "
        "for it to square in float32, so that the loss should be scaled, or it diverges by itself.",
        RuntimeWarning,
        stacklevel=2,
    )
    raise closures.NonFinite


def _first_share(call: Call, ready: Ready, finite: Flag) -> Tensor:
    """The share of the stored displacements that Δ is before the step. It is chosen before the
    first update, so that the stored numbers are updates at an lr of 1, whatever the one that is
    typed; those of a base that is run at the typed one (in units of 1) are stored as they are. Over
    a process group the share stays 1: its processes may have other rates."""
    share: Tensor = ready.numbers.share
    live = [rate.unit for rate in ready.rates.rates if not rate.live.is_no]
    is_over_group = call.mechanism.process_group is not None
    if is_over_group or not call.mechanism.history.is_starting or not live:
        return share
    unit = torch.ones_like(share) * as_factor(live[0], share)
    first = torch.where(unit == 1, unit, unit * proportional_lr(half=False))
    is_first = Flag(call.mechanism.counts.read().updates == 0) & Flag(first > 0) & finite
    return is_first.choose(first, share)


def _move(
    call: Call,
    ready: Ready,
    proposal: Proposal,
    numbers: Numbers,
    by: Coefficients,
    finite: Flag,
    takes_part: Flag,
) -> None:
    """Write what the step has come to: the tuner's numbers, the counts, and the parameters with
    their displacements."""
    optimizer, mechanism = call.optimizer, call.mechanism
    with torch.no_grad():
        counts = mechanism.counts
        packed = [pack(numbers), counts.after(is_done=finite, learns=takes_part)]
        writes: list[Callable[[], Values]] = []
        if modes.has_modes(type(optimizer)) and not by.keeps_all:
            own = optimizer, ready.numbers, ready.batches, by.kept
            writes.append(lambda: modes.follow_reference(*own))
        step_number = counts.read().steps.clone()
        rows = zip(ready.batches, proposal.points, proposal.origin, strict=True)
        for batch, points, origin in rows:
            rate = ready.rate_of(batch)
            if not rate.live.is_no and not _is_recorded(call):
                of_group = _of_group(by, rate, ready.home).like(batch)
                writes += vectors.moves(
                    *(batch, points, origin, of_group, step_number),
                    has_infinite=ready.has_infinite,
                )
        writes.append(lambda: _finish(call, ready, proposal, packed))
        commit(writes)
    if _is_recorded(call):
        _move_recorded(call, ready, proposal, by)
    mechanism.history.note(ready.rates)
    mechanism.history.learn(takes_part)
    counts.watch(finite)
    publish_rates(mechanism.scale, optimizer.param_groups)


def _finish(call: Call, ready: Ready, proposal: Proposal, packed: list[Tensor]) -> Values:
    """What is written last: the base's own changes to the optimizer, the displacements of new
    parameters, and the tuner's numbers."""
    optimizer, mechanism = call.optimizer, call.mechanism
    if proposal.twin is not None:
        proposal.twin.take_over(optimizer)
    for batch in ready.batches:
        for owner, displacement in zip(batch.owners, batch.stored, strict=True):
            optimizer.state[owner].setdefault(DISPLACEMENT, displacement)
    mechanism.scalars.observed = None
    return [mechanism.scalars.packed, mechanism.counts.packed], packed


def _move_recorded(call: Call, ready: Ready, proposal: Proposal, by: Coefficients) -> None:
    with torch.enable_grad():
        for batch, points in zip(ready.batches, proposal.points, strict=True):
            rate = ready.rate_of(batch)
            if rate.live.is_no:
                continue
            stored = vectors.move_recorded(
                batch, points, _of_group(by, rate, ready.home).like(batch)
            )
            for owner, displacement in zip(batch.owners, stored, strict=True):
                call.optimizer.state[owner][DISPLACEMENT] = displacement


def _of_group(by: Coefficients, rate: Rate, home: torch.device) -> Coefficients:
    """The coefficients of a group, in its unit. A tensor lr at 0 moves nothing."""
    unit = rate.unit
    if rate.live.is_yes and not isinstance(unit, Tensor):
        return by.times(unit)
    kind: dict[str, Any] = {"dtype": scalar_dtype(home), "device": home}
    by = Coefficients(*(torch.as_tensor(value, **kind) for value in by))
    own = by.times(as_factor(unit, by.x_per_stored))
    still = Coefficients(0.0, 0.0, 0.0, 1.0)
    return Coefficients(*map(rate.live.choose, own, still))
