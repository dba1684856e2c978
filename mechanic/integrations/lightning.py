"""A callback for Lightning: the learned rate in all that its loggers get."""

import sys
from typing import Any

from mechanic.integrations.logged import PREFIX, tensors
from mechanic.torch.attach import is_mechanized
from mechanic.torch.rates import EFFECTIVE_LR

# A script that has imported `pytorch_lightning`, and not `lightning`, trains with the former, whose
# Trainer takes callbacks of its own package alone before version 2.6.1.
try:
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        raise ImportError
    from lightning.pytorch.callbacks import LearningRateMonitor
except ImportError:
    try:
        from pytorch_lightning.callbacks import LearningRateMonitor  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            "mechanic.integrations.lightning needs Lightning: pip install lightning"
        ) from error


class MechanicCallback(LearningRateMonitor):
    """Logs the learned scale and the learning rate of each group, and takes the place of
    `LearningRateMonitor`, whose names (`lr-AdamW`) then show the rate in force.

    Pass it as `Trainer(..., callbacks=[MechanicCallback()])`. The arguments are those of
    `LearningRateMonitor`. With several mechanized optimizers, the names have the place of the
    optimizer in them: `mechanic/0/scale`, `mechanic/1/scale`.

    Args:
        progress_bar: whether the learning rates are shown in the progress bar, too.
        arguments: for `LearningRateMonitor`.

    Examples:
        >>> import lightning, torch, warnings
        >>> from mechanic.integrations.lightning import MechanicCallback
        >>> from mechanic.torch import mechanize
        >>> warnings.simplefilter("ignore")  # Lightning has some of its own
        >>> class Net(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weights = torch.nn.Parameter(torch.ones(3))
        ...     def training_step(self, batch, place):
        ...         return self.weights.sum()
        ...     def configure_optimizers(self):
        ...         return mechanize(torch.optim.SGD([self.weights], lr=0.25), max_scale=0.5)
        >>> unused = ["logger", "enable_checkpointing"]
        >>> unused += ["enable_model_summary", "enable_progress_bar"]
        >>> options = {"max_steps": 20, "log_every_n_steps": 1, "accelerator": "cpu"}
        >>> options |= dict.fromkeys(unused, False)
        >>> trainer = lightning.Trainer(callbacks=[MechanicCallback()], **options)
        >>> trainer.fit(Net(), torch.utils.data.DataLoader(range(20)))
        >>> {name: float(value) for name, value in trainer.callback_metrics.items()}
        {'lr-SGD': 0.125, 'mechanic/scale': 0.5, 'mechanic/lr/0': 0.125}
    """

    def __init__(self, *, progress_bar: bool = True, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.progress_bar = progress_bar

    def on_train_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Check that there is something to log.

        Raises:
            ValueError: if no optimizer is mechanized, or a `LearningRateMonitor` logs the typed
                learning rates under the same names.
        """
        if not any(is_mechanized(optimizer) for optimizer in trainer.optimizers):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise ValueError(
                f"none of the optimizers is mechanized, so there is nothing to log: {found or 'no'}"
                " optimizer. Return mechanize(optimizer) from configure_optimizers."
            )
        if any(_is_monitor(other) for other in trainer.callbacks if other is not self):
            raise ValueError(
                "LearningRateMonitor would log the learning rates that were typed under the names "
                "of those in force. Leave it out: MechanicCallback takes its place."
            )
        if trainer.loggers:
            super().on_train_start(trainer, *args, **kwargs)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was learned, as a module logs its loss."""
        mechanized = [one for one in trainer.optimizers if is_mechanized(one)]
        for place, optimizer in enumerate(mechanized):
            prefix = PREFIX if len(mechanized) == 1 else f"{PREFIX}/{place}"
            for name, value in tensors(optimizer, prefix).items():
                is_rate = name.startswith(f"{prefix}/lr/")
                pl_module.log(name, value, prog_bar=self.progress_bar and is_rate)

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, Any]:
        if EFFECTIVE_LR in param_group:
            param_group = {**param_group, "lr": float(param_group[EFFECTIVE_LR])}
        return super()._extract_lr(param_group, name)


def _is_monitor(callback: object) -> bool:
    """Also one of the other package: `lightning` and `pytorch_lightning` have a class each."""
    return any(cls.__name__ == "LearningRateMonitor" for cls in type(callback).__mro__)
