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
        "the stored displacement, which is 65,536 times an update, is compared with an absolute "
        "tolerance",
        message="mechanic_displacement",
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
        "a mock in place of a base's step is asked whether it is `hooked` and records the "
        "question as a call",
        message=r"call\.hooked\.",
    ),
    Cause(
        "processes of the test wait for each other longer than it allows",
        message="Wait timeout",
    ),
    Cause(
        "the weights after one or a few steps are compared with the base's formula at the typed "
        "lr; a mechanized run starts with a small scale",
        suite="pytorch_optimizer",
        message="(Tensor-likes|Scalars) are not (close|equal)|assert tensor",
    ),
)
