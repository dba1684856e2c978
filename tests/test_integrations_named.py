"""Trainers that take an optimizer by its name: torchtune, torchtitan and kohya's sd-scripts, with
what docs/trainers.md tells their users to write."""

import argparse
import ast
import importlib
import shlex
import sys

import pytest
import torch
from pages import blocks, sections

from mechanic.integrations import metrics
from mechanic.torch import optim, tuner

# What the trainers and their dependencies warn about among themselves is not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.nightly]

STEPS = 60
INPUTS = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :1] * INPUTS[:, 1:2]


def said(heading):
    return blocks(sections("docs/trainers.md")[heading])


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model, optimizer, schedule, steps):
    losses = []
    for _ in range(steps):
        losses.append(torch.nn.functional.mse_loss(model(INPUTS), TARGETS))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [loss.item() for loss in losses]


def test_torchtune_makes_what_its_configuration_names():
    config = pytest.importorskip("torchtune.config", exc_type=ImportError)
    from omegaconf import OmegaConf

    (block,) = said("torchtune")
    given = OmegaConf.create(block.code)
    model = make_model()
    optimizer = config.instantiate(given.optimizer, model.parameters())
    schedule = config.instantiate(given.lr_scheduler, optimizer, num_training_steps=STEPS)
    losses = train(model, optimizer, schedule, STEPS)
    assert type(optimizer) is optim.AdamW
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    assert losses[-1] < 0.8 * losses[0]
    assert metrics(optimizer)["mechanic/scale"] > 1e-3


def test_torchtitan_trains_saves_and_goes_on(tmp_path):
    pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)
    from torch.distributed import checkpoint

    names = {"__name__": "recipe"}
    for block in said("torchtitan"):
        exec(block.code, names)

    def build():
        model = make_model()
        optimizers = names["optimizer"].build(model_parts=[model])
        schedules = names["lr_scheduler"].build(optimizers=optimizers, training_steps=STEPS)
        return model, optimizers, schedules

    model, optimizers, schedules = build()
    (optimizer,) = optimizers
    losses = train(model, optimizers, schedules, STEPS // 2)
    middle = float(schedules.get_metrics()["mechanic/scale"])
    saved = {"model": model.state_dict(), "optimizer": optimizers, "schedule": schedules}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    losses += train(model, optimizers, schedules, STEPS // 2)
    assert type(optimizer) is optim.AdamW
    assert losses[-1] < 0.8 * losses[0]
    assert 0 < middle < float(tuner(optimizer).scale) <= 0.1

    resumed, others, again = build()
    weights = resumed.state_dict()
    saved = {"model": weights, "optimizer": others, "schedule": again}
    checkpoint.load(saved, checkpoint_id=tmp_path)
    resumed.load_state_dict(weights)
    assert float(again.get_metrics()["mechanic/scale"]) == middle
    train(resumed, others, again, STEPS // 2)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    assert tuner(optimizer).scale == tuner(others.optimizers[0]).scale


def flags(command):
    """The flags of a command, as sd-scripts reads them; values of arguments are Python."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer_type")
    parser.add_argument("--optimizer_args", nargs="*", default=[])
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--lr_scheduler")
    parser.add_argument("--lr_scheduler_type")
    parser.add_argument("--lr_scheduler_args", nargs="*", default=[])
    return parser.parse_args(shlex.split(command.replace("\\\n", " "))[3:])


def by_name(path, first, pairs, **others):
    module, name = path.rsplit(".", 1)
    read = dict(pair.split("=") for pair in pairs)
    values = {key: ast.literal_eval(value) for key, value in read.items()}
    return getattr(importlib.import_module(module), name)(first, **others, **values)


def test_the_flags_for_sd_scripts(tmp_path, monkeypatch):
    shown, learned, schedule_flags = said("sd-scripts")
    (tmp_path / learned.title).write_text(learned.code)
    monkeypatch.syspath_prepend(tmp_path)
    given = flags(shown.code)
    model = make_model()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    lr = given.learning_rate
    optimizer = by_name(given.optimizer_type, groups, given.optimizer_args, lr=lr)
    chosen = flags(schedule_flags.code)
    schedule = by_name(chosen.lr_scheduler_type, optimizer, chosen.lr_scheduler_args)
    del sys.modules["learned"]
    early = train(model, optimizer, schedule, 3)
    first = metrics(optimizer)
    losses = train(model, optimizer, schedule, STEPS)
    numbers = metrics(optimizer)
    assert type(optimizer) is optim.AdamW
    assert given.lr_scheduler == "cosine"
    assert losses[-1] < 0.8 * early[0]
    for place, rate in enumerate(schedule.get_last_lr()):
        assert rate == pytest.approx(numbers[f"mechanic/lr/{place}"])
        assert numbers[f"mechanic/scale/{place}"] > 2 * first[f"mechanic/scale/{place}"] > 0
    assert numbers["mechanic/scale/0"] != numbers["mechanic/scale/1"]
