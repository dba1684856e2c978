"""The kernels of one program: from the sums of all chunks to what is done to each group."""

import triton
import triton.language as tl

from mechanic.torch.kernels.passes import (
    BASE_LR,
    COLUMNS,
    DD,
    DECAY,
    DG,
    DX,
    EPS,
    FACTOR,
    GAIN,
    GG,
    GROUP,
    GROW,
    LIVE_GG,
    LOG_A,
    LOG_B,
    LR,
    MADE,
    MOVE,
    OF_A,
    OF_B,
    OF_BASE_LR,
    OF_DECAY,
    OF_EPS,
    PRESENT,
    REST_A,
    REST_B,
    SIGN,
    STEP,
    TYPED,
    UNIT,
    UU,
    XX,
    A,
    B,
)

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
def _gradient_factor(partials, total, grad_scale, max_norm):
    """What the gradients are multiplied with: GradScaler's scale is taken back, and they are
    clipped to a norm. Clipping by itself comes second."""
    unscale = tl.full((), 1.0, tl.float64)
    if grad_scale is not None:
        unscale = 1.0 / tl.load(grad_scale).to(tl.float64)
    clip = tl.full((), 1.0, tl.float64)
    if max_norm is not None:
        norm = tl.sqrt(_total(partials, GG, total)) * unscale
        clip = tl.load(max_norm) / (norm + tl.full((), 1e-6, tl.float64))  # as torch has it
        clip = tl.where(clip > 1.0, 1.0, clip)
    return unscale * clip


@triton.jit
def _write_group(typed, made, group, inside, factor):
    typed += group * TYPED
    made += group * MADE
    sign = tl.load(typed + SIGN, mask=inside, other=0.0)
    a = tl.load(typed + A, mask=inside, other=0.0)
    b = tl.load(typed + B, mask=inside, other=0.0)
    tl.store(made + FACTOR, (sign * factor).to(tl.float32), mask=inside)
    tl.store(made + OF_A, a.to(tl.float32), mask=inside)
    tl.store(made + REST_A, (1.0 - a).to(tl.float32), mask=inside)
    tl.store(made + OF_B, b.to(tl.float32), mask=inside)
    tl.store(made + REST_B, (1.0 - b).to(tl.float32), mask=inside)
    eps = tl.load(typed + EPS, mask=inside, other=0.0)
    tl.store(made + OF_EPS, eps.to(tl.float32), mask=inside)
    decay = tl.load(typed + DECAY, mask=inside, other=0.0)
    tl.store(made + OF_DECAY, decay.to(tl.float32), mask=inside)
    base_lr = tl.load(typed + BASE_LR, mask=inside, other=0.0)
    tl.store(made + OF_BASE_LR, base_lr.to(tl.float32), mask=inside)


@triton.jit
def _write_biases(table, grads, tensors, typed, biases, steps_more, STORES: tl.constexpr):
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
        own = typed + tl.load(row + GROUP, mask=inside, other=0) * TYPED
        bias_1 = 1.0 / _bias(step, tl.load(own + LOG_A, mask=inside, other=-1.0))
        bias_2 = 1.0 / tl.sqrt(_bias(step, tl.load(own + LOG_B, mask=inside, other=-1.0)))
        tl.store(biases + 2 * tensor, bias_1.to(tl.float32), mask=inside)
        tl.store(biases + 2 * tensor + 1, bias_2.to(tl.float32), mask=inside)
        begin += _SPAN


@triton.jit(do_not_specialize=["total", "count", "tensors"])
def weigh(
    partials, total, groups, count, made, grad_scale, max_norm, table, grads, tensors, biases,
    GROUPS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """What `square_proposals` needs of a known base, before `tune` has run."""
    group = tl.arange(0, GROUPS)
    factor = _gradient_factor(partials, total, grad_scale, max_norm)
    _write_group(groups, made, group, group < count, factor)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, 1.0, False)


@triton.jit(do_not_specialize=["total", "count", "tensors"])
def tune(
    beta, m, v, r, s, M, U, D, R, L, C, scale, share, signal, reference_square, size,
    steps, updates, skipped, skipped_in_a_row,
    partials, total, groups, count, made, rates, verdict,
    found_inf, grad_scale, max_norm, table, grads, tensors, biases,
    RULE: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    SKIPS: tl.constexpr, WITH_X: tl.constexpr, WAITS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The tuner's step: from the sums of all chunks to what is done to each group."""
    factor = _gradient_factor(partials, total, grad_scale, max_norm)
    dg = _total(partials, DG, total)
    finite = tl.abs(dg) < float("inf")
    if not SKIPS:
        finite = finite | True
    if found_inf is not None:
        finite = finite & (tl.load(found_inf) == 0.0)

    group = tl.arange(0, GROUPS)
    inside = group < count
    typed = groups + group * TYPED
    lr = tl.load(typed + LR, mask=inside, other=0.0)
    unit = tl.load(typed + UNIT, mask=inside, other=0.0)
    is_present = tl.load(typed + PRESENT, mask=inside, other=0.0) != 0.0
    is_live = tl.max(((lr != 0.0) & is_present).to(tl.int32), 0) != 0
    # Before the first update, displacements are given the unit of the proposals.
    leads = group == tl.min(tl.where(lr != 0.0, group, GROUPS), 0)
    first_unit = tl.sum(tl.where(leads, unit, 0.0), 0)
    stored = tl.load(share)
    of_delta = stored
    stored = tl.where((tl.load(updates) == 0) & (first_unit > 0.0) & finite, first_unit, stored)

    lane = tl.arange(0, LANES)
    own = lane < N
    zero = tl.full((), 0.0, tl.float64)
    dx, xx, uu = zero, zero, zero
    if WITH_X:
        dx, xx = _total(partials, DX, total) * of_delta, _total(partials, XX, total)
    if WAITS:
        uu = _total(partials, UU, total)
    dg = dg * of_delta * factor
    dd = _total(partials, DD, total) * of_delta * of_delta
    gg = _total(partials, LIVE_GG, total) * factor * factor
    takes_part = is_live & finite
    betas = tl.load(beta + lane, mask=own, other=0.0)
    betas, m_, v_, r_, s_, M_, U_, D_, R_, L_, C_, kept = RULE(
        betas,
        tl.load(m + lane, mask=own, other=0.0), tl.load(v + lane, mask=own, other=0.0),
        tl.load(r + lane, mask=own, other=0.0), tl.load(s + lane, mask=own, other=0.0),
        tl.load(M), tl.load(U), tl.load(D), tl.load(R), tl.load(L), tl.load(C), stored,
        dg, dx, gg, xx, tl.load(reference_square), tl.load(size), dd, uu, takes_part, lane,
    )  # fmt: skip
    S = tl.sum(tl.where(own, s_, 0.0), 0)
    S = tl.where(takes_part, S, tl.load(scale))
    grow = S * kept - tl.load(scale) * stored
    tl.store(m + lane, m_, mask=own)
    tl.store(v + lane, v_, mask=own)
    tl.store(r + lane, r_, mask=own)
    tl.store(s + lane, s_, mask=own)
    tl.store(M, M_)
    tl.store(U, U_)
    tl.store(D, D_)
    tl.store(R, R_)
    tl.store(L, L_)
    tl.store(C, C_)
    tl.store(scale, S)
    tl.store(share, kept)
    tl.store(signal, tl.where(takes_part, dg, tl.load(signal)))

    turn, done = tl.load(steps), finite.to(tl.int64)
    tl.store(verdict, done)
    tl.store(verdict + 1, turn)
    tl.store(steps, turn + done)
    tl.store(updates, tl.load(updates) + takes_part.to(tl.int64))
    tl.store(skipped, tl.load(skipped) + (1 - done))
    tl.store(skipped_in_a_row, (tl.load(skipped_in_a_row) + 1) * (1 - done))

    _write_group(groups, made, group, inside, factor)
    made += group * MADE
    unit = tl.where(lr != 0.0, unit, 0.0)
    tl.store(made + GROW, tl.where(lr != 0.0, grow, 0.0).to(tl.float32), mask=inside)
    tl.store(made + MOVE, (S * unit).to(tl.float32), mask=inside)
    tl.store(made + GAIN, (unit / kept).to(tl.float32), mask=inside)
    tl.store(rates + group, (S * lr).to(tl.float32), mask=inside)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, done.to(tl.float32), True)
