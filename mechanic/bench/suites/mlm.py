"""Masked language modelling: a BERT on words, without next-sentence prediction."""

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
from mechanic.bench.task import Budget, BuildSettings, Problem, Task, half_decades, linear


@dataclass(frozen=True)
class BertSize:
    """The size of the model and of the run."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int
    steps: int
    evaluated: int
    """The number of windows to evaluate, of the train text and of the validation text each."""


SIZES: dict[Budget, BertSize] = {
    "smoke": BertSize(2, 32, 512, length=32, batch=16, steps=8, evaluated=16),
    "short": BertSize(4, 256, 8192, length=128, batch=128, steps=600, evaluated=512),
    # BERT-base. The paper has a batch of 2,000, more than one GPU can hold.
    "full": BertSize(12, 768, 32768, length=128, batch=256, steps=150_000, evaluated=2048),
}
HEAD = 64  # width of an attention head
MASKED = 0.15  # the fraction of the words that is masked, as in BERT
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
}
GRIDS = {"adamw": half_decades(-5, -1), "lion": half_decades(-6, -2)}


def tasks(data: Data) -> list[Task]:
    """One task, on the chosen corpus."""
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
    """Why a BERT cannot be trained here; empty if it can."""
    return data.missing("text", data.corpus_name()) or not_installed("transformers")


def build(
    settings: BuildSettings, batch: float = 1.0, width: float = 1.0, dropout: float = 0.0
) -> Problem:
    """Build the problem. `batch` and `width` are factors of their usual sizes."""
    size = SIZES[settings.budget]
    size = replace(size, batch=round(batch * size.batch), width=round(width * size.width))
    limit = corpus.MAX_CHARACTERS[settings.budget]
    tokens = corpus.of_words(settings.data, limit, size.vocabulary, settings.device)
    torch.manual_seed(settings.seed)
    model = _bert(size, tokens.vocabulary, dropout).to(settings.device)
    samples = {
        name: _mask(
            corpus.spread_windows(part, size.length, size.evaluated),
            tokens.vocabulary,
            torch.Generator(settings.device).manual_seed(0),
        )
        for name, part in (("train", tokens.train), ("test", tokens.valid))
    }
    return Problem(
        model,
        batches=_batches(tokens, size, settings.seed),
        loss=lambda masked: cross_entropy(_logits(model, masked), masked.words.flatten()),
        evaluate=partial(_evaluate, model, samples),
        steps=size.steps,
        schedule=linear(0.05),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=True,
    )


def _bert(size: BertSize, vocabulary: int, dropout: float) -> nn.Module:
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


class MaskedBatch(NamedTuple):
    """A batch of windows of text, some words of which are masked."""

    inputs: Tensor
    positions: Tensor
    """The positions of the masked words in each window."""
    words: Tensor
    """The original words at these positions."""


def _batches(tokens: corpus.Tokens, size: BertSize, seed: int) -> Iterator[MaskedBatch]:
    generator = torch.Generator(tokens.train.device).manual_seed(seed)
    for windows in corpus.random_windows(tokens.train, size.length, size.batch, seed):
        yield _mask(windows, tokens.vocabulary, generator)


def _mask(windows: Tensor, vocabulary: int, generator: torch.Generator) -> MaskedBatch:
    """Mask the same number of words in each window, so that the shapes are known on the host."""
    device, count = windows.device, round(MASKED * windows.shape[1])
    chance = torch.rand(windows.shape, generator=generator, device=device)
    positions = chance.topk(count, dim=1).indices
    words = windows.gather(1, positions)
    # As in BERT: of ten masked words, eight become the mask, one a random word, one stays.
    random_word = torch.randint(
        len(corpus.SPECIAL), vocabulary, words.shape, generator=generator, device=device
    )
    chance = torch.rand(words.shape, generator=generator, device=device)
    shown = torch.where(chance < 0.9, random_word, words).masked_fill(chance < 0.8, corpus.MASK)
    return MaskedBatch(windows.scatter(1, positions, shown), positions, words)


def _logits(model: Any, masked: MaskedBatch) -> Tensor:
    """The logits of the masked words only: those of the others would be costly and useless."""
    hidden: Tensor = model.bert(masked.inputs).last_hidden_state
    index = masked.positions[..., None].expand(-1, -1, hidden.shape[-1])
    logits: Tensor = model.cls(hidden.gather(1, index))
    return logits.flatten(0, 1).float()


def _evaluate(model: Any, samples: Mapping[str, MaskedBatch]) -> dict[str, float]:
    metrics = {}
    for name, masked in samples.items():
        with bfloat16(masked.inputs.device):
            parts = zip(*(torch.split(part, 128) for part in masked), strict=True)
            logits = torch.cat([_logits(model, MaskedBatch(*part)) for part in parts])
        words = masked.words.flatten()
        metrics[f"{name}_loss"] = float(cross_entropy(logits, words))
        metrics[f"{name}_accuracy"] = float((logits.argmax(-1) == words).double().mean())
    return metrics
