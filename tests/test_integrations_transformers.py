"""transformers' Trainer with `MechanicCallback`: what was learned is in its logs and in those of
its loggers, and a run that was interrupted ends as one that was not."""

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from log_files import mlflow_history, tensorboard_scalars, wandb_history, watch

from mechanic.torch import mechanize, optim, tuner

# What the trainers and their dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(256, 10, generator=GENERATOR)
TARGETS = INPUTS @ torch.randn(10, 1, generator=GENERATOR)
DATASET = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]


class Net(torch.nn.Module):
    """A linear model, called as the Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(10, 1)

    def forward(self, inputs, labels=None):
        outputs = self.linear(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


def make_trainer(folder: Path, model: Any, **options: Any):
    """40 steps of 2 batches each, clipped, with a checkpoint and an evaluation after each 20."""
    from transformers import Trainer, TrainingArguments

    from mechanic.integrations.transformers import MechanicCallback

    chosen = ("optimizers", "optimizer_cls_and_kwargs", "train_dataset", "eval_dataset")
    given = {name: options.pop(name) for name in chosen if name in options}
    defaults: dict[str, Any] = {
        "max_steps": 40, "save_strategy": "steps", "save_steps": 20,
        "eval_strategy": "steps", "eval_steps": 20, "logging_steps": 5, "max_grad_norm": 1.0,
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**defaults, **options}),
        callbacks=[MechanicCallback()],
        **{"train_dataset": DATASET, "eval_dataset": DATASET[:16], **given},
    )


def steps_logged(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "learning_rate" in entry]


def make(folder: Path, **options: Any):
    """A trainer of a linear model, and what its optimizer notes."""
    torch.manual_seed(0)
    net = Net()
    optimizer = mechanize(torch.optim.AdamW(net.parameters(), lr=100.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 50)
    noted = watch(optimizer)
    return make_trainer(folder, net, optimizers=(optimizer, scheduler), **options), noted


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from start to end: its folder, its trainer, what was noted and what was printed."""
    folder = tmp_path_factory.mktemp("whole")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer, noted = make(folder, report_to=["tensorboard"], disable_tqdm=False)
        trainer.train()
    return folder, trainer, noted, printed.getvalue()


def test_the_learned_rate_is_in_the_trainers_logs(whole):
    _, trainer, noted, printed = whole
    entries = steps_logged(trainer)
    assert [entry["step"] for entry in entries] == list(range(5, 41, 5))
    beside_the_bar = [
        float(found) for found in re.findall(r"'mechanic/lr/0': '?([^',}]+)", printed)
    ]
    assert beside_the_bar == pytest.approx([e["mechanic/lr/0"] for e in entries], rel=1e-3)
    for entry in entries:
        scale, (rate,) = noted[entry["step"]]
        assert entry["mechanic/scale"] == pytest.approx(scale, rel=1e-6)
        assert entry["mechanic/lr/0"] == entry["learning_rate"] == pytest.approx(rate, rel=1e-6)
    assert entries[-1]["mechanic/scale"] > 2 * entries[0]["mechanic/scale"] > 0
    others = [entry for entry in trainer.state.log_history if "learning_rate" not in entry]
    assert {"eval_loss", "train_loss"} <= set().union(*others)
    assert not any("mechanic/scale" in entry for entry in others)


def test_the_loggers_of_the_trainer_get_it(whole):
    folder, trainer, _, _ = whole
    read = tensorboard_scalars(folder / "runs")
    for name in ("mechanic/scale", "mechanic/lr/0", "learning_rate"):
        told = {entry["step"]: entry[name] for entry in steps_logged(trainer)}
        assert read[f"train/{name}"] == pytest.approx(told, rel=1e-6)


def test_a_resumed_run_is_equal_to_one_that_was_not_interrupted(whole, tmp_path):
    _, trainer, _, _ = whole
    half, _ = make(tmp_path, max_steps=20)
    half.train()
    resumed, _ = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert steps_logged(resumed) == steps_logged(trainer)
    assert all(map(torch.equal, trainer.model.parameters(), resumed.model.parameters()))
    state = json.loads((tmp_path / "checkpoint-40" / "trainer_state.json").read_text("utf-8"))
    assert state["log_history"][0]["mechanic/lr/0"] == steps_logged(trainer)[0]["learning_rate"]


def test_a_class_in_place_of_an_optimizer(tmp_path):
    """The Trainer makes the groups, with and without weight decay, and the schedule by itself."""
    torch.manual_seed(0)
    options = {"lr": 1.0, "mechanic_max_scale": 0.02}
    chosen = (optim.AdamW, options)
    trainer = make_trainer(tmp_path, Net(), optimizer_cls_and_kwargs=chosen, save_strategy="no")
    trainer.train()
    entries = steps_logged(trainer)
    assert {"mechanic/scale", "mechanic/lr/0", "mechanic/lr/1"} <= entries[-1].keys()
    assert max(entry["mechanic/scale"] for entry in entries) == pytest.approx(0.02)
    assert entries[-1]["loss"] < entries[0]["loss"]


def test_a_plain_optimizer_is_refused_and_a_detached_one_is_not(tmp_path):
    from transformers import TrainerCallback

    class Detach(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            if state.global_step == 12:
                tuner(optimizer).detach()

    plain = (torch.optim.AdamW, {"lr": 1e-3})
    with pytest.raises(ValueError, match="AdamW is not mechanized"):
        make_trainer(tmp_path, Net(), optimizer_cls_and_kwargs=plain).train()
    trainer, noted = make(tmp_path, max_steps=20)
    trainer.add_callback(Detach())
    trainer.train()
    entries = steps_logged(trainer)
    assert ["mechanic/scale" in entry for entry in entries] == [True, True, False, False]
    learned = noted[12][0] * 100 * (1 - 19 / 50)  # with transformers 4, of the step after it
    assert entries[-1]["learning_rate"] == pytest.approx(learned, rel=0.04)


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    module = f"mechanic.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for package in (name, f"{name}.pytorch.callbacks", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{module} needs .*pip install .*{name}"):
        importlib.import_module(module)


def language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0))


ROWS = (torch.arange(16) + torch.arange(64)[:, None]) % 32
TEXT = [{"input_ids": row, "labels": row} for row in ROWS]


@pytest.mark.nightly
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_a_language_model_in_bf16_learns_and_resumes(tmp_path, adapted):
    peft = pytest.importorskip("peft") if adapted else None

    def make_language_trainer(folder: str, max_steps: int):
        torch.manual_seed(0)
        model = language_model()
        if peft is not None:
            lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "lm_head"])
            model = peft.get_peft_model(model, lora)
        return make_trainer(
            tmp_path / folder, model, bf16=True, max_steps=max_steps,
            optimizer_cls_and_kwargs=(optim.AdamW, {"lr": 1.0}),
            train_dataset=TEXT, eval_dataset=TEXT[:8], lr_scheduler_type="constant",
        )  # fmt: skip

    whole = make_language_trainer("whole", 40)
    whole.train()
    make_language_trainer("half", 20).train()
    resumed = make_language_trainer("half", 40)
    resumed.train(resume_from_checkpoint=True)

    entries = steps_logged(whole)
    assert entries[-1]["loss"] < 0.9 * entries[0]["loss"]
    assert entries[-1]["mechanic/scale"] > 10 * entries[0]["mechanic/scale"]
    assert [(one["step"], one["mechanic/scale"], one["loss"]) for one in entries] == [
        (one["step"], one["mechanic/scale"], one["loss"]) for one in steps_logged(resumed)
    ]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


@pytest.mark.nightly
def test_weights_and_biases_and_mlflow_get_it_from_the_trainer(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    trainer, _ = make(tmp_path / "run", report_to=["wandb", "mlflow"])
    trainer.train()
    wandb.finish()
    told = {entry["step"]: entry["mechanic/lr/0"] for entry in steps_logged(trainer)}
    assert mlflow_history(uri, "Default", "mechanic/lr/0") == pytest.approx(told)
    read = wandb_history(tmp_path, "train/mechanic/lr/0", "train/global_step")
    assert read == pytest.approx(told)


@pytest.mark.nightly
def test_each_scope_is_in_the_logs(tmp_path):
    torch.manual_seed(0)
    net = Net()
    optimizer = mechanize(torch.optim.AdamW(net.named_parameters(), lr=1.0), scope="tensor")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 50)
    trainer = make_trainer(tmp_path, net, optimizers=(optimizer, scheduler))
    trainer.train()
    names = [f"linear.{name}" for name in ("weight", "bias")]
    for entry in steps_logged(trainer):
        assert all(entry[f"mechanic/scale/{name}"] > 0 for name in names)
        assert entry["learning_rate"] == entry[f"mechanic/lr/{names[0]}"]
    resumed = Net()
    optimizer = mechanize(torch.optim.AdamW(resumed.named_parameters(), lr=1.0), scope="tensor")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 50)
    again = make_trainer(tmp_path, resumed, optimizers=(optimizer, scheduler))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    for a, b in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
