"""The kernels beside the plain path, where something else changes the weights between steps."""

import pytest
import torch
from lockstep import FEW, KNOWN, STEPS, Lock, on_kernels

from mechanic.torch import tuner
from mechanic.torch.edits import are_followed

pytestmark = on_kernels


@pytest.mark.parametrize("base", ["AdamW-fused", "SGD-momentum"])
def test_a_mask(base):
    lock = Lock(KNOWN[base], FEW)
    scales = []
    for _ in range(STEPS):
        lock.step(lock.gradients())
        for side in (lock.fast, lock.plain):
            with torch.no_grad():
                side.params[1][::2] = 0
        scales.append(float(tuner(lock.fast.optimizer).scale))
    assert lock.fast.ran_kernels(known=True)
    assert are_followed(lock.fast.mechanism)
    assert are_followed(lock.plain.mechanism)
    assert max(scales) > 3 * min(scale for scale in scales if scale)
    lock.assert_same()
