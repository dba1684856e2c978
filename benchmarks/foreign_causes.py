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
        "the test asks that sparse and dense gradients give the same weights over 1,800 steps; the "
        "sparse ones are summed from two parts and round differently, and the learned lr steps "
        "across the valley, which enlarges a rounding. Two dense runs of which one gradient was "
        "rounded otherwise end as far apart (1e-2 with Adagrad), and in float64 sparse and dense "
        "agree to 3e-7",
        suite="test_optim",
        test="test_rosenbrock_sparse_.*_Adagrad",
        message="not close",
    ),
    Cause(
        "as with Adagrad, for SGD: in float64 sparse and dense agree to 2e-7, where steps 130 to "
        "175 enlarge a difference of 1e-15 to 4e-8; in float32 they are 1.1e-5 apart, and 5e-6 are "
        "allowed",
        suite="test_optim",
        test="test_rosenbrock_sparse_.*_SGD",
        message="not close",
    ),
    Cause(
        "the second process has not started within the 30 s that the test waits for it; on a busy "
        "machine it fails so without Mechanic, too",
        suite="pytorch_optimizer",
        message="RuntimeError: Wait timeout",
    ),
    Cause(
        "LOMO and AdaLOMO move the weights in the backward pass, where there is no step to tune; "
        "Mechanic refuses them, and says so",
        suite="pytorch_optimizer",
        message="moves the weights in the backward pass",
    ),
    Cause(
        "the base learns an lr itself, and the loss is to fall by a third in 5 to 30 steps while "
        "both learn",
        suite="pytorch_optimizer",
        test="dadapt|prodigy",
        message="Loss did not decrease enough",
    ),
    Cause(
        "a base with a schedule and a look-ahead of its own, whose loss is to fall by a third or a "
        "half in the 5 to 125 steps of that schedule",
        suite="pytorch_optimizer",
        test="ranger",
        message="Loss did not decrease enough",
    ),
    Cause(
        "the loss is to fall by a third or more in a few steps, 5 in most tests and at most 20, at "
        "an lr that was chosen for that; a mechanized run starts with a small scale",
        suite="pytorch_optimizer",
        message=r"Loss did not decrease enough|assert [\d.]+ > \([\d.]+ \*",
    ),
    Cause(
        "the weights after one or a few steps are compared with the base's formula at the typed "
        "lr; a mechanized run starts with a small scale",
        suite="pytorch_optimizer",
        message="(Tensor-likes|Scalars) are not (close|equal)|assert tensor",
    ),
)
