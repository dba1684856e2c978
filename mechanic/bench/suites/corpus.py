"""A corpus as tokens on the device: bytes for a GPT, words for a BERT."""

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

# Characters to read. 20 million are about 4 million words, more than a `short` run sees.
MAX_CHARACTERS: dict[Budget, int | None] = {"smoke": 200_000, "short": 20_000_000, "full": None}
VALID_CHARACTERS = 1_000_000
WORD = re.compile(r"\w+|[^\w\s]")
SPECIAL = UNKNOWN, MASK = 0, 1


class Tokens(NamedTuple):
    """The tokens of a corpus, and the size of its vocabulary."""

    train: Tensor
    valid: Tensor
    vocabulary: int


@lru_cache(maxsize=1)
def of_bytes(data: Data, limit: int | None, device: torch.device) -> Tokens:
    """Each byte of the UTF-8 text is a token."""
    text = data.text()

    def encoded(part: str) -> Tensor:
        return torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).to(device)

    return Tokens(encoded(text.train[:limit]), encoded(text.valid[:VALID_CHARACTERS]), 256)


@lru_cache(maxsize=1)
def of_words(data: Data, limit: int | None, vocabulary: int, device: torch.device) -> Tokens:
    """The most frequent words in lower case, with punctuation marks as words. Other words are
    unknown."""
    text = data.text()
    counts = Counter(_words(text.train[:limit]))
    frequent = (word for word, _ in counts.most_common(vocabulary - len(SPECIAL)))
    indices = {word: index for index, word in enumerate(frequent, start=len(SPECIAL))}

    def encoded(part: str) -> Tensor:
        ids = map(indices.get, _words(part), repeat(UNKNOWN))
        return torch.from_numpy(np.fromiter(ids, np.int32)).to(device)

    train, valid = encoded(text.train[:limit]), encoded(text.valid[:VALID_CHARACTERS])
    return Tokens(train, valid, len(indices) + len(SPECIAL))


def _words(text: str) -> Iterator[str]:
    """The words, paragraph by paragraph: a list of all words of a large corpus would fill the
    memory."""
    return chain.from_iterable(WORD.findall(part.lower()) for part in text.split("\n\n"))


def random_windows(tokens: Tensor, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of windows at random places of the text."""
    if len(tokens) < length:
        raise ValueError(f"the corpus has {len(tokens)} train tokens; at least {length} are needed")
    generator = torch.Generator(tokens.device).manual_seed(seed)
    offsets = torch.arange(length, device=tokens.device)
    positions = len(tokens) - length + 1
    while True:
        starts = torch.randint(positions, (batch, 1), generator=generator, device=tokens.device)
        yield tokens[starts + offsets].long()


def spread_windows(tokens: Tensor, length: int, count: int) -> Tensor:
    """Windows at regular distances over the whole text, always the same."""
    # With integers, because float32 cannot represent every position in a long text.
    starts = torch.arange(count, device=tokens.device) * (len(tokens) - length) // max(1, count - 1)
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()
