"""Running text as tokens on the device: bytes for a GPT, words for a BERT."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mechanic.bench.data import Data
from mechanic.bench.task import Budget

# Characters to read. 20 million are some 4 million words, more than a `short` run sees.
MOST: dict[Budget, int | None] = {"smoke": 200_000, "short": 20_000_000, "full": None}
VALID = 1_000_000  # characters to validate on
WORD = re.compile(r"\w+|[^\w\s]")
SPECIAL = UNKNOWN, MASK = 0, 1


class Tokens(NamedTuple):
    """A corpus, and how many different tokens there are."""

    train: Tensor
    valid: Tensor
    vocabulary: int


@lru_cache(maxsize=1)
def of_bytes(data: Data, most: int | None, device: torch.device) -> Tokens:
    """UTF-8."""
    text = data.text()

    def encoded(part: str) -> Tensor:
        return torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).to(device)

    return Tokens(encoded(text.train[:most]), encoded(text.valid[:VALID]), 256)


@lru_cache(maxsize=1)
def of_words(data: Data, most: int | None, vocabulary: int, device: torch.device) -> Tokens:
    """The most frequent words in lower case, punctuation marks among them; others are unknown."""
    text = data.text()
    counts = Counter(_words(text.train[:most]))
    frequent = (word for word, _ in counts.most_common(vocabulary - len(SPECIAL)))
    number = {word: place for place, word in enumerate(frequent, start=len(SPECIAL))}

    def encoded(part: str) -> Tensor:
        ids = map(number.get, _words(part), repeat(UNKNOWN))
        return torch.from_numpy(np.fromiter(ids, np.int32)).to(device)

    return Tokens(
        encoded(text.train[:most]), encoded(text.valid[:VALID]), len(number) + len(SPECIAL)
    )


def _words(text: str) -> Iterator[str]:
    """Paragraph by paragraph, as a list of all words of a large corpus would fill the memory."""
    return chain.from_iterable(WORD.findall(part.lower()) for part in text.split("\n\n"))


def random_windows(tokens: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of stretches of the text, from anywhere in it."""
    if len(tokens) < length:
        raise ValueError(f"the corpus has {len(tokens)} tokens to train on; {length} are needed")
    generator = torch.Generator(tokens.device).manual_seed(seed)
    offsets = torch.arange(length, device=tokens.device)
    places = len(tokens) - length + 1
    while True:
        starts = torch.randint(places, (batch, 1), generator=generator, device=tokens.device)
        yield tokens[starts + offsets].long()


def spread_windows(tokens: Tensor, length: int, count: int) -> Tensor:
    """Stretches that are always the same, from all over the text."""
    # In whole numbers: float32 cannot tell the last places of a long text apart.
    starts = torch.arange(count, device=tokens.device) * (len(tokens) - length) // max(1, count - 1)
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()
