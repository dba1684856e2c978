"""The rule that is written for the kernels, against the tuner's."""

import inspect

import pytest
import torch
from lockstep import (
    DEVICE,
    ON_GPU,
    assert_near,
    on_kernels,
)
from rule_cases import RULE_OPTIONS, draw_cases
from triton import jit, next_power_of_2
from triton import language as tl

from mechanic import tuner as rules
from mechanic.advance import advance
from mechanic.options import Options
from mechanic.torch.kernels.rule import write_rule
from mechanic.torch.scalars import rows_of
from mechanic.torch.written import GIVEN, STEP_SUMS

pytestmark = on_kernels


@jit
def apply_rule(
    packed, measured, made,
    RULE: tl.constexpr, SIZE: tl.constexpr, GIVEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The rule on one case: the tuner's numbers, which it writes anew, and what a step measures."""
    packed += tl.program_id(0) * SIZE
    given = measured + tl.program_id(0) * GIVEN
    scale, share, x_per_stored, kept = RULE(
        packed, tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3),
        tl.load(given + 4), tl.load(given + 5), tl.load(given + 6), tl.load(given + 7) != 0.0,
        tl.load(given + 8), tl.arange(0, LANES),
    )  # fmt: skip
    made += tl.program_id(0) * 4
    tl.store(made, scale)
    tl.store(made + 1, share)
    tl.store(made + 2, x_per_stored)
    tl.store(made + 3, kept)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", RULE_OPTIONS, ids=str)
def test_the_rule_is_the_tuners(options, frozen):
    options = Options(**options)
    n, count, rows = len(options.betas), 200 if ON_GPU else 6, rows_of(options)
    packed, measured = draw_cases(options, count)
    written = packed.to(DEVICE, copy=True)
    made = torch.zeros(count, 4, dtype=torch.float64, device=DEVICE)
    rule = write_rule(options, frozen=frozen)
    sizes = len(rows) * n, len(GIVEN), next_power_of_2(n)
    apply_rule[(count,)](written, measured.to(DEVICE), made, rule, *sizes)
    cases = zip(packed, measured, written.cpu(), made.cpu(), strict=True)
    for had, given, now, (scale, share, x_per_stored, kept) in cases:
        before = {
            name: row if name in rules.PER_BETA else row[0]
            for name, row in zip(rows, had, strict=True)
        }
        step = dict(zip(GIVEN, given, strict=True))
        kind = rules.state_type(options)
        state = kind(*(before[name] for name in kind._fields))
        sums = rules.Sums(
            **{name: step[name] for name in STEP_SUMS},
            x1=before["reference_square"],
            d=before["size"],
        )
        part = step["takes_part"] != 0
        after, next_share, own_kept = advance(
            options, state, step["share"], sums, part, frozen=frozen
        )
        expected = before | after._asdict() | {"share": next_share}
        if part:
            scale_after, lr = after.s.sum(), step["lr"]
            expected |= {
                "scale": scale_after,
                "signal": sums.dg,
                "typed_total": before["typed_total"] + lr,
                "applied_total": before["applied_total"] + lr * scale_after,
            }
        for name, row in zip(rows, now, strict=True):
            assert_near(expected[name].expand(n), row, 1e-9, name)
        assert_near(expected["scale"], scale, 1e-9, "scale")
        assert_near(next_share, share, 1e-9, "share")
        assert float(own_kept) == float(kept)
        terms = expected["scale"] * next_share, before["scale"] * step["share"]
        assert abs((terms[0] - terms[1]) * kept - x_per_stored) <= 1e-9 * max(terms)


def test_a_number_of_state_that_a_rule_adds_is_loaded_and_stored():
    source = inspect.getsource(write_rule(Options(), frozen=False).fn)
    for place, name in enumerate(rows_of(Options())):
        assert f"tl.load(packed + {place}" in source, name
        is_written = name not in ("reference_square", "size")  # they are written by the host alone
        assert (f"tl.store(packed + {place} " in source) is is_written, name
