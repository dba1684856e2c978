"""torch's ZeroRedundancyOptimizer: an optimizer that gives each process some of the parameters.

Each process steps an optimizer of its own for them (`optim`), and it is that one which is tuned,
its sums over all processes. The outer one gathers the state for a checkpoint, and knows its own
groups alone: the tuner is written there when it saves, and taken from there when it has loaded.
"""

from typing import Any

from torch.optim import Optimizer

from mechanic.torch import checkpoint
from mechanic.torch.mechanism import Mechanism


def is_zero(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer; by name, since importing it takes a while."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def check(optimizer: Any) -> None:
    """Refuse what cannot be tuned."""
    if optimizer._overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps each bucket of parameters by "
            "itself, and the scale is one for all. Leave overlap_with_ddp out."
        )


def carry(optimizer: Optimizer, mechanism: Mechanism) -> None:
    """Let the outer optimizer's checkpoints carry the tuner."""

    def publish(_: Optimizer) -> None:
        checkpoint.publish(optimizer, mechanism)

    def check_tuner(_: Optimizer, state_dict: dict[str, Any]) -> None:
        checkpoint.check_tuner(mechanism, checkpoint.tuner_in(state_dict["param_groups"]))

    def load(_: Optimizer) -> None:
        checkpoint.load_tuner(mechanism, checkpoint.tuner_in(optimizer.param_groups))
        mechanism.publish_rates(optimizer)

    optimizer.register_state_dict_pre_hook(publish)
    optimizer.register_load_state_dict_pre_hook(check_tuner)
    optimizer.register_load_state_dict_post_hook(load, prepend=True)
