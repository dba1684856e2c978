"""The launches of the kernels over a plan."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mechanic import tuner
from mechanic.advance import FIRST_STEPS
from mechanic.torch.kernels import columns, passes, scalar_passes
from mechanic.torch.kernels.layout import Section
from mechanic.torch.kernels.plan import Plan
from mechanic.torch.kernels.rule import write_rule
from mechanic.torch.measure import needs_displacement_square, needs_gradient_squares
from mechanic.torch.mechanism import Mechanism

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_WARPS = {"num_warps": 4}  # of the passes over the tensors; measured, see docs/performance.md
_MORE_WARPS = {"num_warps": 8}  # of a program that runs alone


class Inputs(NamedTuple):
    """What a step brings along for the kernels."""

    grads: Tensor
    """The addresses of the gradients"""
    groups: Tensor
    """The settings of the groups"""
    grad_scale: Tensor | None
    """GradScaler's scale, where the base unscales by itself"""
    found_inf: Tensor | None
    """GradScaler's word for NaN and inf"""
    max_norm: Tensor | None
    """The norm that gradients are clipped to"""
    has_risen: Tensor
    """Whether a learning rate has risen so much that ‖u‖² is measured"""
    news: Tensor | None
    """‖x‖² of the parameters that are seen for the first time, and their number"""
    copies: dict[torch.dtype, Tensor]
    """A copy of all parameters of a dtype, where the base runs by itself"""


def _launch(
    plan: Plan,
    kernel: Any,
    key: Any,
    programs: int,
    given: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, int],
) -> None:
    """Launch a kernel with what it is given, and the constants that it was compiled for.

    The compiled kernel is kept, since Triton takes longer to find it again than to launch it. The
    `key` tells apart what Triton would compile anew: other constants, and addresses that are not
    multiples of 16 bytes.
    """
    compiled = plan.compiled.get((kernel, key))
    if compiled is None:
        plan.compiled[kernel, key] = kernel[(programs,)](*given, *constants, **options)
    else:
        compiled[(programs, 1, 1)](*given, *constants)


def try_out(device: torch.device) -> None:
    """Launch a small kernel; raises what Triton raises where it does not work."""
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(columns.COLUMNS.value, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        passes.copy_params[(1,)](table, counts, table, True, tl.int64, 1, 1)


def sum_up(plan: Plan, mechanism: Mechanism, inputs: Inputs, sections: list[Section]) -> None:
    """The sums that need not wait for the base's step."""
    for section in sections:
        sum_one(plan, mechanism, section, None, inputs.groups, inputs.grads)


def sum_one(
    plan: Plan,
    mechanism: Mechanism,
    section: Section,
    address: int | None,
    groups: Tensor,
    grads: Tensor,
) -> None:
    """The same sums of one section; of a single gradient, where its address is given."""
    kind, first, programs, chunks, partials = section
    types = _TYPES[kind.x], _TYPES[kind.grad], _TYPES[kind.delta]
    with_x = tuner.reads_x(mechanism.options)
    _launch(
        plan,
        passes.sum_up,
        (first, address is None),
        programs,
        (plan.layout.table, grads, address, chunks, partials, plan.layout.total, groups),
        (with_x, kind.is_aligned, *types, plan.layout.chunk, passes.BLOCK),
        _WARPS,
    )


def copy_params(plan: Plan, copies: dict[torch.dtype, Tensor]) -> None:
    """Copy the parameters, for a base that runs by itself."""
    for kind, first, programs, chunks, _ in plan.layout.sections:
        _launch(
            plan,
            passes.copy_params,
            first,
            programs * (plan.layout.chunk // passes.BLOCK),
            (plan.layout.table, chunks, copies[kind.x]),
            (kind.is_aligned, _TYPES[kind.x], plan.layout.chunk, passes.BLOCK),
            _WARPS,
        )


def square_proposals(plan: Plan, mechanism: Mechanism, inputs: Inputs, *, looks: bool) -> None:
    """‖u‖², where it is measured: before a known base's step, after any other's. In all steps, if
    it `looks` for NaN and inf."""
    layout, coefficients = plan.layout, plan.groups.coefficients
    groups, grads, count = inputs.groups, inputs.grads, len(plan.groups.bases)
    if plan.is_known:
        scalar_passes.weigh[(1,)](
            *(layout.partials, layout.total, _parts_of(plan), groups, count, coefficients),
            *(inputs.grad_scale, inputs.max_norm),
            *(layout.table, grads, len(layout.entries), plan.biases),
            GROUPS=triton.next_power_of_2(count),
            BIASED=bool(plan.counters.steps),
            **_MORE_WARPS,
        )
    for kind, _, programs, chunks, partials in layout.sections:
        passes.square_proposals[(programs,)](
            *(layout.table, grads, chunks, partials, layout.total, groups, coefficients),
            *(plan.biases, mechanism.counts.packed, inputs.has_risen, inputs.copies.get(kind.x)),
            BASE=kind.base.formula,
            SLOTS=len(kind.base.slots),
            ALIGNED=kind.is_aligned,
            FIRST_STEPS=FIRST_STEPS,
            LOOKS=looks,
            X_TYPE=_TYPES[kind.x],
            G_TYPE=_TYPES[kind.grad],
            S_TYPE=_TYPES[kind.slots],
            CHUNK=plan.layout.chunk,
            BLOCK=passes.BLOCK,
            **_WARPS,
        )


def _parts_of(plan: Plan) -> Tensor | None:
    """The sums that processes have told each other, if they share the parameters."""
    return None if plan.message is None else plan.message.parts


def _alignment(tensor: Tensor | None) -> int | bool:
    """What Triton tells apart in a tensor that is given, or not."""
    return tensor is None or tensor.data_ptr() % 16


def tell(plan: Plan, mechanism: Mechanism, inputs: Inputs, *, asks: bool) -> None:
    """Write this process's part of the sums into the message. It `asks` for ‖u‖²."""
    options, layout, count = mechanism.options, plan.layout, len(plan.groups.bases)
    scaler = inputs.found_inf, inputs.grad_scale
    _launch(
        plan,
        scalar_passes.tell,
        (asks, *map(_alignment, (*scaler, inputs.news))),
        1,
        (
            *(_parts_of(plan), mechanism.scalars.packed),
            *(layout.partials, layout.total, inputs.groups, count, *scaler, inputs.news),
        ),
        (
            *(triton.next_power_of_2(count), len(options.betas), tuner.reads_x(options)),
            *(needs_gradient_squares(options), needs_displacement_square(options), asks),
        ),
        _MORE_WARPS,
    )


def tell_update(plan: Plan, late: Tensor) -> None:
    """Write this process's part of ‖u‖² into a message."""
    given = late, plan.layout.partials, plan.layout.total
    _launch(plan, scalar_passes.tell_update, None, 1, given, (), _MORE_WARPS)


def tune(plan: Plan, mechanism: Mechanism, inputs: Inputs, *, with_u: bool, looks: bool) -> None:
    """The tuner's step, and what follows from it for each group. If it `looks`, a step whose update
    holds NaN or inf is skipped."""
    options, layout, groups = mechanism.options, plan.layout, plan.groups
    columns, count = len(options.betas), len(groups.bases)
    scaler = inputs.found_inf, inputs.grad_scale
    late: tuple[Tensor | None, Tensor | None] = (None, None)
    if plan.message is not None and with_u:
        late = plan.message.late, inputs.has_risen
    elif looks:
        late = None, inputs.has_risen
    _launch(
        plan,
        scalar_passes.tune,
        (with_u, looks, mechanism.frozen, *map(_alignment, (*scaler, late[1], inputs.news))),
        1,
        (
            *(mechanism.scalars.packed, mechanism.counts.packed),
            *(layout.partials, layout.total, _parts_of(plan), inputs.news, *late),
            *(inputs.groups, count),
            *(groups.coefficients, groups.rates, plan.verdict, *scaler, inputs.max_norm),
            *(layout.table, inputs.grads, len(layout.entries), plan.biases),
        ),
        (
            *(write_rule(options, frozen=mechanism.frozen), columns),
            *(triton.next_power_of_2(columns), triton.next_power_of_2(count)),
            *(options.skip_nonfinite, tuner.reads_x(options), with_u, looks),
            *(bool(plan.counters.steps), mechanism.process_group is None),
        ),
        _MORE_WARPS,
    )


def update(plan: Plan, inputs: Inputs) -> None:
    """The step of a known base, and Mechanic's."""
    coefficients = plan.groups.coefficients
    for kind, first, programs, chunks, _ in plan.layout.sections:
        types = _TYPES[kind.x], _TYPES[kind.grad], _TYPES[kind.delta], _TYPES[kind.slots]
        _launch(
            plan,
            passes.update,
            first,
            programs * (plan.layout.chunk // passes.BLOCK),
            (plan.layout.table, inputs.grads, chunks, coefficients, plan.biases, plan.verdict),
            (
                *(kind.base.formula, len(kind.base.slots), kind.is_aligned),
                *(*types, plan.layout.chunk, passes.BLOCK),
            ),
            _WARPS,
        )


def move(plan: Plan, inputs: Inputs) -> None:
    """Mechanic's step, after the base's own on the copies."""
    coefficients = plan.groups.coefficients
    for kind, first, programs, chunks, _ in plan.layout.sections:
        copy = inputs.copies[kind.x]
        _launch(
            plan,
            passes.move,
            first,
            programs * (plan.layout.chunk // passes.BLOCK),
            (plan.layout.table, inputs.grads, chunks, coefficients, plan.verdict, copy),
            (kind.is_aligned, _TYPES[kind.x], _TYPES[kind.delta], plan.layout.chunk, passes.BLOCK),
            _WARPS,
        )
