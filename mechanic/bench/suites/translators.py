"""Two networks for translation: LSTMs with attention, and a transformer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

PAD = 0
HEAD = 64  # width of an attention head
MAX_LENGTH = 128  # of a sentence, in tokens
LAYERS = 3


class Recurrent(nn.Module):
    """An LSTM reads the source; another writes and attends to the source (Luong et al., 2015)."""

    def __init__(self, width: int, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.combine = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, target_words)
        for weights in self.parameters():
            nn.init.uniform_(weights, -0.1, 0.1)  # as in fairseq

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the next word, after each word of the target."""
        memory, state = self.encoder(self.source(source))
        hidden, _ = self.decoder(self.target(target), state)
        scores = hidden @ memory.transpose(1, 2)
        weights = scores.masked_fill((source == PAD)[:, None], -math.inf).softmax(-1)
        attended = torch.cat([hidden, weights @ memory], -1)
        logits: Tensor = self.output(self.combine(attended).tanh())
        return logits


class Attentive(nn.Module):
    """A transformer with the norms before the layers."""

    def __init__(self, width: int, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.positions = nn.Embedding(MAX_LENGTH, width)
        shape = (width, max(1, width // HEAD), 4 * width)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        encoder_layer = nn.TransformerEncoderLayer(*shape, **options)
        decoder_layer = nn.TransformerDecoderLayer(*shape, **options)
        self.encoder = nn.TransformerEncoder(
            encoder_layer, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder_layer, LAYERS, nn.LayerNorm(width))
        self.output = nn.Linear(width, target_words)
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)  # as in nn.Transformer

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The logits of the next word, after each word of the target."""
        padding = source == PAD
        memory = self.encoder(self._embed(self.source, source), src_key_padding_mask=padding)
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.decoder(
            self._embed(self.target, target),
            memory,
            tgt_mask=later,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.output(hidden)
        return logits

    def _embed(self, embedding: nn.Module, words: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device)
        embedded: Tensor = embedding(words) + self.positions(positions)
        return embedded
