"""The recipes of docs/trainers.md run as they are printed, and log what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from log_files import mlflow_history, tensorboard_scalars, wandb_history
from torch.utils.data import DataLoader, TensorDataset

from mechanic.integrations import metrics
from mechanic.torch import mechanize, tuner

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.nightly,
    pytest.mark.usefixtures("compiled_steps"),  # which a reader has, too
]

PAGE = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text("utf-8")
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(128, 10, generator=GENERATOR)
TARGETS = INPUTS @ torch.randn(10, 1, generator=GENERATOR)


class Net(torch.nn.Linear):
    """A linear model, which the Trainer can call, too."""

    def forward(self, inputs, labels=None):
        outputs = super().forward(inputs)
        if labels is None:
            return outputs
        return {"loss": torch.nn.functional.mse_loss(outputs, labels)}


def run(heading: str, place: int = 0, **names: Any) -> dict[str, Any]:
    """Run a block of code below a heading, as a script whose earlier lines have set some names."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[place]
    exec(code, names)
    return names


@pytest.fixture
def setting(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    pairs = TensorDataset(INPUTS, TARGETS)
    rows = [{"inputs": x, "labels": y} for x, y in pairs]
    loader = DataLoader(pairs, batch_size=4)
    return {"torch": torch, "model": Net(10, 1), "dataset": rows, "loader": loader}


@pytest.fixture
def trained() -> torch.optim.Optimizer:
    weights = torch.nn.Parameter(torch.zeros(50))
    optimizer = mechanize(torch.optim.AdamW([weights], lr=1.0))
    for _ in range(20):
        weights.grad = weights.detach() - 1
        optimizer.step()
    return optimizer


def test_transformers(setting, tmp_path):
    trainer = run("transformers", **setting)["trainer"]
    read = tensorboard_scalars(tmp_path / "out")["train/mechanic/lr/1"]
    assert list(read) == list(range(5, 41, 5))
    assert read[40] == pytest.approx(trainer.state.log_history[-2]["mechanic/lr/1"])
    assert read[20] > 10 * read[5] > 0


def test_lightning(setting):
    trainer = run("Lightning", **setting)["trainer"]
    learned = metrics(trainer.optimizers[0])
    assert trainer.global_step == 128
    for name in ("mechanic/scale", "mechanic/lr/0"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(learned[name]) != 0


def test_accelerate(setting, tmp_path):
    optimizer = run("accelerate", **setting)["optimizer"]
    read = tensorboard_scalars(tmp_path / "out")["mechanic/scale"]
    assert len(read) == 32
    assert read[31] == pytest.approx(float(tuner(optimizer).scale))
    assert read[31] > 10 * read[4] > 0
    assert (tmp_path / "out" / "state").is_dir()


@pytest.mark.parametrize("place", range(3), ids=["tensorboard", "wandb", "mlflow"])
def test_loggers(place, setting, trained, tmp_path, monkeypatch):
    pytest.importorskip(("tensorboard", "wandb", "mlflow")[place])
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run("Loggers", place, optimizer=trained, step=20)
    for name, value in metrics(trained).items():
        read = [
            lambda name=name: tensorboard_scalars(tmp_path)[name],
            lambda name=name: wandb_history(tmp_path, name),
            lambda name=name: mlflow_history(uri, "Default", name),
        ][place]()
        assert read == {20: pytest.approx(value)}


def test_a_class_by_its_name(setting):
    optimizer = run("A class by its name", **setting)["optimizer"]
    assert optimizer._options.max_scale == 0.1
