"""A character language model: an LSTM, with gradient accumulation and clipping.

    python examples/unmodified/accumulation.py --lr 0.01 --epochs 3 --accumulate 2

The text is what `help()` shows on Python's own topics; it is part of every Python.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32  # characters in a sequence
SEQUENCES = 2048


def load_sequences() -> tuple[TensorDataset, int]:
    text = "".join(topics[name] for name in sorted(topics))[: LENGTH * SEQUENCES + 1]
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    codes = torch.tensor([index[character] for character in text])
    return TensorDataset(codes[:-1].view(-1, LENGTH), codes[1:].view(-1, LENGTH)), len(alphabet)


class CharLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(codes))
        return self.head(states)


def loss_of(model: nn.Module, codes: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def warmup_then_cosine(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character LSTM")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dataset, vocabulary = load_sequences()
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    model = CharLSTM(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(loader) // args.accumulate
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, 20, total))

    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for i, (codes, following) in enumerate(loader, start=1):
            loss = loss_of(model, codes, following)
            (loss / args.accumulate).backward()
            running += loss.item()
            if i % args.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {running / len(loader):.4f}")

    model.eval()
    with torch.no_grad():
        batches = zip(*(tensor.split(256) for tensor in dataset.tensors), strict=True)
        losses = [loss_of(model, *batch).item() * len(batch[0]) for batch in batches]
    print(f"Final train loss: {sum(losses) / len(dataset):.6f}")


if __name__ == "__main__":
    main()
