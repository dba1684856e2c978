"""Two networks that translate: LSTMs with attention, and a transformer."""

import math

import torch
from torch import Tensor, nn

PAD = 0
HEAD = 64  # width of an attention head
LONGEST = 128  # sentence
LAYERS = 3


class Recurrent(nn.Module):
    """An LSTM reads, another writes, and attends to what was read (Luong et al., 2015)."""

    def __init__(self, width: int, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.combine = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, target_words)
        for weights in self.parameters():
            nn.init.uniform_(weights, -0.1, 0.1)  # as fairseq's

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the word after each of the target."""
        memory, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        scores = hidden @ memory.transpose(1, 2)
        weights = scores.masked_fill((source == PAD)[:, None], -math.inf).softmax(-1)
        attended = torch.cat([hidden, weights @ memory], -1)
        logits: Tensor = self.output(self.combine(attended).tanh())
        return logits


class Attentive(nn.Module):
    """A transformer with its norms ahead of the layers."""

    def __init__(self, width: int, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.places = nn.Embedding(LONGEST, width)
        shape = (width, max(1, width // HEAD), 4 * width)
        reads = nn.TransformerEncoderLayer(*shape, dropout=0.0, batch_first=True, norm_first=True)
        writes = nn.TransformerDecoderLayer(*shape, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(
            reads, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(writes, LAYERS, nn.LayerNorm(width))
        self.output = nn.Linear(width, target_words)
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)  # as nn.Transformer does

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the word after each of the target."""
        padding = source == PAD
        memory = self.encoder(self._placed(self.source, source), src_key_padding_mask=padding)
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.decoder(
            self._placed(self.target, target),
            memory,
            tgt_mask=later,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.output(hidden)
        return logits

    def _placed(self, embedding: nn.Module, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        placed: Tensor = embedding(words) + self.places(places)
        return placed
