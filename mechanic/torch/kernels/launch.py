"""The launches of the kernels over a plan."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mechanic.torch.kernels import passes, scalar_passes
from mechanic.torch.kernels.plan import Plan, Section
from mechanic.torch.kernels.rule import write_rule
from mechanic.torch.mechanism import EXACT, Mechanism

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_WARPS = {"num_warps": 4}  # of the passes over the tensors; measured, see docs/performance.md
_MORE_WARPS = {"num_warps": 8}  # of a program that runs alone


class Inputs(NamedTuple):
    """What a step brings along for the kernels."""

    grads: Tensor
    """The gradients' addresses"""
    groups: Tensor
    """The groups' settings"""
    grad_scale: Tensor | None
    """GradScaler's, where the base unscales by itself"""
    found_inf: Tensor | None
    max_norm: Tensor | None
    """What the gradients' norm is clipped to"""
    risen: Tensor
    """Whether a learning rate has risen so much that ‖u‖² is waited for"""
    copies: dict[torch.dtype, Tensor]
    """A copy of all parameters of a dtype, where the base runs by itself"""


def _launch(
    plan: Plan,
    kernel: Any,
    key: Any,
    programs: int,
    given: tuple[Any, ...],
    known: tuple[Any, ...],
    options: dict[str, int],
) -> None:
    """Launch a kernel with what it is given, and what it was compiled for.

    The compiled kernel is kept, since Triton takes longer to find it again than to launch it. The
    `key` tells apart what Triton would compile anew: other constants, and addresses that are not
    multiples of 16 bytes.
    """
    compiled = plan.compiled.get((kernel, key))
    if compiled is None:
        plan.compiled[kernel, key] = kernel[(programs,)](*given, *known, **options)
    else:
        compiled[(programs, 1, 1)](*given, *known)


def try_out(device: torch.device) -> None:
    """Launch a small kernel; raises what Triton raises where it does not work."""
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(passes.COLUMNS.value, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        passes.keep[(1,)](table, counts, table, True, tl.int64, 1, 1)


def sum_up(plan: Plan, mechanism: Mechanism, inputs: Inputs, sections: list[Section]) -> None:
    """The sums that the base's step need not be waited for."""
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
    _launch(
        plan,
        passes.sum_up,
        (first, address is None),
        programs,
        (plan.table, grads, address, chunks, partials, plan.total, groups),
        (mechanism.options.s_decay != 0, kind.is_aligned, *types, plan.chunk, passes.BLOCK),
        _WARPS,
    )


def keep(plan: Plan, inputs: Inputs) -> None:
    """Copy the parameters, for a base that runs by itself."""
    for kind, first, programs, chunks, _ in plan.sections:
        _launch(
            plan,
            passes.keep,
            first,
            programs * plan.parts,
            (plan.table, chunks, inputs.copies[kind.x]),
            (kind.is_aligned, _TYPES[kind.x], plan.chunk, passes.BLOCK),
            _WARPS,
        )


def square_proposals(plan: Plan, mechanism: Mechanism, inputs: Inputs) -> None:
    """‖u‖², where it is waited for: before a known base's step, after any other's."""
    groups, grads = inputs.groups, inputs.grads
    if plan.is_known:
        scalar_passes.weigh[(1,)](
            *(plan.partials, plan.total, groups, len(plan.bases), plan.made),
            *(inputs.grad_scale, inputs.max_norm),
            *(plan.table, grads, len(plan.entries), plan.biases),
            GROUPS=triton.next_power_of_2(len(plan.bases)),
            BIASED=bool(plan.steps),
            **_MORE_WARPS,
        )
    for kind, _, programs, chunks, partials in plan.sections:
        passes.square_proposals[(programs,)](
            *(plan.table, grads, chunks, partials, plan.total, groups, plan.made, plan.biases),
            *(mechanism.updates, inputs.risen, inputs.copies.get(kind.x)),
            BASE=kind.base.way,
            SLOTS=len(kind.base.slots),
            ALIGNED=kind.is_aligned,
            EXACT=EXACT,
            X_TYPE=_TYPES[kind.x],
            G_TYPE=_TYPES[kind.grad],
            S_TYPE=_TYPES[kind.slots],
            CHUNK=plan.chunk,
            BLOCK=passes.BLOCK,
            **_WARPS,
        )


def tune(plan: Plan, mechanism: Mechanism, inputs: Inputs, *, waits: bool) -> None:
    """The tuner's step, and what follows from it for each group."""
    options, size = mechanism.options, len(mechanism.options.betas)
    counts = mechanism.steps, mechanism.updates, mechanism.skipped, mechanism.skipped_in_a_row
    scalars = mechanism.scale, mechanism.share, mechanism.signal
    scaler = inputs.found_inf, inputs.grad_scale
    _launch(
        plan,
        scalar_passes.tune,
        (waits, mechanism.frozen, *[t is None or t.data_ptr() % 16 for t in scaler]),
        1,
        (
            *(*mechanism.state, *scalars, mechanism.reference_square, mechanism.size, *counts),
            *(plan.partials, plan.total, inputs.groups, len(plan.bases)),
            *(plan.made, plan.rates, plan.verdict, *scaler, inputs.max_norm),
            *(plan.table, inputs.grads, len(plan.entries), plan.biases),
        ),
        (
            *(write_rule(options, frozen=mechanism.frozen), size, triton.next_power_of_2(size)),
            *(triton.next_power_of_2(len(plan.bases)), options.skip_nonfinite),
            *(options.s_decay != 0, waits, bool(plan.steps)),
        ),
        _MORE_WARPS,
    )


def update(plan: Plan, inputs: Inputs) -> None:
    """The step of a known base, and Mechanic's."""
    for kind, first, programs, chunks, _ in plan.sections:
        types = _TYPES[kind.x], _TYPES[kind.grad], _TYPES[kind.delta], _TYPES[kind.slots]
        base = kind.base.way, len(kind.base.slots)
        _launch(
            plan,
            passes.update,
            first,
            programs * plan.parts,
            (plan.table, inputs.grads, chunks, plan.made, plan.biases, plan.verdict),
            (*base, kind.is_aligned, *types, plan.chunk, passes.BLOCK),
            _WARPS,
        )


def move(plan: Plan, inputs: Inputs) -> None:
    """Mechanic's step, after the base's own."""
    for kind, first, programs, chunks, _ in plan.sections:
        copy = inputs.copies[kind.x]
        _launch(
            plan,
            passes.move,
            first,
            programs * plan.parts,
            (plan.table, inputs.grads, chunks, plan.made, plan.verdict, copy),
            (kind.is_aligned, _TYPES[kind.x], _TYPES[kind.delta], plan.chunk, passes.BLOCK),
            _WARPS,
        )
