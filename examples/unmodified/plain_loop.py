"""A classifier of tabular data: a plain PyTorch loop with warm-up and a cosine schedule.

    python examples/unmodified/plain_loop.py --lr 0.03 --epochs 5

The data is synthetic: five classes in 20 features, with one label in ten drawn at random.
"""

import argparse

import torch
from sklearn.datasets import make_classification
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(seed: int, size: int = 32768) -> TensorDataset:
    features, labels = make_classification(
        n_samples=size,
        n_features=20,
        n_informative=10,
        n_classes=5,
        flip_y=0.1,
        random_state=seed,
    )
    return TensorDataset(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))


class Classifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 5),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    total = sum(criterion(model(features), labels).item() for features, labels in loader)
    return total / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tabular classifier")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    loader = DataLoader(make_dataset(args.seed), batch_size=args.batch_size, shuffle=True)
    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(loader)
    warmup = LinearLR(optimizer, start_factor=0.01, total_iters=steps // 10)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - steps // 10)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[steps // 10])

    for epoch in range(1, args.epochs + 1):
        model.train()
        for features, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"Epoch {epoch}/{args.epochs}, last batch loss {loss.item():.4f}")
    print(f"Final train loss: {evaluate(model, loader):.6f}")


if __name__ == "__main__":
    main()
