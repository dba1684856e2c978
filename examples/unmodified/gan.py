"""A generative adversarial network draws handwritten digits: two networks, two optimizers.

    python examples/unmodified/gan.py --lr 1e-3 --epochs 40

The digits are the 8 by 8 images that scikit-learn bundles. Both learning rates are constant for
the first half of training and fall to 0 over the second. A Fréchet distance measures how good the
drawings are. It treats both sets of images as Gaussians over the 20 principal components of the
real ones; 0 means no difference.
"""

import argparse

import numpy as np
import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

LATENT = 16


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(LATENT, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(128, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(64, 1),
    )


def frechet_distance(real: Tensor, fake: Tensor) -> float:
    pca = PCA(20).fit(real.numpy())
    features = [pca.transform(images.numpy()) for images in (real, fake)]
    means = [x.mean(axis=0) for x in features]
    covariances = [np.cov(x, rowvar=False) for x in features]
    cross = sqrtm(covariances[0] @ covariances[1]).real
    difference = ((means[0] - means[1]) ** 2).sum()
    return float(difference + np.trace(covariances[0] + covariances[1] - 2 * cross))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on digits")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    loader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator = make_generator(), make_discriminator()
    optimizers = [
        torch.optim.Adam(network.parameters(), lr=args.lr, betas=(0.5, 0.999))
        for network in (discriminator, generator)
    ]
    optimizer_d, optimizer_g = optimizers
    half = args.epochs / 2
    schedulers = [LambdaLR(o, lambda epoch: min(1, 2 - epoch / half)) for o in optimizers]
    ones, zeros = torch.ones(args.batch_size, 1), torch.zeros(args.batch_size, 1)

    for epoch in range(args.epochs):
        for (real,) in loader:
            fake = generator(torch.randn(args.batch_size, LATENT))
            optimizer_d.zero_grad()
            loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
            loss_d.backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = bce(discriminator(fake), ones)
            loss_g.backward()
            optimizer_g.step()
        for scheduler in schedulers:
            scheduler.step()
        print(f"[{epoch + 1}/{args.epochs}] Loss_D: {loss_d:.4f} Loss_G: {loss_g:.4f}")

    generator.eval()
    discriminator.eval()
    with torch.no_grad():
        fake = generator(torch.randn(len(images), LATENT))
        scores_real, scores_fake = discriminator(images), discriminator(fake)
    loss_d = bce(scores_real, torch.ones_like(scores_real))
    loss_d += bce(scores_fake, torch.zeros_like(scores_fake))
    print(f"Final discriminator loss: {loss_d:.6f}")
    print(f"Final Fréchet distance: {frechet_distance(images, fake):.6f}")


if __name__ == "__main__":
    main()
