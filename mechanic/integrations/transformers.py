"""A callback for transformers' Trainer: the learned rate in all that the Trainer logs."""

import gc
from typing import Any

from torch.optim import Optimizer

from mechanic.integrations.logged import PREFIX, metrics
from mechanic.torch.handle import tuner

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "mechanic.integrations.transformers needs transformers with its Trainer: "
        'pip install "transformers[torch]"'
    ) from error


class MechanicCallback(TrainerCallback):
    """Logs the learned scale and the learning rate of each group, wherever the Trainer logs.

    Pass it as `Trainer(..., callbacks=[MechanicCallback()])`. Its numbers are in
    `trainer.state.log_history`, in what is printed with the progress bar, and in what TensorBoard,
    Weights & Biases and every other logger of the Trainer gets. `learning_rate`, which would be the
    one that was typed, becomes the one in force in the first group.

    Examples:
        What becomes of a line of the Trainer's logs, here without a Trainer:

        >>> import torch
        >>> from transformers import TrainerState
        >>> from mechanic.integrations.transformers import MechanicCallback
        >>> from mechanic.torch import mechanize
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = mechanize(torch.optim.SGD([weights], lr=0.25), max_scale=0.5)
        >>> for _ in range(20):
        ...     weights.grad = torch.ones(3)
        ...     optimizer.step()
        >>> logs = {"loss": 1.5, "learning_rate": 0.25}
        >>> MechanicCallback().on_log(None, TrainerState(), None, logs=logs, optimizer=optimizer)
        >>> logs
        {'loss': 1.5, 'learning_rate': 0.125, 'mechanic/scale': 0.5, 'mechanic/lr/0': 0.125}
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check that there is something to log.

        Raises:
            ValueError: if the optimizer is not mechanized.
        """
        tuner(optimizer)
        self._go_first()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add what was learned to the logs of training steps; those of an evaluation stay as they
        are."""
        if logs is None or "learning_rate" not in logs or not _has_tuner(optimizer):
            return
        learned = metrics(optimizer)
        rates = [rate for name, rate in learned.items() if name.startswith(f"{PREFIX}/lr/")]
        learned["learning_rate"] = rates[0]
        logs.update(learned)
        if state.log_history:  # it has had a copy of the logs already
            state.log_history[-1].update(learned)

    def _go_first(self) -> None:
        """Move before the loggers, which read the logs before a user's callbacks are called.

        A callback does not know the list that it is in, so the list is looked for.
        """
        handlers = [o for o in gc.get_objects() if issubclass(type(o), CallbackHandler)]
        for handler in handlers:
            if self in handler.callbacks:
                handler.callbacks.sort(key=lambda callback: callback is not self)


def _has_tuner(optimizer: Optimizer) -> bool:
    """Whether it is mechanized still: a user may detach the tuner within a run."""
    try:
        tuner(optimizer)
    except ValueError:
        return False
    return True
