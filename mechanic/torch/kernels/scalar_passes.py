"""The kernels of one program: from the sums of all chunks to what is done to each group."""

import triton
import triton.language as tl

from mechanic.torch.kernels.passes import (
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
from mechanic.torch.rates import proportional_lr

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
def _gradient_factor(partials, total, grad_scale, max_norm):
    """What the gradients are multiplied with: GradScaler's scale is taken back, and they are
    clipped to a norm. Clipping by itself comes second."""
    unscale = tl.full((), 1.0, tl.float64)
    if grad_scale is not None:
        unscale = 1.0 / tl.load(grad_scale).to(tl.float64)
    clip = tl.full((), 1.0, tl.float64)
    if max_norm is not None:
        norm = tl.sqrt(_total(partials, ALL_GG, total)) * unscale
        clip = tl.load(max_norm) / (norm + tl.full((), 1e-6, tl.float64))  # torch's own ε
        clip = tl.where(clip > 1.0, 1.0, clip)
    return unscale * clip


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
    partials, total, groups, count, coefficients, grad_scale, max_norm,
    table, grads, tensors, biases,
    GROUPS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """What `square_proposals` needs of a known base, before `tune` has run."""
    group = tl.arange(0, GROUPS)
    factor = _gradient_factor(partials, total, grad_scale, max_norm)
    _write_group(groups, coefficients, group, group < count, factor)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, 1.0, False)


@triton.jit
def _first_share(
    packed, counts, group, lr, unit, finite, SHARE: tl.constexpr, GROUPS: tl.constexpr
):
    """The share of the stored displacements that Δ is, chosen before the first update as
    `plain._first_share` does."""
    leads = group == tl.min(tl.where(lr != 0.0, group, GROUPS), 0)
    first_unit = tl.sum(tl.where(leads, unit, 0.0), 0)
    first = tl.where(first_unit == 1.0, first_unit, first_unit * _RUN_AT)
    is_first = (tl.load(counts + UPDATES) == 0) & (first > 0.0) & finite
    return tl.where(is_first, first, tl.load(packed + SHARE))


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


@triton.jit(do_not_specialize=["total", "count", "tensors"])
def tune(
    packed, counts,
    partials, total, groups, count, coefficients, rates, verdict,
    found_inf, grad_scale, max_norm, table, grads, tensors, biases,
    RULE: tl.constexpr, SHARE: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    SKIPS: tl.constexpr, WITH_X: tl.constexpr, WITH_U: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The tuner's step: from the sums of all chunks to what is done to each group. `packed` holds
    the tuner's numbers, of which `SHARE` is the place of one."""
    factor = _gradient_factor(partials, total, grad_scale, max_norm)
    dg = _total(partials, DG, total)
    finite = tl.abs(dg) < float("inf")
    if not SKIPS:
        finite = finite | True
    if found_inf is not None:
        finite = finite & (tl.load(found_inf) == 0.0)

    group = tl.arange(0, GROUPS)
    inside = group < count
    settings = groups + group * SETTINGS
    lr = tl.load(settings + LR, mask=inside, other=0.0)
    unit = tl.load(settings + UNIT, mask=inside, other=0.0)
    is_present = tl.load(settings + PRESENT, mask=inside, other=0.0) != 0.0
    takes_part = (tl.max(((lr != 0.0) & is_present).to(tl.int32), 0) != 0) & finite
    of_delta = tl.load(packed + SHARE)
    share = _first_share(packed, counts, group, lr, unit, finite, SHARE, GROUPS)

    zero = tl.full((), 0.0, tl.float64)
    dx, xx, uu = zero, zero, zero
    if WITH_X:
        dx, xx = _total(partials, DX, total) * of_delta, _total(partials, XX, total)
    if WITH_U:
        uu = _total(partials, UU, total)
    dg = dg * of_delta * factor
    dd = _total(partials, DD, total) * of_delta * of_delta
    gg = _total(partials, GG, total) * factor * factor
    lane = tl.arange(0, LANES)
    S, share, x_per_stored, kept = RULE(
        packed, share, dg, dx, gg, xx, dd, uu, takes_part, tl.sum(lr, 0), lane
    )

    done = finite.to(tl.int64)
    _count(counts, verdict, done, takes_part)
    _write_group(groups, coefficients, group, inside, factor)
    coefficients += group * COEFFICIENTS
    is_live = lr != 0.0
    unit = tl.where(is_live, unit, 0.0)
    x_per_stored = tl.where(is_live, x_per_stored, 0.0).to(tl.float32)
    tl.store(coefficients + X_PER_STORED, x_per_stored, mask=inside)
    tl.store(coefficients + KEPT, tl.where(is_live, kept, 1.0).to(tl.float32), mask=inside)
    tl.store(coefficients + X_PER_PROPOSAL, (S * unit).to(tl.float32), mask=inside)
    tl.store(coefficients + STORED_PER_PROPOSAL, (unit / share).to(tl.float32), mask=inside)
    tl.store(rates + group, (S * lr).to(tl.float32), mask=inside)
    if BIASED:
        _write_biases(table, grads, tensors, groups, biases, done.to(tl.float32), True)
