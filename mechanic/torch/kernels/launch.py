"""The launches of the kernels over a plan."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mechanic.torch.kernels import passes, scalar_passes
from mechanic.torch.kernels.plan import Plan, Section
from mechanic.torch.kernels.rule import write_rule
from mechanic.torch.mechanism import EXACT, Mechanism

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_SIZES = {"BLOCK": passes.BLOCK, "num_warps": 4}  # measured: docs/performance.md


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


def sum_up(plan: Plan, mechanism: Mechanism, inputs: Inputs, sections: list[Section]) -> None:
    """The sums that the base's step need not be waited for."""
    for section in sections:
        _sum_up(plan, mechanism, section, inputs.grads, None, inputs.groups)


def sum_one(plan: Plan, mechanism: Mechanism, place: int, address: int, groups: Tensor) -> None:
    """The same sums of one gradient alone."""
    begin, end = plan.ranges[place]
    tables = plan.chunks[begin:], plan.partials[begin:]
    section = Section(plan.entries[place].kind, end - begin, *tables)
    _sum_up(plan, mechanism, section, plan.table, address, groups)


def _sum_up(
    plan: Plan,
    mechanism: Mechanism,
    section: Section,
    grads: Tensor,
    address: int | None,
    groups: Tensor,
) -> None:
    kind, programs, chunks, partials = section
    passes.sum_up[(programs,)](
        plan.table,
        grads,
        address,
        chunks,
        partials,
        plan.total,
        groups,
        WITH_X=mechanism.options.s_decay != 0,
        ALIGNED=kind.is_aligned,
        X_TYPE=_TYPES[kind.x],
        G_TYPE=_TYPES[kind.grad],
        D_TYPE=_TYPES[kind.delta],
        CHUNK=plan.chunk,
        **_SIZES,
    )


def keep(plan: Plan, inputs: Inputs) -> None:
    """Copy the parameters, for a base that runs by itself."""
    for kind, programs, chunks, _ in plan.sections:
        passes.keep[(programs * plan.parts,)](
            plan.table,
            chunks,
            inputs.copies[kind.x],
            ALIGNED=kind.is_aligned,
            X_TYPE=_TYPES[kind.x],
            CHUNK=plan.chunk,
            **_SIZES,
        )


def square_proposals(plan: Plan, mechanism: Mechanism, inputs: Inputs) -> None:
    """‖u‖², where it is waited for: before a known base's step, after any other's."""
    if plan.is_known:
        scalar_passes.weigh[(1,)](
            plan.partials,
            plan.total,
            inputs.groups,
            len(plan.bases),
            plan.made,
            inputs.grad_scale,
            inputs.max_norm,
            plan.table,
            inputs.grads,
            len(plan.entries),
            plan.biases,
            GROUPS=triton.next_power_of_2(len(plan.bases)),
            BIASED=bool(plan.steps),
            num_warps=8,
        )
    for kind, programs, chunks, partials in plan.sections:
        passes.square_proposals[(programs,)](
            plan.table,
            inputs.grads,
            chunks,
            partials,
            plan.total,
            inputs.groups,
            plan.made,
            plan.biases,
            mechanism.updates,
            inputs.risen,
            inputs.copies.get(kind.x),
            BASE=kind.base.way,
            SLOTS=len(kind.base.slots),
            ALIGNED=kind.is_aligned,
            EXACT=EXACT,
            X_TYPE=_TYPES[kind.x],
            G_TYPE=_TYPES[kind.grad],
            S_TYPE=_TYPES[kind.slots],
            CHUNK=plan.chunk,
            **_SIZES,
        )


def tune(plan: Plan, mechanism: Mechanism, inputs: Inputs, *, waits: bool) -> None:
    """The tuner's step, and what follows from it for each group."""
    options, state, size = mechanism.options, mechanism.state, len(mechanism.options.betas)
    scalar_passes.tune[(1,)](
        *state,
        mechanism.scale,
        mechanism.share,
        mechanism.signal,
        mechanism.reference_square,
        mechanism.size,
        mechanism.steps,
        mechanism.updates,
        mechanism.skipped,
        mechanism.skipped_in_a_row,
        plan.partials,
        plan.total,
        inputs.groups,
        len(plan.bases),
        plan.made,
        plan.rates,
        plan.verdict,
        inputs.found_inf,
        inputs.grad_scale,
        inputs.max_norm,
        plan.table,
        inputs.grads,
        len(plan.entries),
        plan.biases,
        RULE=write_rule(options, frozen=mechanism.frozen),
        N=size,
        LANES=triton.next_power_of_2(size),
        GROUPS=triton.next_power_of_2(len(plan.bases)),
        SKIPS=options.skip_nonfinite,
        WITH_X=options.s_decay != 0,
        WAITS=waits,
        BIASED=bool(plan.steps),
        num_warps=8,
    )


def update(plan: Plan, inputs: Inputs) -> None:
    """The step of a known base, and Mechanic's."""
    for kind, programs, chunks, _ in plan.sections:
        passes.update[(programs * plan.parts,)](
            plan.table,
            inputs.grads,
            chunks,
            plan.made,
            plan.biases,
            plan.verdict,
            BASE=kind.base.way,
            SLOTS=len(kind.base.slots),
            ALIGNED=kind.is_aligned,
            X_TYPE=_TYPES[kind.x],
            G_TYPE=_TYPES[kind.grad],
            D_TYPE=_TYPES[kind.delta],
            S_TYPE=_TYPES[kind.slots],
            CHUNK=plan.chunk,
            **_SIZES,
        )


def move(plan: Plan, inputs: Inputs) -> None:
    """Mechanic's step, after the base's own."""
    for kind, programs, chunks, _ in plan.sections:
        passes.move[(programs * plan.parts,)](
            plan.table,
            inputs.grads,
            chunks,
            plan.made,
            plan.verdict,
            inputs.copies[kind.x],
            ALIGNED=kind.is_aligned,
            X_TYPE=_TYPES[kind.x],
            D_TYPE=_TYPES[kind.delta],
            CHUNK=plan.chunk,
            **_SIZES,
        )
