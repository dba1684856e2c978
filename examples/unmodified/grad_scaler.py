"""Automatic mixed precision: float16 autocast and GradScaler, on a GPU or a CPU.

    python examples/unmodified/grad_scaler.py --lr 0.03 --epochs 8

A small network separates two overlapping moons.
"""

import argparse

import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(seed: int, size: int = 8192) -> TensorDataset:
    points, labels = make_moons(size, noise=0.3, random_state=seed)
    arrays = points, labels[:, None]
    return TensorDataset(*(torch.tensor(array, dtype=torch.float32) for array in arrays))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier in mixed precision")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--no-amp", action="store_true", help="train in float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_amp = not args.no_amp
    dataset = make_dataset(args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    model = make_model().to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    scaler = torch.amp.GradScaler(device, enabled=use_amp)

    for epoch in range(args.epochs):
        model.train()
        for points, labels in loader:
            points, labels = points.to(device), labels.to(device)
            with torch.autocast(device, dtype=torch.float16, enabled=use_amp):
                loss = criterion(model(points), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}, loss scale {scaler.get_scale():g}")

    model.eval()
    points, labels = (tensor.to(device) for tensor in dataset.tensors)
    with torch.no_grad():
        final = criterion(model(points), labels)
    print(f"Final train loss: {final.item():.6f}")


if __name__ == "__main__":
    main()
