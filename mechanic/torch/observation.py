"""Gradients that the tuner learns from in place of a step's own: those of a held-out batch."""

import math

import torch

from mechanic.torch import edits, sharding
from mechanic.torch.call import Call
from mechanic.torch.measure import measure_gradients
from mechanic.torch.plain import clip_factor, prepare
from mechanic.torch.scalars import Observed


def observe(call: Call) -> None:
    """Measure the gradients that the parameters have now, for the tuner to learn from in the next
    step. The scale is held in all other steps."""
    edits.settle(call.optimizer, call.mechanism)
    ready = prepare(call)
    if ready is None:
        raise ValueError(
            "observe() found no gradient in any parameter of the optimizer. Call backward() on the "
            "loss of the held-out batch first."
        )
    with torch.no_grad():
        own = measure_gradients(call.optimizer, ready)
        dg, gg, all_gg = sharding.begin_sums(ready.ranks, own)()
        if ready.options.max_grad_norm < math.inf:
            factor = clip_factor(ready, all_gg)
            dg, gg = dg * factor, gg * factor**2
    call.mechanism.scalars.observed = Observed(dg, gg)
    call.mechanism.frozen = True
