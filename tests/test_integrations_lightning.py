"""Lightning with `MechanicCallback`: what was learned is in the logs, also where
LearningRateMonitor's readers look, and a run that was interrupted ends as one that was not."""

import csv
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from log_files import tensorboard_scalars, watch
from torch.utils.data import DataLoader, TensorDataset

from mechanic.torch import mechanize, optim, tuner

# What the trainers and their dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from mechanic.integrations.lightning import MechanicCallback

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(256, 10, generator=GENERATOR)
TARGETS = INPUTS @ torch.randn(10, 1, generator=GENERATOR)


def loss_of(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return torch.nn.functional.mse_loss(net(inputs), targets)


def automatic(package: Any) -> type[Any]:
    """Two named groups, and a schedule that is stepped with the optimizer, as a module of either
    package of Lightning."""

    class Automatic(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(10, 1)
            self.noted: dict[int, tuple[float, list[float]]] = {}

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            groups = [
                {"params": [self.net.weight], "name": "weight"},
                {"params": [self.net.bias], "lr": 10.0, "name": "bias"},
            ]
            optimizer = mechanize(torch.optim.AdamW(groups, lr=100.0))
            self.noted = watch(optimizer)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 50)
            schedule = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Automatic


Automatic = automatic(lightning)


class Manual(lightning.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(10, 1), torch.nn.Linear(10, 1)
        self.noted: list[dict[int, tuple[float, list[float]]]] = []

    def training_step(self, batch, _):
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss_of(net, batch))
            optimizer.step()

    def configure_optimizers(self):
        made = [
            mechanize(torch.optim.AdamW(self.first.parameters(), lr=1.0)),
            mechanize(torch.optim.SGD(self.second.parameters(), lr=1.0, momentum=0.9)),
        ]
        self.noted = [watch(optimizer) for optimizer in made]
        return made


def fit(module: Any, folder: Path, epochs: int, checkpoint=None, package=lightning, **options):
    trainer = package.Trainer(
        **{
            "max_epochs": epochs, "accelerator": "cpu", "default_root_dir": folder,
            "enable_progress_bar": False, "enable_model_summary": False,
            "enable_checkpointing": False, "log_every_n_steps": 1,
            "callbacks": [MechanicCallback()], "logger": CSVLogger(folder), **options,
        }
    )  # fmt: skip
    batches = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=32)
    trainer.fit(module, batches, ckpt_path=checkpoint)
    return trainer


def fresh(kind: type[Any] = Automatic) -> Any:
    torch.manual_seed(0)
    return kind()


def columns(folder: Path) -> dict[str, list[float]]:
    """What is in a CSVLogger's file, by name, in the order of the steps."""
    (file,) = folder.rglob("metrics.csv")
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    module = fresh()
    loggers = [CSVLogger(folder), TensorBoardLogger(folder)]
    trainer = fit(module, folder, 8, logger=loggers, **ACCUMULATED)
    return folder, module, trainer


def test_the_loggers_get_the_learned_rates(whole):
    folder, module, trainer = whole
    read, events = columns(folder / "lightning_logs" / "version_0"), tensorboard_scalars(folder)
    scales = [scale for scale, _ in module.noted.values()]
    assert len(scales) == 32
    assert scales[-1] > 2 * scales[2] > 0
    for name, expected in {
        "mechanic/scale": scales,
        "mechanic/lr/weight": [rates[0] for _, rates in module.noted.values()],
        "mechanic/lr/bias": [rates[1] for _, rates in module.noted.values()],
    }.items():
        assert read[name] == pytest.approx(expected, rel=1e-6)  # one row a step
        assert list(events[name].values()) == pytest.approx(expected, rel=1e-6)
        assert float(trainer.callback_metrics[name]) == pytest.approx(expected[-1], rel=1e-6)
    assert "mechanic/lr/weight" in trainer.progress_bar_metrics


def test_the_names_of_learning_rate_monitor_show_the_rates_in_force(whole):
    """The monitor writes as a batch starts: the rate of the step before it."""
    folder, module, _ = whole
    for place, group in enumerate(("weight", "bias")):
        events = tensorboard_scalars(folder)[f"lr-AdamW/{group}"]
        expected = [0.0, *(rates[place] for _, rates in module.noted.values())][: len(events)]
        assert len(events) == 32
        assert list(events.values()) == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_is_equal_to_one_that_was_not_interrupted(whole, tmp_path):
    folder, module, _ = whole
    half = fit(fresh(), tmp_path / "half", 4, **ACCUMULATED)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fresh()
    fit(resumed, tmp_path / "rest", 8, tmp_path / "half.ckpt", **ACCUMULATED)
    assert all(map(torch.equal, module.parameters(), resumed.parameters()))
    expected = columns(folder / "lightning_logs" / "version_0")["mechanic/lr/weight"]
    parts = [columns(tmp_path / part)["mechanic/lr/weight"] for part in ("half", "rest")]
    assert [len(part) for part in parts] == [16, 16]
    assert parts[0] + parts[1] == expected


def test_manual_optimization_with_two_optimizers(tmp_path):
    module = fresh(Manual)
    fit(module, tmp_path, 4)
    read = columns(tmp_path)
    for place, noted in enumerate(module.noted):
        scales = [scale for scale, _ in noted.values()]
        assert len(scales) == 32
        assert scales[-1] > 2 * scales[2] > 0
        assert read[f"mechanic/{place}/scale"] == pytest.approx(scales, rel=1e-6)
        assert read[f"mechanic/{place}/lr/0"] == pytest.approx(scales, rel=1e-6)


def test_what_cannot_be_logged_is_refused(tmp_path):
    class Plain(Automatic):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(ValueError, match=r"none of the optimizers is mechanized.*: AdamW"):
        fit(fresh(Plain), tmp_path, 1)
    monitors = [MechanicCallback(), lightning.pytorch.callbacks.LearningRateMonitor()]
    with pytest.raises(ValueError, match="Leave it out: MechanicCallback takes its place"):
        fit(fresh(), tmp_path, 1, callbacks=monitors)


def test_without_a_logger_the_rate_is_in_the_progress_bar(tmp_path):
    trainer = fit(fresh(), tmp_path, 1, logger=False)
    assert trainer.progress_bar_metrics["mechanic/lr/weight"] > 0
    hidden = fit(fresh(), tmp_path, 1, callbacks=[MechanicCallback(progress_bar=False)])
    assert "mechanic/lr/weight" not in hidden.progress_bar_metrics
    assert float(hidden.callback_metrics["mechanic/lr/weight"]) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_plugins(tmp_path, precision):
    whole = fresh()
    fit(whole, tmp_path / "whole", 6, precision=precision)
    half = fit(fresh(), tmp_path / "half", 3, precision=precision)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fresh()
    fit(resumed, tmp_path / "rest", 6, tmp_path / "half.ckpt", precision=precision)
    scales = columns(tmp_path / "whole")["mechanic/scale"]
    assert scales[-1] > 2 * scales[2] > 0
    assert scales[24:] == columns(tmp_path / "rest")["mechanic/scale"]
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


@pytest.mark.nightly
@pytest.mark.parametrize("imported", ["alone", "with lightning"])
def test_the_other_package_of_lightning(tmp_path, monkeypatch, imported):
    """`pytorch_lightning` has classes of its own. A script that imports it alone gets a callback
    of its own; with both packages it is the callback of `lightning`."""
    other = pytest.importorskip("pytorch_lightning")
    if imported == "alone":
        for name in ("lightning.pytorch", "mechanic.integrations.lightning"):
            monkeypatch.delitem(sys.modules, name)
    elif version(other) < (2, 6, 1):
        pytest.skip("its Trainer refuses callbacks of the other package")
    callback = importlib.import_module("mechanic.integrations.lightning").MechanicCallback
    package = other if imported == "alone" else lightning.pytorch
    assert issubclass(callback, package.callbacks.LearningRateMonitor)
    module = fresh(automatic(other))
    logger = other.loggers.CSVLogger(tmp_path)
    fit(module, tmp_path, 3, package=other, logger=logger, callbacks=[callback()])
    scales = [scale for scale, _ in module.noted.values()]
    assert columns(tmp_path)["mechanic/scale"] == pytest.approx(scales, rel=1e-6)


def version(package: Any) -> tuple[int, ...]:
    return tuple(map(int, package.__version__.split(".")[:3]))


@pytest.mark.nightly
def test_the_command_line_takes_a_class_by_its_name(tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(10, 1)

        def training_step(self, batch, _):
            return loss_of(self.net, batch)

        def train_dataloader(self):
            return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=32)

    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
        fit:
          trainer: {{max_epochs: 5, accelerator: cpu, default_root_dir: {tmp_path}, logger: false}}
          optimizer:
            class_path: mechanic.torch.optim.AdamW
            init_args: {{lr: 1.0, mechanic_max_scale: 0.01}}
        """,
        encoding="utf-8",
    )
    cli = LightningCLI(Module, args=["--config", str(config), "fit"], save_config_callback=None)
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is optim.AdamW
    assert float(tuner(optimizer).scale) == pytest.approx(0.01)
