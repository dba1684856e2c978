"""The kernels of one program: from the sums of all chunks to what is done to each group."""

import triton
import triton.language as tl

from mechanic.advance import FIRST_STEPS
from mechanic.torch.kernels.columns import (
    ALL_GG,
    BASE_LR,
    COEFFICIENTS,
    COLUMNS,
    DD,
    DECAY,
    DG,
    DX,
    EPS,
    FACTOR,
    GG,
    GROUP,
    KEPT,
    LOG_A,
    LOG_B,
    LR,
    PRESENT,
    REST_A,
    REST_B,
    SETTINGS,
    SIGN,
    SKIPPED,
    SKIPPED_IN_A_ROW,
    STEP,
    STEPS,
    STORED_PER_PROPOSAL,
    UNIT,
    UPDATES,
    USED_A,
    USED_B,
    USED_BASE_LR,
    USED_DECAY,
    USED_EPS,
    UU,
    X_PER_PROPOSAL,
    X_PER_STORED,
    XX,
    A,
    B,
)
from mechanic.torch.kernels.passes import is_update_needed
from mechanic.torch.measure import FARTHEST, Parts
from mechanic.torch.rates import proportional_lr
from mechanic.torch.scalars import BESIDE_STATE

# What a process tells the others, in the order of `Parts`.
(
    TOLD_DG, TOLD_DX, TOLD_GG, TOLD_ALL_GG, TOLD_XX, TOLD_DD, NEW_X1, NEW_D, LIVE, FOUND_INF,
    MEASURES,
) = map(tl.constexpr, range(len(Parts._fields)))  # fmt: skip

# The rows of the tuner's numbers that the kernels read beside the rule.
_SHARE, _SCALE, _X1, _SIZE = map(
    tl.constexpr, map(BESIDE_STATE.index, ("share", "scale", "reference_square", "size"))
)
_FIRST_STEPS = tl.constexpr(FIRST_STEPS)
_FARTHEST_SQUARE = tl.constexpr(FARTHEST**2)
_RUN_AT = tl.constexpr(proportional_lr(half=False))  # the lr at which known bases are run
_SPAN = tl.constexpr(4096)  # the lanes of what runs over all chunks or tensors


@triton.jit
def _bias(step, log_beta):
    """1 − β^step"""
    return 1.0 - tl.exp2(step.to(tl.float64) * log_beta)


@triton.jit
def _total(partials, column, total):
    sums = tl.zeros((_SPAN,), tl.float64)
    lane = tl.arange(0, _SPAN)
    begin = 0
    while begin < total:
        index = begin + lane
        sums += tl.load(partials + column * total + index, mask=index < total, other=0.0)
        begin += _SPAN
    return tl.sum(sums, 0)


@triton.jit
def _unscale(grad_scale):
    """What takes GradScaler's scale back."""
    unscale = tl.full((), 1.0, tl.float64)
    if grad_scale is not None:
        unscale = 1.0 / tl.load(grad_scale).to(tl.float64)
    return unscale


@triton.jit
def _clip(partials, total, message, unscale, max_norm):
    """What clips the gradients to a norm, once they are unscaled."""
    clip = tl.full((), 1.0, tl.float64)
    if max_norm is not None:
        if message is None:
            norm = tl.sqrt(_total(partials, ALL_GG, total)) * unscale
        else:
            norm = tl.sqrt(tl.load(message + TOLD_ALL_GG))
        clip = tl.load(max_norm) / (norm + tl.full((), 1e-6, tl.float64))  # torch's own ε
        clip = tl.where(clip > 1.0, 1.0, clip)
    return clip


@triton.jit
def _has_live_group(settings, lr, inside):
    """1 if there is a gradient in a group whose lr is not 0, else 0."""
    is_present = tl.load(settings + PRESENT, mask=inside, other=0.0) != 0.0
    return tl.max(((lr != 0.0) & is_present).to(tl.int32), 0)


@triton.jit(do_not_specialize=["total", "count"])
def tell(
    message, packed, partials, total, groups, count, found_inf, grad_scale, news,
    GROUPS: tl.constexpr, BETAS: tl.constexpr, WITH_X: tl.constexpr, WITH_GG: tl.constexpr,
    WITH_DD: tl.constexpr, ASKS: tl.constexpr,
):  # fmt: skip
    """This process's part of the sums, as `measure.measure` takes it. It `ASKS` for ‖u‖²."""
    share, unscale = tl.load(packed + _SHARE * BETAS), _unscale(grad_scale)
    group = tl.arange(0, GROUPS)
    settings, inside = groups + group * SETTINGS, group < count
    lr = tl.load(settings + LR, mask=inside, other=0.0)
    is_live = _has_live_group(settings, lr, inside)
    zero = tl.full((), 0.0, tl.float64)
    dx, xx, gg, all_gg, dd, found = zero, zero, zero, zero, zero, zero
    new_x1, new_d = zero, zero
    if news is not None:
        new_x1, new_d = tl.load(news), tl.load(news + 1)
    if WITH_X:
        dx, xx = _total(partials, DX, total) * share, _total(partials, XX, total)
    if WITH_GG:
        gg = _total(partials, GG, total) * unscale * unscale
        all_gg = _total(partials, ALL_GG, total) * unscale * unscale
    if WITH_DD:
        dd = _total(partials, DD, total) * share * share
    if found_inf is not None:
        found = tl.load(found_inf).to(tl.float64)
    tl.store(message + TOLD_DG, _total(partials, DG, total) * share * unscale)
    tl.store(message + TOLD_DX, dx)
    tl.store(message + TOLD_GG, gg)
    tl.store(message + TOLD_ALL_GG, all_gg)
    tl.store(message + TOLD_XX, xx)
    tl.store(message + TOLD_DD, dd)
    tl.store(message + NEW_X1, new_x1)
    tl.store(message + NEW_D, new_d)
    tl.store(message + LIVE, is_live.to(tl.float64))
    tl.store(message + FOUND_INF, found)
    tl.store(message + MEASURES, zero + ASKS)


@triton.jit(do_not_specialize=["total"])
def tell_update(late, partials, total):
    """This process's part of ‖u‖²."""
    tl.store(late, _total(partials, UU, total))


@triton.jit
def _write_group(settings, coefficients, group, inside, factor):
    settings += group * SETTINGS
    coefficients += group * COEFFICIENTS
    sign = tl.load(settings + SIGN, mask=inside, other=0.0)
    a = tl.load(settings + A, mask=inside, other=0.0)
    b = tl.load(settings + B, mask=inside, other=0.0)
    tl.store(coefficients + FACTOR, (sign * factor).to(tl.float32), mask=inside)
    tl.store(coefficients + USED_A, a.to(tl.float32), mask=inside)
    tl.store(coefficients + REST_A, (1.0 - a).to(tl.float32), mask=inside)
    tl.store(coefficients + USED_B, b.to(tl.float32), mask=inside)
    tl.store(coefficients + REST_B, (1.0 - b).to(tl.float32), mask=inside)
    eps = tl.load(settings + EPS, mask=inside, other=0.0)
    tl.store(coefficients + USED_EPS, eps.to(tl.float32), mask=inside)
    decay = tl.load(settings + DECAY, mask=inside, other=0.0)
    tl.store(coefficients + USED_DECAY, decay.to(tl.float32), mask=inside)
    base_lr = tl.load(settings + BASE_LR, mask=inside, other=0.0)
    tl.store(coefficients + USED_BASE_LR, base_lr.to(tl.float32), mask=inside)


@triton.jit
def _write_biases(table, grads, tensors, settings, biases, steps_more, STORES: tl.constexpr):
    """The corrections of Adam's biases so many steps on, and if it `STORES`, the steps."""
    lane = tl.arange(0, _SPAN)
    begin = 0
    while begin < tensors:
        tensor = begin + lane
        inside = tensor < tensors
        inside &= tl.load(grads + tensor, mask=inside, other=0) != 0
        row = table + tensor * COLUMNS
        address = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(address, mask=inside, other=1.0) + steps_more
        if STORES:
            tl.store(address, step, mask=inside)
        own = settings + tl.load(row + GROUP, mask=inside, other=0) * SETTINGS
        bias_1 = 1.0 / _bias(step, tl.load(own + LOG_A, mask=inside, other=-1.0))
        bias_2 = 1.0 / tl.sqrt(_bias(step, tl.load(own + LOG_B, mask=inside, other=-1.0)))
        tl.store(biases + 2 * tensor, bias_1.to(tl.float32), mask=inside)
        tl.store(biases + 2 * tensor + 1, bias_2.to(tl.float32), mask=inside)
        begin += _SPAN


@triton.jit(do_not_specialize=["total", "count", "tensors"])
def weigh(
    partials, total, message, groups, count, coefficients, grad_scale, max_norm,
    table, grads, tensors, biases,
    GROUPS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """What `square_proposals` needs of a known base, before `tune` has run."""
    group = tl.arange(0, GROUPS)
    unscale = _unscale(grad_scale)
    factor = unscale * _clip(partials, total, message, unscale, max_norm)
    _write_group(groups, coefficients, group, group < count, factor)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, 1.0, False)


@triton.jit
def _first_share(
    share, counts, group, lr, unit, finite, GROUPS: tl.constexpr, CHOOSES: tl.constexpr
):
    """The share of the stored displacements that Δ is. If it `CHOOSES`, it does so before the first
    update, as `plain._first_share` does."""
    if CHOOSES:
        leads = group == tl.min(tl.where(lr != 0.0, group, GROUPS), 0)
        first_unit = tl.sum(tl.where(leads, unit, 0.0), 0)
        first = tl.where(first_unit == 1.0, first_unit, first_unit * _RUN_AT)
        is_first = (tl.load(counts + UPDATES) == 0) & (first > 0.0) & finite
        share = tl.where(is_first, first, share)
    return share


@triton.jit
def _count(counts, verdict, done, takes_part):
    """Count the step, and tell the passes after this one whether it is made."""
    step_number = tl.load(counts + STEPS)
    tl.store(verdict, done)
    tl.store(verdict + 1, step_number)
    tl.store(counts + STEPS, step_number + done)
    tl.store(counts + UPDATES, tl.load(counts + UPDATES) + takes_part.to(tl.int64))
    tl.store(counts + SKIPPED, tl.load(counts + SKIPPED) + (1 - done))
    in_a_row = counts + SKIPPED_IN_A_ROW
    tl.store(in_a_row, (tl.load(in_a_row) + 1) * (1 - done))


@triton.jit
def _is_finite(
    dg, packed, message, share, unit, found_inf, BETAS: tl.constexpr, SKIPS: tl.constexpr
):
    """Whether the step is made: all gradients are finite, and what is summed up over processes is
    also looked at as `plain._is_near` does."""
    finite = tl.abs(dg) < float("inf")
    if not SKIPS:
        finite = finite | True
    if found_inf is not None:
        if message is None:
            finite = finite & (tl.load(found_inf) == 0.0)
        else:
            finite = finite & (tl.load(message + FOUND_INF) == 0.0)
    if message is not None and SKIPS:
        per_delta = tl.maximum(tl.load(packed + _SCALE * BETAS), 1.0 / share)
        most = tl.max(unit, 0)
        square = tl.maximum(tl.load(message + TOLD_DD), most * most)
        too_far = per_delta * per_delta * square > tl.full((), _FARTHEST_SQUARE, tl.float64)
        finite = tl.where(too_far, False, finite)
    return finite


@triton.jit
def _meet_new(packed, news, is_met, lane, BETAS: tl.constexpr):
    """Take note of the parameters that are seen for the first time."""
    x1, size = packed + _X1 * BETAS, packed + _SIZE * BETAS
    next_x1 = tl.load(x1) + tl.where(is_met, tl.load(news), 0.0)
    next_size = tl.load(size) + tl.where(is_met, tl.load(news + 1), 0.0)
    tl.debug_barrier()  # every warp has read before one of them writes, and the other way round
    tl.store(x1 + lane, next_x1, mask=lane < BETAS)
    tl.store(size + lane, next_size, mask=lane < BETAS)
    tl.debug_barrier()


@triton.jit
def _read_sums(
    dg, partials, total, message, late, counts, has_risen, share, unscale, clip,
    WITH_X: tl.constexpr, WITH_U: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """The sums of the step: over all chunks, or over all processes where there is a message."""
    zero = tl.full((), 0.0, tl.float64)
    dx, xx, uu = zero, zero, zero
    if message is None:
        if WITH_X:
            dx, xx = _total(partials, DX, total) * share, _total(partials, XX, total)
        if WITH_U:
            uu = _total(partials, UU, total)
        if LOOKS:
            uu = tl.where(is_update_needed(counts, has_risen, _FIRST_STEPS), uu, 0.0)
        factor = unscale * clip
        dg = dg * share * factor
        dd = _total(partials, DD, total) * share * share
        gg = _total(partials, GG, total) * factor * factor
    else:
        dx, xx = tl.load(message + TOLD_DX), tl.load(message + TOLD_XX)
        if WITH_U:
            is_needed = is_update_needed(counts, has_risen, _FIRST_STEPS)
            uu = tl.where(is_needed, tl.load(late), 0.0)
        dg = dg * clip
        dd = tl.load(message + TOLD_DD)
        gg = tl.load(message + TOLD_GG) * (clip * clip)
    return dg, dx, gg, xx, dd, uu


@triton.jit
def _narrow(value):
    """In float32, within which it stays: a proposal of 0 times inf is NaN."""
    most = tl.full((), 3.4028234e38, tl.float64)
    value = tl.where(value > most, most, tl.where(value < -most, -most, value))
    return value.to(tl.float32)


@triton.jit
def _write_moves(coefficients, group, inside, lr, unit, S, share, x_per_stored, kept):
    """How the parameters and the displacements of each group are moved."""
    coefficients += group * COEFFICIENTS
    is_live = lr != 0.0
    unit = tl.where(is_live, unit, 0.0)
    x_per_stored = _narrow(tl.where(is_live, x_per_stored, 0.0))
    tl.store(coefficients + X_PER_STORED, x_per_stored, mask=inside)
    tl.store(coefficients + KEPT, tl.where(is_live, kept, 1.0).to(tl.float32), mask=inside)
    tl.store(coefficients + X_PER_PROPOSAL, _narrow(S * unit), mask=inside)
    tl.store(coefficients + STORED_PER_PROPOSAL, _narrow(unit / share), mask=inside)


@triton.jit(do_not_specialize=["total", "count", "tensors"])
def tune(
    packed, counts,
    partials, total, message, news, late, has_risen,
    groups, count, coefficients, rates, verdict,
    found_inf, grad_scale, max_norm, table, grads, tensors, biases,
    RULE: tl.constexpr, BETAS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    SKIPS: tl.constexpr, WITH_X: tl.constexpr, WITH_U: tl.constexpr, LOOKS: tl.constexpr,
    BIASED: tl.constexpr, CHOOSES: tl.constexpr,
):  # fmt: skip
    """The tuner's step: from the sums to what is done to each group. `packed` holds the tuner's
    numbers, a row of as many as there are `BETAS` for each. If it `LOOKS`, a step whose update
    holds NaN or inf is skipped."""
    unscale = _unscale(grad_scale)
    clip = _clip(partials, total, message, unscale, max_norm)
    if message is None:
        dg = _total(partials, DG, total)
    else:
        dg = tl.load(message + TOLD_DG)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, LANES)
    inside = group < count
    settings = groups + group * SETTINGS
    lr = tl.load(settings + LR, mask=inside, other=0.0)
    unit = tl.load(settings + UNIT, mask=inside, other=0.0)
    share = tl.load(packed + _SHARE * BETAS)
    finite = _is_finite(dg, packed, message, share, unit, found_inf, BETAS, SKIPS)
    if LOOKS:
        finite = finite & (_total(partials, UU, total) < float("inf"))
    if message is None:
        takes_part = (_has_live_group(settings, lr, inside) != 0) & finite
        if news is not None:  # their state is made, even if this step is not
            _meet_new(packed, news, finite | True, lane, BETAS)
    else:
        takes_part = (tl.load(message + LIVE) > 0.0) & finite
        _meet_new(packed, message + NEW_X1, finite, lane, BETAS)
    first_share = _first_share(share, counts, group, lr, unit, finite, GROUPS, CHOOSES)
    dg, dx, gg, xx, dd, uu = _read_sums(
        dg, partials, total, message, late, counts, has_risen, share, unscale, clip,
        WITH_X, WITH_U, LOOKS,
    )  # fmt: skip
    S, share, x_per_stored, kept = RULE(
        packed, first_share, dg, dx, gg, xx, dd, uu, takes_part, tl.sum(lr, 0), lane
    )

    done = finite.to(tl.int64)
    _count(counts, verdict, done, takes_part)
    _write_group(groups, coefficients, group, inside, unscale * clip)
    _write_moves(coefficients, group, inside, lr, unit, S, share, x_per_stored, kept)
    tl.store(rates + group, (S * lr).to(tl.float32), mask=inside)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, done.to(tl.float32), True)
