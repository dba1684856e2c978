"""`metrics`: the same names in every logger, read back from the logger's own files."""

import math
from typing import Any

import pytest
import torch
from log_files import mlflow_history, tensorboard_scalars, wandb_history, watch

from mechanic.integrations import metrics
from mechanic.torch import mechanize

# What the loggers and their dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randn(2, 50, generator=GENERATOR)


def train(log: Any, steps: int = 30) -> dict[str, dict[int, float]]:
    """Log each step of a small run with two groups and a schedule; returns what was to be logged,
    as the optimizer's own hook has noted it."""
    first, second = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    groups = [{"params": [first], "name": "body"}, {"params": [second], "lr": 0.1}]
    optimizer = mechanize(torch.optim.AdamW(groups, lr=10.0))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=steps)
    noted = watch(optimizer)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        ((torch.stack([first, second]) - TARGET) ** 2).sum().backward()
        optimizer.step()
        scheduler.step()  # the rates to log are those of the step before it
        log(metrics(optimizer), step)
    assert noted[steps][0] > 2 * noted[2][0] > 0
    return {
        "mechanic/scale": {step: scale for step, (scale, _) in noted.items()},
        "mechanic/lr/body": {step: rates[0] for step, (_, rates) in noted.items()},
        "mechanic/lr/1": {step: rates[1] for step, (_, rates) in noted.items()},
    }


def assert_same(read: dict[int, float], noted: dict[int, float]) -> None:
    assert read == pytest.approx(noted, rel=1e-6)
    assert len(read) == 30


def test_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    def log(found: dict[str, float], step: int) -> None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(tmp_path) as writer:
        noted = train(log)
    read = tensorboard_scalars(tmp_path)
    assert read.keys() == noted.keys()
    for name in noted:
        assert_same(read[name], noted[name])


@pytest.mark.nightly
def test_weights_and_biases(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        noted = train(lambda found, step: run.log(found, step=step))
    for name in noted:
        assert_same(wandb_history(tmp_path, name), noted[name])


@pytest.mark.nightly
@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_mlflow(tmp_path, store, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path = tmp_path / "mlflow"
    uri = f"sqlite:///{path}.db" if store == "sqlite" else path.as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tiny")
    with mlflow.start_run():
        noted = train(lambda found, step: mlflow.log_metrics(found, step=step))
    for name in noted:
        assert_same(mlflow_history(uri, "tiny", name), noted[name])


def test_a_plain_optimizer_and_two_groups_of_one_name_are_refused():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    with pytest.raises(ValueError, match="AdamW is not mechanized"):
        metrics(torch.optim.AdamW(weights))
    groups = [{"params": [one], "name": "same"} for one in weights]
    with pytest.raises(ValueError, match=r"names same, same.*a name of its own"):
        metrics(mechanize(torch.optim.AdamW(groups)))


def test_a_group_that_is_added_and_a_prefix():
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.SGD([weights], lr=1.0, momentum=0.9))
    for _ in range(20):
        weights.grad = weights.detach() - 2
        optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.25})
    found = metrics(optimizer, prefix="generator")
    assert list(found) == ["generator/scale", "generator/lr/0", "generator/lr/1"]
    assert all(map(math.isfinite, found.values()))
    assert found["generator/lr/1"] == pytest.approx(found["generator/scale"] / 4)
