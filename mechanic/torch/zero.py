"""torch's ZeroRedundancyOptimizer: an optimizer that gives each process some of the parameters.

Each process steps an optimizer of its own for them (`optim`), and it is that one which is tuned,
its sums over all processes. The outer one gathers the state for a checkpoint, and knows its own
groups alone: the tuner is written there when it saves, and taken from there when it has loaded.
"""

from typing import Any

from torch.optim import Optimizer

from mechanic.options import Options
from mechanic.torch import checkpoint
from mechanic.torch.mechanism import Mechanism
from mechanic.torch.rates import publish_rates


def is_zero(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer; by name, since importing it takes a while."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def check(optimizer: Any, options: Options) -> None:
    """Refuse what cannot be tuned."""
    if options.scope != "all":
        raise ValueError(
            f"scope={options.scope!r} is not possible with ZeroRedundancyOptimizer: each process "
            "knows some of the parameters alone. Leave it out."
        )
    if optimizer._overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps each bucket of parameters by "
            "itself, and the scale is one for all. Leave overlap_with_ddp out."
        )


class Carrier:
    """Lets the outer optimizer's checkpoints carry the tuner, until it is let go."""

    def __init__(self, optimizer: Optimizer, mechanism: Mechanism) -> None:
        self.optimizer, self._mechanism = optimizer, mechanism
        self._handles = (
            optimizer.register_state_dict_pre_hook(self._publish),
            optimizer.register_load_state_dict_pre_hook(self._check),
            optimizer.register_load_state_dict_post_hook(self._load, prepend=True),
        )

    def let_go(self) -> None:
        """The tuner is gone."""
        for handle in self._handles:
            handle.remove()
        checkpoint.strip(self.optimizer)

    def _publish(self, _: Optimizer) -> None:
        checkpoint.publish(self.optimizer, self._mechanism)

    def _check(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        checkpoint.check_tuner(self._mechanism, checkpoint.tuner_in(state_dict["param_groups"]))

    def _load(self, _: Optimizer) -> None:
        saved = checkpoint.tuner_in(self.optimizer.param_groups)
        checkpoint.load_tuner(self._mechanism, saved)
        publish_rates(self._mechanism.scale, self.optimizer.param_groups)
