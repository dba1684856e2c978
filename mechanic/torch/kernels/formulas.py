"""What the bases that the kernels compute add to x."""

import triton
import triton.language as tl

from mechanic.torch.kernels.columns import (
    REST_A,
    REST_B,
    USED_A,
    USED_B,
    USED_BASE_LR,
    USED_DECAY,
    USED_EPS,
)


@triton.jit
def propose(x, g, first, second, bias_1, bias_2, coefficients, BASE: tl.constexpr):
    """What a base adds to x at an lr of `USED_BASE_LR`, and its next state."""
    decay, a, rest_a = (
        tl.load(coefficients + USED_DECAY),
        tl.load(coefficients + USED_A),
        tl.load(coefficients + REST_A),
    )
    b, rest_b = tl.load(coefficients + USED_B), tl.load(coefficients + REST_B)
    if (BASE == "adam" or BASE == "sgd") or (BASE == "momentum" or BASE == "nesterov"):
        g += decay * x
    if BASE == "adam" or BASE == "adamw":
        first += rest_a * (g - first)
        second = b * second + rest_b * g * g
        direction = bias_1 * first / (bias_2 * tl.sqrt(second) + tl.load(coefficients + USED_EPS))
        if BASE == "adamw":
            direction += decay * x
    elif BASE == "lion":
        mixed = a * first + rest_a * g
        direction = tl.where(mixed > 0, 1.0, 0.0) - tl.where(mixed < 0, 1.0, 0.0) + decay * x
        first = b * first + rest_b * g
    elif BASE == "sgd":
        direction = g
    else:
        tl.static_assert(BASE == "momentum" or BASE == "nesterov", "the kernel has no such formula")
        first = a * first + rest_b * g
        direction = first
        if BASE == "nesterov":
            direction = g + a * first
    return -tl.load(coefficients + USED_BASE_LR) * direction, first, second
