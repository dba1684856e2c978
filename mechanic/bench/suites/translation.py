"""Translation from German into English, each next word from all before it."""

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
from mechanic.bench.task import Budget, Problem, Setting, Task, cosine, half_decades, shuffled

UNKNOWN, BEGIN, END = 1, 2, 3
SPECIAL = PAD, UNKNOWN, BEGIN, END
Net = Callable[[int, int, int], nn.Module]  # of a width and the sizes of two vocabularies


@dataclass(frozen=True)
class Size:
    """Of the model and of the run."""

    width: int
    vocabulary: int
    batch: int
    steps: int
    evaluated: int
    """Pairs trained on, and pairs held out."""


SIZES: dict[Budget, Size] = {
    "smoke": Size(16, 256, batch=16, steps=8, evaluated=32),
    "short": Size(256, 8192, batch=128, steps=600, evaluated=1024),
    "full": Size(512, 16384, batch=128, steps=20_000, evaluated=8192),
}
CHUNK = 512  # pairs to evaluate at once
LENGTHS = {"multi30k": 32, "iwslt14": 64}  # in words; what is longer is cut off
# Of IWSLT14 some have only a sample of 4,600 pairs.
TRAIN, VALID = ("train", "trainsample"), ("val", "valid")
HYPERPARAMETERS = {"adamw": {"betas": (0.9, 0.98)}}  # as fairseq trains both kinds


def tasks(data: Data) -> list[Task]:
    """The LSTM and the transformer on captions of images, the LSTM on talks as well."""
    lstm, transformer = "LSTMs with attention", "transformer of 3 + 3 layers"
    talks = "IWSLT14 (4,600 pairs where only a sample is at hand)"
    return [
        _task(data, "lstm-multi30k", Recurrent, f"{lstm} on Multi30k"),
        _task(data, "transformer-multi30k", Attentive, f"{transformer} on Multi30k"),
        _task(data, "lstm-iwslt14", Recurrent, f"{lstm} on {talks}"),
    ]


def _task(data: Data, name: str, net: Net, about: str) -> Task:
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


def _build(net: Net, name: str, setting: Setting) -> Problem:
    size = SIZES[setting.budget]
    pairs = _pairs(setting.data, name, size.vocabulary, setting.device)
    torch.manual_seed(setting.seed)
    model = net(size.width, *pairs.vocabularies).to(setting.device)
    count = size.evaluated
    samples = {
        "train": (pairs.source[:count], pairs.target[:count]),
        "test": (pairs.test_source[:count], pairs.test_target[:count]),
    }
    indices = shuffled(len(pairs.source), size.batch, setting.seed, setting.device)
    return Problem(
        model,
        batches=((pairs.source[index], pairs.target[index]) for index in indices),
        loss=lambda pair: cross_entropy(*_guesses(model, *pair), ignore_index=PAD),
        evaluate=partial(_evaluate, model, samples, net is Attentive),
        steps=size.steps,
        schedule=cosine(0.05),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=net is Attentive,  # LSTMs gain nothing from it
    )


def _guesses(model: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the right words, each sentence's end among them."""
    return model(source, target[:, :-1]).flatten(0, 1).float(), target[:, 1:].flatten()


def _evaluate(
    model: nn.Module, samples: dict[str, tuple[Tensor, Tensor]], autocast: bool
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, pair in samples.items():
        parts = zip(*(torch.split(side, CHUNK) for side in pair), strict=True)
        with bfloat16(pair[0].device, autocast):
            sums = torch.stack([_sums(*_guesses(model, *part)) for part in parts])
        loss, right, words = sums.sum(0).tolist()
        metrics |= {f"{name}_loss": loss / words, f"{name}_accuracy": right / words}
    return metrics


def _sums(logits: Tensor, words: Tensor) -> Tensor:
    """Of the loss, of right guesses and of words, without what pads the sentences."""
    loss = cross_entropy(logits, words, ignore_index=PAD, reduction="sum")
    there = words != PAD
    return torch.stack([loss, ((logits.argmax(-1) == words) & there).sum(), there.sum()])


class Pairs(NamedTuple):
    """Sentences as numbers on the device."""

    source: Tensor
    target: Tensor
    test_source: Tensor
    test_target: Tensor
    vocabularies: tuple[int, int]
    """How many words each language has."""


@cache
def _pairs(data: Data, name: str, vocabulary: int, device: torch.device) -> Pairs:
    train, test = (_first_there(data, name, splits) for splits in (TRAIN, VALID))
    # Some sets have the sentences as they are written as well: the last two columns are words.
    german, english = ([row[column].split() for row in train] for column in (-2, -1))
    numbers = _vocabulary(german, vocabulary), _vocabulary(english, vocabulary)
    length = LENGTHS[name]

    def table(rows: list[tuple[str, ...]], column: int) -> Tensor:
        sentences = [_numbered(row[column].split(), numbers[column], length) for row in rows]
        return _padded(sentences, length + 2, left=column == -2).to(device)

    sizes = len(numbers[0]) + len(SPECIAL), len(numbers[1]) + len(SPECIAL)
    return Pairs(table(train, -2), table(train, -1), table(test, -2), table(test, -1), sizes)


def _first_there(data: Data, name: str, splits: Sequence[str]) -> list[tuple[str, ...]]:
    for split in splits[:-1]:
        try:
            return data.pairs(name, split)
        except MissingData:
            continue
    return data.pairs(name, splits[-1])


def _vocabulary(sentences: Iterable[Sequence[str]], most: int) -> dict[str, int]:
    counts = Counter(word for sentence in sentences for word in sentence)
    frequent = [word for word, count in counts.most_common(most - len(SPECIAL)) if count > 1]
    return {word: place for place, word in enumerate(frequent, start=len(SPECIAL))}


def _numbered(words: Sequence[str], number: dict[str, int], length: int) -> list[int]:
    return [BEGIN, *(number.get(word, UNKNOWN) for word in words[:length]), END]


def _padded(sentences: list[list[int]], length: int, left: bool) -> Tensor:
    """The source is padded at its left: what an LSTM has read last is then the sentence's end."""
    table = torch.full((len(sentences), length), PAD)
    for row, sentence in enumerate(sentences):
        place = slice(length - len(sentence), None) if left else slice(len(sentence))
        table[row, place] = torch.tensor(sentence)
    return table
