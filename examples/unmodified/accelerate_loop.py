"""A convolutional network removes the grain from photographs, with Hugging Face accelerate.

    python examples/unmodified/accelerate_loop.py --lr 0.01 --epochs 10
    accelerate launch examples/unmodified/accelerate_loop.py --lr 0.01

The schedule is one cycle. The data is the two photographs that scikit-learn bundles, cut into
patches. The loss is the mean squared error, in units of the variance of the grain.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

SIZE = 16  # of a patch, in pixels
GRAIN = 0.1  # standard deviation; black is 0 and white is 1


def load_patches() -> TensorDataset:
    grey = torch.tensor(load_sample_images().images).float().mean(dim=3) / 255
    patches = grey.unfold(1, SIZE, SIZE).unfold(2, SIZE, SIZE).reshape(-1, 1, SIZE, SIZE)
    return TensorDataset(patches + GRAIN * torch.randn_like(patches), patches)


class Denoiser(nn.Module):
    """Predicts the grain and subtracts it."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.grain = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 1, kernel_size=3, padding=1),
        )

    def forward(self, noisy: Tensor) -> Tensor:
        return noisy - self.grain(noisy)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a denoiser with accelerate")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(args.seed)
    loader = DataLoader(load_patches(), batch_size=args.batch_size, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(loader)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        model.train()
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(model(noisy), clean) / GRAIN**2
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: last batch {loss.item():.4f}")

    model.eval()
    errors = []
    for noisy, clean in loader:
        with torch.no_grad():
            error = (model(noisy) - clean).square().mean(dim=(1, 2, 3)) / GRAIN**2
        errors.append(accelerator.gather_for_metrics(error))
    accelerator.print(f"Final train loss: {torch.cat(errors).mean():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
