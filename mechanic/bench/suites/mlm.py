"""Masked language modelling: a BERT that reads words, without next-sentence prediction."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data
from mechanic.bench.suites import corpus
from mechanic.bench.suites.shared import bfloat16, not_installed
from mechanic.bench.task import Budget, Problem, Setting, Task, half_decades, linear


@dataclass(frozen=True)
class Size:
    """Of the model and of the run."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int
    steps: int
    evaluated: int
    """Stretches of the train and of the validation text, each."""


SIZES: dict[Budget, Size] = {
    "smoke": Size(2, 32, 512, length=32, batch=16, steps=8, evaluated=16),
    "short": Size(4, 256, 8192, length=128, batch=128, steps=600, evaluated=512),
    # BERT-base. The paper's batch is 2,000, more than one GPU holds.
    "full": Size(12, 768, 32768, length=128, batch=256, steps=150_000, evaluated=2048),
}
HEAD = 64  # width of an attention head
MASKED = 0.15  # of the words, as in BERT
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
}
GRIDS = {"adamw": half_decades(-5, -1), "lion": half_decades(-6, -2)}


def tasks(data: Data) -> list[Task]:
    """One, on the corpus asked for."""
    name = data.corpus_name()
    return [
        Task(
            "mlm",
            f"bert-{name}",
            GRIDS,
            build,
            "test_accuracy",
            f"BERT on the words of {name}; linear with 5 % warm-up, clip 1",
            ("text", name),
            missing(data),
        )
    ]


def missing(data: Data) -> str:
    """Why there can be no BERT here."""
    return data.missing("text", data.corpus_name()) or not_installed("transformers")


def build(
    setting: Setting, batch: float = 1.0, width: float = 1.0, dropout: float = 0.0
) -> Problem:
    """The batch and the width are given as parts of the usual ones."""
    size = SIZES[setting.budget]
    size = replace(size, batch=round(batch * size.batch), width=round(width * size.width))
    most = corpus.MOST[setting.budget]
    tokens = corpus.of_words(setting.data, most, size.vocabulary, setting.device)
    torch.manual_seed(setting.seed)
    model = _bert(size, tokens.vocabulary, dropout).to(setting.device)
    samples = {
        name: _masked(
            corpus.spread_windows(part, size.length, size.evaluated),
            tokens.vocabulary,
            torch.Generator(setting.device).manual_seed(0),
        )
        for name, part in (("train", tokens.train), ("test", tokens.valid))
    }
    return Problem(
        model,
        batches=_batches(tokens, size, setting.seed),
        loss=lambda masked: cross_entropy(_guesses(model, masked), masked.words.flatten()),
        evaluate=partial(_evaluate, model, samples),
        steps=size.steps,
        schedule=linear(0.05),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=True,
    )


def _bert(size: Size, vocabulary: int, dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // HEAD),
        max_position_embeddings=size.length,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)  # type: ignore[no-untyped-call]


class Masked(NamedTuple):
    """A batch of stretches of text with gaps."""

    inputs: Tensor
    places: Tensor
    """Where the gaps are."""
    words: Tensor
    """What was there."""


def _batches(tokens: corpus.Tokens, size: Size, seed: int) -> Iterator[Masked]:
    generator = torch.Generator(tokens.train.device).manual_seed(seed)
    for windows in corpus.random_windows(tokens.train, size.length, size.batch, seed):
        yield _masked(windows, tokens.vocabulary, generator)


def _masked(windows: Tensor, vocabulary: int, generator: torch.Generator) -> Masked:
    """The same number in each stretch, so that shapes are known without asking the device."""
    device, count = windows.device, round(MASKED * windows.shape[1])
    chance = torch.rand(windows.shape, generator=generator, device=device)
    places = chance.topk(count, dim=1).indices
    words = windows.gather(1, places)
    # BERT's: of ten gaps eight show the mask, one shows any word, one the right word.
    any_word = torch.randint(
        len(corpus.SPECIAL), vocabulary, words.shape, generator=generator, device=device
    )
    chance = torch.rand(words.shape, generator=generator, device=device)
    shown = torch.where(chance < 0.9, any_word, words).masked_fill(chance < 0.8, corpus.MASK)
    return Masked(windows.scatter(1, places, shown), places, words)


def _guesses(model: Any, masked: Masked) -> Tensor:
    """Logits at the gaps; at the other places they would cost the most and serve nothing."""
    hidden: Tensor = model.bert(masked.inputs).last_hidden_state
    index = masked.places[..., None].expand(-1, -1, hidden.shape[-1])
    logits: Tensor = model.cls(hidden.gather(1, index))
    return logits.flatten(0, 1).float()


def _evaluate(model: Any, samples: Mapping[str, Masked]) -> dict[str, float]:
    metrics = {}
    for name, masked in samples.items():
        with bfloat16(masked.inputs.device):
            parts = zip(*(torch.split(part, 128) for part in masked), strict=True)
            logits = torch.cat([_guesses(model, Masked(*part)) for part in parts])
        words = masked.words.flatten()
        metrics[f"{name}_loss"] = float(cross_entropy(logits, words))
        metrics[f"{name}_accuracy"] = float((logits.argmax(-1) == words).double().mean())
    return metrics
