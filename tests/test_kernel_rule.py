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
from torch import Tensor
from triton import jit, next_power_of_2
from triton import language as tl

from mechanic import tuner as rules
from mechanic.advance import advance
from mechanic.options import Options
from mechanic.torch.kernels.rule import GIVEN, STEP_SUMS, write_rule
from mechanic.torch.scalars import rows_of

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


RULE_OPTIONS = [
    {"preset": preset, **options}
    for preset in ("default", "paper", "mechanic-pytorch", "optax")
    for options in (
        {},
        {"s_init": "relative", "s_decay": 0.0, "betas": (0.9,)},
        {"s_init": 1e-3, "s_decay": 0.1, "betas": (1.0, 0.9, 0.0), "max_scale": 0.5},
        {"s_init": "relative", "betas": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), "max_scale": 3.0},
    )
]


def draw_cases(options: Options, count: int) -> tuple[Tensor, Tensor]:
    """Numbers of any size, among them zeros, and an infinite ‖u‖²: the tuner's, and what a step
    measures."""
    betas, rows = options.betas, rows_of(options)
    draw = torch.Generator().manual_seed(len(betas))

    def numbers(*shape: int) -> Tensor:
        size = 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-3, 3, generator=draw)
        return size * (torch.rand(shape, generator=draw) > 0.2)

    packed = numbers(count, len(rows), len(betas))
    alone = [place for place, name in enumerate(rows) if name not in rules.PER_BETA]
    packed[:, alone] = packed[:, alone, :1]  # one number stands in all columns
    packed[:, rows.index("beta")] = torch.tensor(betas, dtype=torch.float64)
    known_at_once = torch.tensor([name in ("beta", "reference_square", "size") for name in rows])
    packed[::4] *= known_at_once[:, None]  # before the first update there is no state
    measured = numbers(count, len(GIVEN))
    for name in ("dg", "dx"):
        measured[:, GIVEN.index(name)] *= torch.sign(torch.randn(count, generator=draw))
    measured[:, GIVEN.index("share")] += 0.1  # a share is above 0
    measured[1, GIVEN.index("uu")] = torch.inf
    measured[:, GIVEN.index("takes_part")] = (torch.arange(count) % 3 > 0).double()
    return packed, measured


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
