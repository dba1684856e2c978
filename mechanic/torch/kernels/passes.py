"""The kernels. Each works on all tensors of one kind in one launch.

Where a tensor lies is a number in a table; a chunk of it is a row of `chunks`: the tensor's place
in the table, and which chunk of it. `layout.py` makes both. Arithmetic is in float32 whatever the
tensors are, sums over chunks in float64, always in the same order. A chunk whose squares are too
small or too large for float32 is summed up again in float64.
"""

import triton
import triton.language as tl

from mechanic.torch.kernels.columns import (
    ALL_GG,
    COEFFICIENTS,
    COLUMNS,
    COUNTS,
    DD,
    DELTA,
    DG,
    DX,
    FACTOR,
    FIRST,
    GG,
    GROUP,
    KEPT,
    LR,
    NUMEL,
    PLACE,
    SECOND,
    SETTINGS,
    SIGN,
    STORED_PER_PROPOSAL,
    UNIT,
    UPDATES,
    UU,
    X_PER_PROPOSAL,
    X_PER_STORED,
    XX,
    X,
)
from mechanic.torch.kernels.formulas import propose
from mechanic.torch.measure import LEAST, MOST, TOO_LARGE

CHUNK = 32768
"""The elements that one program sums up"""
BLOCK = 1024
"""The elements that one program updates"""
_LEAST, _MOST, _TOO_LARGE = map(tl.constexpr, (LEAST, MOST, TOO_LARGE))


@triton.jit
def _from(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)  # for loads of 16 bytes
    return pointer + offset


@triton.jit
def _at(table, tensor, column, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a tensor's elements lie, from an offset on."""
    address = tl.load(table + tensor * COLUMNS + column)
    return _from(address, offset, DTYPE, ALIGNED)


@triton.jit
def _in_copy(copy, table, tensor, offset):
    """Where a tensor's elements lie in the copy of all of a dtype."""
    DTYPE: tl.constexpr = copy.dtype.element_ty
    BITS: tl.constexpr = copy.dtype.element_ty.primitive_bitwidth
    place = tl.load(table + tensor * COLUMNS + PLACE) * (BITS // 8)
    return _from(copy.to(tl.int64) + place, offset, DTYPE, True)


@triton.jit
def _find_chunk(chunks, table, program, CHUNK: tl.constexpr):
    """The tensor that a chunk is of, where in it the chunk begins, and how long it is."""
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    offset = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    return tensor, offset, _count(table, tensor, offset, CHUNK)


@triton.jit
def _find_block(chunks, table, program, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The same of a block of a chunk, which may lie past the tensor's end: not above 0 then."""
    tensor, offset, _ = _find_chunk(chunks, table, program // (CHUNK // BLOCK), CHUNK)
    offset += (program % (CHUNK // BLOCK)) * BLOCK
    return tensor, offset, _count(table, tensor, offset, BLOCK)


@triton.jit
def _count(table, tensor, offset, SIZE: tl.constexpr):
    numel = tl.load(table + tensor * COLUMNS + NUMEL)
    return tl.minimum(numel - offset, SIZE).to(tl.int32)


@triton.jit
def _slots(
    table, tensor, offset, other,
    SLOTS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where the base's state lies, and `other` where it has less."""
    first, second = other, other
    if SLOTS > 0:
        first = _at(table, tensor, FIRST, offset, DTYPE, ALIGNED)
    if SLOTS > 1:
        second = _at(table, tensor, SECOND, offset, DTYPE, ALIGNED)
    return first, second


@triton.jit
def _load(pointer, index, count, MASKED: tl.constexpr):
    if MASKED:
        value = tl.load(pointer + index, mask=index < count, other=0.0)
    else:
        value = tl.load(pointer + index)
    return value.to(tl.float32)


@triton.jit
def _store(pointer, index, value, count, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + index, value, mask=index < count)
    else:
        tl.store(pointer + index, value)


@triton.jit
def _narrowed(point, place, step_number, DTYPE: tl.constexpr, LATER: tl.constexpr):
    """Round as `vectors.dither` does. What is rounded `LATER` is so at thresholds of its own."""
    if DTYPE == tl.float32:
        return point
    else:
        if DTYPE == tl.bfloat16:
            digits: tl.constexpr = 8
            smallest: tl.constexpr = -126
        else:
            digits: tl.constexpr = 11
            smallest: tl.constexpr = -24
        exponent = ((point.to(tl.int32, bitcast=True) >> 23) & 255) - 126 - digits
        exponent = tl.maximum(exponent, smallest)
        unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        by_place = place.to(tl.uint32) * tl.full((), 0xC13FA9A9, tl.uint32)
        by_turn = step_number.to(tl.uint32) * tl.full((), 0x91E10DA5, tl.uint32)
        sequence = by_place + by_turn + tl.full((), 0x80000000 if LATER else 0, tl.uint32)
        threshold = (sequence >> 8).to(tl.float32) * (1.0 / (1 << 24))
        steps = point / unit
        below = tl.floor(steps)
        return (tl.where(steps - below > threshold, below + 1, below) * unit).to(DTYPE)


@triton.jit
def _sum_block(
    x, grad, delta, index, count, read, dg, dd, gg, dx, xx,
    TYPE: tl.constexpr, WITH_X: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    gradient = _load(grad, index, read, MASKED).to(TYPE)
    displacement = _load(delta, index, count, MASKED).to(TYPE)
    dg += displacement * gradient
    dd += displacement * displacement
    gg += gradient * gradient
    if WITH_X:
        point = _load(x, index, count, MASKED).to(TYPE)
        dx += displacement * point
        xx += point * point
    return dg, dd, gg, dx, xx


@triton.jit
def _summed(sums):
    return tl.sum(sums, 0).to(tl.float64)


@triton.jit
def _sum_chunk(
    x, grad, delta, count, read,
    TYPE: tl.constexpr, WITH_X: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    dg = tl.zeros((BLOCK,), TYPE)
    dd, gg, dx, xx = dg, dg, dg, dg
    if read == CHUNK:
        for begin in tl.range(0, CHUNK, BLOCK):
            dg, dd, gg, dx, xx = _sum_block(
                x, grad, delta, begin + lane, count, read, dg, dd, gg, dx, xx, TYPE, WITH_X, False,
            )  # fmt: skip
    else:
        begin = 0
        while begin < count:
            dg, dd, gg, dx, xx = _sum_block(
                x, grad, delta, begin + lane, count, read, dg, dd, gg, dx, xx, TYPE, WITH_X, True,
            )  # fmt: skip
            begin += BLOCK
    return _summed(dg), _summed(dd), _summed(gg), _summed(dx), _summed(xx)


@triton.jit(do_not_specialize=["total", "address"])
def sum_up(
    table, grads, address, chunks, partials, total, groups,
    WITH_X: tl.constexpr, ALIGNED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, D_TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """⟨Δ, g⟩, ‖Δ‖², ‖g‖² of each chunk, the last also without groups at lr 0; ⟨Δ, x⟩ and ‖x‖² if
    `WITH_X`. A tensor whose gradient has no address takes part in ‖Δ‖² alone. An `address` that is
    given replaces those in `grads`."""
    program = tl.program_id(0)
    tensor, offset, count = _find_chunk(chunks, table, program, CHUNK)
    delta = _at(table, tensor, DELTA, offset, D_TYPE, ALIGNED)
    x = _at(table, tensor, X, offset, X_TYPE, ALIGNED)
    if address is None:
        address = tl.load(grads + tensor)
    gradient = _from(address.to(tl.int64), offset, G_TYPE, ALIGNED)
    is_idle = address == 0
    read = tl.where(is_idle, 0, count)

    dg, dd, gg, dx, xx = _sum_chunk(
        x, gradient, delta, count, read, tl.float32, WITH_X, CHUNK, BLOCK,
    )  # fmt: skip
    settings = groups + tl.load(table + tensor * COLUMNS + GROUP) * SETTINGS
    is_live = tl.load(settings + LR) != 0.0
    is_small = is_live & (read > 0) & ((gg < _LEAST) | (dd < _LEAST))
    if is_small | (gg > _MOST) | (dd > _MOST):
        dg, dd, gg, dx, xx = _sum_chunk(
            x, gradient, delta, count, read, tl.float64, WITH_X, CHUNK, BLOCK,
        )  # fmt: skip
    dg = tl.where(is_live & (gg >= _TOO_LARGE), float("inf"), dg)
    is_elsewhere = tl.load(table + tensor * COLUMNS + COUNTS) == 0
    # no part in h at an lr of 0 or where another process counts it, but a NaN must still show
    weight = tl.load(settings + SIGN) * tl.where(is_live, 1.0, 0.0)
    weight = tl.where(is_elsewhere, 0.0, weight)
    partials += program
    tl.store(partials + DG * total, dg * weight)
    tl.store(partials + DD * total, tl.where(is_elsewhere, 0.0, dd))
    square = tl.where(is_elsewhere, 0.0, gg)
    tl.store(partials + ALL_GG * total, square)
    tl.store(partials + GG * total, tl.where(is_live, square, 0.0))
    if WITH_X:
        is_left_out = is_idle | is_elsewhere
        tl.store(partials + DX * total, tl.where(is_left_out, 0.0, dx))
        tl.store(partials + XX * total, tl.where(is_left_out, 0.0, xx))


@triton.jit
def _of_finite(point, proposal):
    """A proposal, and 0 where the weight is NaN or inf: it does not move, and inf − inf is NaN."""
    return tl.where(tl.abs(point) < float("inf"), proposal, 0.0)


@triton.jit
def _propose_block(
    x, grad, first, second, index, count, bias_1, bias_2, coefficients,
    BASE: tl.constexpr, SLOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """x, what a base adds to it, and the base's next state."""
    point = _load(x, index, count, MASKED)
    gradient = _load(grad, index, count, MASKED) * tl.load(coefficients + FACTOR)
    slot_1, slot_2 = point, point
    if SLOTS > 0:
        slot_1 = _load(first, index, count, MASKED)
    if SLOTS > 1:
        slot_2 = _load(second, index, count, MASKED)
    proposal, slot_1, slot_2 = propose(
        point, gradient, slot_1, slot_2, bias_1, bias_2, coefficients, BASE
    )
    return point, _of_finite(point, proposal), slot_1, slot_2


@triton.jit
def _write_point(
    x, delta, index, place, count, step_number, coefficients, stored_per_proposal, point,
    displacement, proposal, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the next point, and the displacement that belongs to it."""
    place += index
    point += (
        tl.load(coefficients + X_PER_STORED) * displacement
        + tl.load(coefficients + X_PER_PROPOSAL) * proposal
    )
    point = _narrowed(point, place, step_number, x.dtype.element_ty, False)
    _store(x, index, point, count, MASKED)
    displacement = tl.load(coefficients + KEPT) * displacement + stored_per_proposal * proposal
    displacement = _narrowed(displacement, place, step_number, delta.dtype.element_ty, True)
    _store(delta, index, displacement, count, MASKED)


@triton.jit
def _update_block(
    x, grad, delta, first, second, index, place, count, step_number, bias_1, bias_2, coefficients,
    BASE: tl.constexpr, SLOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    displacement = _load(delta, index, count, MASKED)
    point, proposal, slot_1, slot_2 = _propose_block(
        x, grad, first, second, index, count, bias_1, bias_2, coefficients, BASE, SLOTS, MASKED,
    )  # fmt: skip
    stored_per_proposal = tl.load(coefficients + STORED_PER_PROPOSAL)
    if stored_per_proposal != 0.0:  # at an lr of 0 all stays as it is
        _write_point(
            x, delta, index, place, count, step_number, coefficients, stored_per_proposal, point,
            displacement, proposal, MASKED,
        )  # fmt: skip
    if SLOTS > 0:
        _store(first, index, slot_1.to(first.dtype.element_ty), count, MASKED)
    if SLOTS > 1:
        _store(second, index, slot_2.to(second.dtype.element_ty), count, MASKED)


@triton.jit
def update(
    table, grads, chunks, coefficients, biases, verdict,
    BASE: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
    X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, D_TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of a known base and Mechanic's, in one."""
    # Everything is loaded before the first branch, so that one latency hides the others.
    is_made, step_number = tl.load(verdict), tl.load(verdict + 1)
    tensor, offset, count = _find_block(chunks, table, tl.program_id(0), CHUNK, BLOCK)
    address = tl.load(grads + tensor)
    grad = _from(address, offset, G_TYPE, ALIGNED)
    x = _at(table, tensor, X, offset, X_TYPE, ALIGNED)
    delta = _at(table, tensor, DELTA, offset, D_TYPE, ALIGNED)
    first, second = _slots(table, tensor, offset, delta, SLOTS, S_TYPE, ALIGNED)
    coefficients += tl.load(table + tensor * COLUMNS + GROUP) * COEFFICIENTS
    bias_1, bias_2 = tl.load(biases + 2 * tensor), tl.load(biases + 2 * tensor + 1)
    if (is_made == 0) | (count <= 0) | (address == 0):
        return
    index = tl.arange(0, BLOCK)
    if count == BLOCK:
        _update_block(
            x, grad, delta, first, second, index, offset, count, step_number, bias_1, bias_2,
            coefficients, BASE, SLOTS, False,
        )  # fmt: skip
    else:
        _update_block(
            x, grad, delta, first, second, index, offset, count, step_number, bias_1, bias_2,
            coefficients, BASE, SLOTS, True,
        )  # fmt: skip


@triton.jit
def is_update_needed(counts, has_risen, FIRST_STEPS: tl.constexpr):
    """Whether ‖u‖² is measured: in the first steps, and when a learning rate has risen."""
    return (tl.load(counts + UPDATES) < FIRST_STEPS) | (tl.load(has_risen) != 0)


@triton.jit(do_not_specialize=["total"])
def square_proposals(
    table, grads, chunks, partials, total, groups, coefficients, biases, counts, has_risen, copy,
    BASE: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr, FIRST_STEPS: tl.constexpr,
    LOOKS: tl.constexpr, X_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """‖u‖² of each chunk, in the steps in which it is measured, or in all if it `LOOKS` for NaN and
    inf: of what a known base is going to propose, and where `BASE` is "any", of what it has added
    to the copy of x."""
    program = tl.program_id(0)
    partials += UU * total + program
    tl.store(partials, 0.0)
    if not LOOKS:
        if not is_update_needed(counts, has_risen, FIRST_STEPS):
            return
    tensor, offset, count = _find_chunk(chunks, table, program, CHUNK)
    address = tl.load(grads + tensor)
    if (address == 0) | (tl.load(table + tensor * COLUMNS + COUNTS) == 0):
        return
    x = _at(table, tensor, X, offset, X_TYPE, ALIGNED)
    group = tl.load(table + tensor * COLUMNS + GROUP)
    coefficients += group * COEFFICIENTS
    squares = tl.zeros((BLOCK,), tl.float64)
    if BASE == "any":
        copy = _in_copy(copy, table, tensor, offset)
        begin = 0
        while begin < count:
            index = begin + tl.arange(0, BLOCK)
            point = _load(x, index, count, True)
            proposal = _of_finite(point, _load(copy, index, count, True) - point).to(tl.float64)
            squares += proposal * proposal
            begin += BLOCK
    else:
        grad = _from(address, offset, G_TYPE, ALIGNED)
        first, second = _slots(table, tensor, offset, x, SLOTS, S_TYPE, ALIGNED)
        bias_1, bias_2 = tl.load(biases + 2 * tensor), tl.load(biases + 2 * tensor + 1)
        begin = 0
        while begin < count:
            index = begin + tl.arange(0, BLOCK)
            _, proposal, _, _ = _propose_block(
                x, grad, first, second, index, count, bias_1, bias_2, coefficients,
                BASE, SLOTS, True,
            )  # fmt: skip
            proposal = tl.where(index < count, proposal, 0.0).to(tl.float64)
            squares += proposal * proposal
            begin += BLOCK
    unit = tl.load(groups + group * SETTINGS + UNIT)
    tl.store(partials, tl.sum(squares, 0) * unit * unit)


@triton.jit
def copy_params(
    table, chunks, copy,
    ALIGNED: tl.constexpr, X_TYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy x, for a base that runs by itself."""
    tensor, offset, count = _find_block(chunks, table, tl.program_id(0), CHUNK, BLOCK)
    x = _at(table, tensor, X, offset, X_TYPE, ALIGNED)
    copy = _in_copy(copy, table, tensor, offset)
    index = tl.arange(0, BLOCK)
    if count == BLOCK:
        tl.store(copy + index, tl.load(x + index))
    else:
        tl.store(copy + index, tl.load(x + index, mask=index < count), mask=index < count)


@triton.jit
def _move_block(
    x, delta, copy, index, place, count, step_number, coefficients, MASKED: tl.constexpr,
):  # fmt: skip
    point = _load(x, index, count, MASKED)
    proposal = _of_finite(point, _load(copy, index, count, MASKED) - point)
    displacement = _load(delta, index, count, MASKED)
    stored_per_proposal = tl.load(coefficients + STORED_PER_PROPOSAL)
    if stored_per_proposal != 0.0:  # at an lr of 0 all stays as it is
        _write_point(
            x, delta, index, place, count, step_number, coefficients, stored_per_proposal, point,
            displacement, proposal, MASKED,
        )  # fmt: skip


@triton.jit
def move(
    table, grads, chunks, coefficients, verdict, copy,
    ALIGNED: tl.constexpr, X_TYPE: tl.constexpr, D_TYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mechanic's step after any base's, which has moved the copy of x."""
    is_made, step_number = tl.load(verdict), tl.load(verdict + 1)
    tensor, offset, count = _find_block(chunks, table, tl.program_id(0), CHUNK, BLOCK)
    address = tl.load(grads + tensor)
    x = _at(table, tensor, X, offset, X_TYPE, ALIGNED)
    delta = _at(table, tensor, DELTA, offset, D_TYPE, ALIGNED)
    copy = _in_copy(copy, table, tensor, offset)
    coefficients += tl.load(table + tensor * COLUMNS + GROUP) * COEFFICIENTS
    if (is_made == 0) | (count <= 0) | (address == 0):
        return
    index = tl.arange(0, BLOCK)
    if count == BLOCK:
        _move_block(x, delta, copy, index, offset, count, step_number, coefficients, False)
    else:
        _move_block(x, delta, copy, index, offset, count, step_number, coefficients, True)
