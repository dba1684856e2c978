"""Translation from German into English, trained to predict the next word."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data, MissingData
from mechanic.bench.suites.shared import bfloat16
from mechanic.bench.suites.translators import PAD, Attentive, Recurrent
from mechanic.bench.task import Budget, BuildSettings, Problem, Task, cosine, half_decades, shuffled

UNKNOWN, BEGIN, END = 1, 2, 3
SPECIAL = PAD, UNKNOWN, BEGIN, END
MakeTranslator = Callable[[int, int, int], nn.Module]
"""Makes a network of a width, given the sizes of the two vocabularies."""


@dataclass(frozen=True)
class TranslatorSize:
    """The size of the model and of the run."""

    width: int
    vocabulary: int
    batch: int
    steps: int
    evaluated: int
    """The number of pairs to evaluate, of the train and of the test pairs each."""


SIZES: dict[Budget, TranslatorSize] = {
    "smoke": TranslatorSize(16, 256, batch=16, steps=8, evaluated=32),
    "short": TranslatorSize(256, 8192, batch=128, steps=600, evaluated=1024),
    "full": TranslatorSize(512, 16384, batch=128, steps=20_000, evaluated=8192),
}
CHUNK = 512  # pairs to evaluate at once
LENGTHS = {"multi30k": 32, "iwslt14": 64}  # in words; longer sentences are cut
# The names of each split, in order of preference. "trainsample" is a sample of IWSLT14.
TRAIN, VALID = ("train", "trainsample"), ("val", "valid")
HYPERPARAMETERS = {"adamw": {"betas": (0.9, 0.98)}}  # as in fairseq, for both networks


def tasks(data: Data) -> list[Task]:
    """The LSTM and the transformer on image captions, and the LSTM on talks."""
    lstm, transformer = "LSTMs with attention", "transformer of 3 + 3 layers"
    talks = "IWSLT14 (4,600 pairs if only a sample is available)"
    return [
        _task(data, "lstm-multi30k", Recurrent, f"{lstm} on Multi30k"),
        _task(data, "transformer-multi30k", Attentive, f"{transformer} on Multi30k"),
        _task(data, "lstm-iwslt14", Recurrent, f"{lstm} on {talks}"),
    ]


def _task(data: Data, name: str, net: MakeTranslator, about: str) -> Task:
    pairs = name.split("-")[1]
    return Task(
        "translation",
        name,
        {"adamw": half_decades(-5, -1)},
        partial(_build, net, pairs),
        "test_loss",
        f"{about}, German to English; cosine with 5 % warm-up, clip 1",
        ("pairs", pairs),
        data.missing("pairs", pairs),
    )


def _build(net: MakeTranslator, name: str, settings: BuildSettings) -> Problem:
    size = SIZES[settings.budget]
    pairs = _pairs(settings.data, name, size.vocabulary, settings.device)
    torch.manual_seed(settings.seed)
    model = net(size.width, *pairs.vocabularies).to(settings.device)
    count = size.evaluated
    samples = {
        "train": (pairs.source[:count], pairs.target[:count]),
        "test": (pairs.test_source[:count], pairs.test_target[:count]),
    }
    indices = shuffled(len(pairs.source), size.batch, settings.seed, settings.device)
    return Problem(
        model,
        batches=((pairs.source[index], pairs.target[index]) for index in indices),
        loss=lambda pair: cross_entropy(*_predict(model, *pair), ignore_index=PAD),
        evaluate=partial(_evaluate, model, samples, net is Attentive),
        steps=size.steps,
        schedule=cosine(0.05),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=net is Attentive,  # it does not make LSTMs faster
    )


def _predict(model: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and the correct words, including the end of each sentence."""
    return model(source, target[:, :-1]).flatten(0, 1).float(), target[:, 1:].flatten()


def _evaluate(
    model: nn.Module, samples: dict[str, tuple[Tensor, Tensor]], autocast: bool
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, pair in samples.items():
        parts = zip(*(torch.split(side, CHUNK) for side in pair), strict=True)
        with bfloat16(pair[0].device, autocast):
            sums = torch.stack([_sums(*_predict(model, *part)) for part in parts])
        loss, right, words = sums.sum(0).tolist()
        metrics |= {f"{name}_loss": loss / words, f"{name}_accuracy": right / words}
    return metrics


def _sums(logits: Tensor, words: Tensor) -> Tensor:
    """The sum of the losses, and the numbers of correct words and of all words, without padding."""
    loss = cross_entropy(logits, words, ignore_index=PAD, reduction="sum")
    is_word = words != PAD
    return torch.stack([loss, ((logits.argmax(-1) == words) & is_word).sum(), is_word.sum()])


class TokenPairs(NamedTuple):
    """Pairs of sentences as token indices on the device."""

    source: Tensor
    target: Tensor
    test_source: Tensor
    test_target: Tensor
    vocabularies: tuple[int, int]
    """The number of tokens of each language."""


@cache
def _pairs(data: Data, name: str, vocabulary: int, device: torch.device) -> TokenPairs:
    train, test = (_first_available(data, name, splits) for splits in (TRAIN, VALID))
    # Some data sets have more columns; the tokenised sentences are the last two.
    german, english = ([row[column].split() for row in train] for column in (-2, -1))
    indices = _vocabulary(german, vocabulary), _vocabulary(english, vocabulary)
    length = LENGTHS[name]

    def table(rows: list[tuple[str, ...]], column: int) -> Tensor:
        sentences = [_indexed(row[column].split(), indices[column], length) for row in rows]
        return _padded(sentences, length + 2, left=column == -2).to(device)

    sizes = len(indices[0]) + len(SPECIAL), len(indices[1]) + len(SPECIAL)
    return TokenPairs(table(train, -2), table(train, -1), table(test, -2), table(test, -1), sizes)


def _first_available(data: Data, name: str, splits: Sequence[str]) -> list[tuple[str, ...]]:
    for split in splits[:-1]:
        try:
            return data.pairs(name, split)
        except MissingData:
            continue
    return data.pairs(name, splits[-1])


def _vocabulary(sentences: Iterable[Sequence[str]], limit: int) -> dict[str, int]:
    counts = Counter(word for sentence in sentences for word in sentence)
    frequent = [word for word, count in counts.most_common(limit - len(SPECIAL)) if count > 1]
    return {word: index for index, word in enumerate(frequent, start=len(SPECIAL))}


def _indexed(words: Sequence[str], indices: dict[str, int], length: int) -> list[int]:
    return [BEGIN, *(indices.get(word, UNKNOWN) for word in words[:length]), END]


def _padded(sentences: list[list[int]], length: int, left: bool) -> Tensor:
    """Sentences as one tensor. The source is padded on the left, so that an LSTM reads the end of
    the sentence last."""
    table = torch.full((len(sentences), length), PAD)
    for row, sentence in enumerate(sentences):
        columns = slice(length - len(sentence), None) if left else slice(len(sentence))
        table[row, columns] = torch.tensor(sentence)
    return table
