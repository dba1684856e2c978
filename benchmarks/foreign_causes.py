"""Why tests of others fail when their optimizers are mechanized, for `foreign_suites.py`."""

from typing import NamedTuple


class Cause(NamedTuple):
    """A reason, and the failures that it explains. The first that fits is taken."""

    reason: str
    suite: str = ""
    """The name of the suite, or any"""
    test: str = ""
    """A regular expression that is found in the name of the test"""
    message: str = ""
    """A regular expression that is found in what pytest says of the failure"""


CAUSES: tuple[Cause, ...] = (
    Cause(
        "the gradients are made infinite after they were unscaled, and the test asks that the "
        "weights become NaN; Mechanic skips such a step",
        suite="GradScaler",
        test="params_invalidated",
    ),
    Cause(
        "gradcheck moves an input by a little and sees the first scale change, which depends on "
        "the sizes of update and weights; in the backward pass the scale is a constant",
        suite="test_optim",
        test="TestDifferentiableOptimizer",
        message="Jacobian mismatch",
    ),
    Cause(
        "a fused step and a loop round an update in half precision differently; at the lr that "
        "Mechanic runs them at, the difference outweighs the tolerance for the typed one",
        suite="test_optim",
        test="fused_matches_forloop_.*float16",
    ),
    Cause(
        "a mock in place of a base's step is called as a function of the class, with the "
        "optimizer, and after the closure was evaluated",
        suite="lightning",
        test="closure_with_different_frequencies",
    ),
    Cause(
        "AdamW decays the weights by default; the first scale makes that visible, where the test "
        "types an lr of 1e-5 to hide it",
        suite="test_optim",
        test="noop_for_zero_grads",
    ),
    Cause(
        "one process plays all ranks, with tensors of a kind that Mechanic does not know "
        "(LocalTensor)",
        suite="DTensor",
        test="WithLocalTensor",
    ),
    Cause(
        "the second rank is a process of its own that this script does not mechanize, so that the "
        "two wait for each other; with both mechanized they train as one does",
        suite="pytorch_optimizer",
        test="test_sharded_updates",
    ),
    Cause(
        "the weights after one or a few steps are compared with the base's formula at the typed "
        "lr; a mechanized run starts with a small scale",
        suite="pytorch_optimizer",
        message="(Tensor-likes|Scalars) are not (close|equal)|assert tensor",
    ),
)
