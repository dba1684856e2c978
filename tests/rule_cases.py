"""Options of the rules, and cases to compare a rule in another language with the tuner's on."""

import torch
from torch import Tensor

from mechanic import tuner as rules
from mechanic.options import Options
from mechanic.torch.scalars import rows_of
from mechanic.torch.written import GIVEN

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
