"""A variational autoencoder learns to draw handwritten digits, with Lightning.

    python examples/unmodified/lightning_module.py --lr 3e-3 --epochs 30

The digits are the 8 by 8 images that scikit-learn bundles.
"""

import argparse

import lightning as L  # noqa: N812 - its documentation imports it so
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


class LitVAE(L.LightningModule):
    def __init__(self, lr: float, hidden: int = 64, latent: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def negative_elbo(self, batch: list[Tensor]) -> Tensor:
        """The mean over the images of reconstruction and Kullback-Leibler divergence, in nats."""
        (images,) = batch
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = binary_cross_entropy_with_logits(self.decoder(code), images, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return (error + divergence) / len(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.negative_elbo(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("final_train_loss", self.negative_elbo(batch))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = CosineAnnealingLR(optimizer, T_max=int(steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a variational autoencoder on digits")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    L.seed_everything(args.seed)
    dataset = TensorDataset(torch.tensor(load_digits().data / 16, dtype=torch.float32))
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    model = LitVAE(lr=args.lr)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(model, loader)
    (metrics,) = trainer.test(model, DataLoader(dataset, batch_size=256), verbose=False)
    print(f"Final train loss: {metrics['final_train_loss']:.6f}")


if __name__ == "__main__":
    main()
