"""The suites `diffusion` and `gan`: their networks, their losses, and the figure that is scored."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch.nn.functional import interpolate

from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.suites import SUITES, denoisers, diffusion, gan
from mechanic.bench.suites.shared import scaled
from mechanic.bench.task import BuildSettings
from mechanic.bench.train import train
from mechanic.torch import mechanize, tuner

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def noisy(count: int = 6) -> diffusion.NoisyBatch:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return diffusion._sample(pictures, count)


def test_pixels_are_scaled_to_one() -> None:
    assert scaled(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


def test_noise_is_all_there_is_at_the_last_time_and_none_at_the_first() -> None:
    batch = noisy(4)
    assert batch.time.tolist() == [0.125, 0.375, 0.625, 0.875]

    def seen(time: float) -> torch.Tensor:
        kept = []

        def model(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return batch.noise

        at = batch._replace(time=torch.full((4,), time))
        assert diffusion._loss(model, at) == 0  # a model that knows the noise  # type: ignore
        return kept[0]

    torch.testing.assert_close(seen(0.0), batch.clean)
    torch.testing.assert_close(seen(1.0), batch.noise)
    middle = seen(0.5)
    torch.testing.assert_close(middle, (batch.clean + batch.noise) / 2**0.5)


@pytest.mark.parametrize("net", [partial(denoisers.UNet, 8), partial(denoisers.DiT, 16, 2)])
def test_a_denoiser_sees_the_whole_image_and_the_time(net: partial) -> None:
    torch.manual_seed(0)
    model, batch = net(), noisy(2)
    with torch.no_grad():  # what begins at 0 hides what is behind it
        for weights in model.parameters():
            weights.add_(0.05 * torch.randn(weights.shape))
        out = model(batch.clean, batch.time)
        assert out.shape == batch.clean.shape
        changed = batch.clean.clone()
        changed[:, :, 12:20, 12:20] += 1
        moved = (model(changed, batch.time) - out).abs().amax((0, 1))
        assert not torch.allclose(model(batch.clean, batch.time / 2), out)
    assert moved[:, :8].max() > 0


def test_patches_go_back_to_their_places() -> None:
    torch.manual_seed(0)
    model = denoisers.DiT(48, 0)  # as wide as a patch has values
    model.norm = torch.nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        for layer in (model.entry, model.exit):
            layer.weight.copy_(torch.eye(48))
            layer.bias.zero_()
        model.positions.zero_()
        x = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(model(x, torch.rand(2)), x)


def test_doubling_is_torchs() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(denoisers.doubled(x), interpolate(x, scale_factor=2))


def test_low_rank_layers_start_at_the_base_and_end_at_w_plus_ba() -> None:
    torch.manual_seed(0)
    base = denoisers.DiT(16, 1)
    with torch.no_grad():
        for weights in base.parameters():
            weights.add_(0.1 * torch.randn(weights.shape))
    model = denoisers.adapt(copy.deepcopy(base), 2)
    batch = noisy(4)
    torch.testing.assert_close(model(batch.clean, batch.time), base(batch.clean, batch.time))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    linear = [m for m in base.modules() if isinstance(m, torch.nn.Linear)]
    assert len(trained) == 2 * len(linear)
    optimizer = mechanize(torch.optim.AdamW(trained, lr=1.0, weight_decay=0.0))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = diffusion._loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert float(tuner(optimizer).effective_lr[0]) > 1e-6
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    adapted = [m for m in model.modules() if isinstance(m, denoisers.LowRank)]
    with torch.no_grad():  # the same matrices, multiplied out into the layers of the base
        for layer, low in zip(linear, adapted, strict=True):
            layer.weight += low.outer.weight @ low.inner.weight
        torch.testing.assert_close(
            model(batch.clean, batch.time), base(batch.clean, batch.time), rtol=1e-4, atol=1e-4
        )


def test_fine_tuning_begins_at_a_trained_model_that_every_process_has(data: Data) -> None:
    task = SUITES["diffusion"](data)[2]
    settings = BuildSettings("smoke", 3, CPU, data)
    first = task.build(settings)
    diffusion._pretrained.cache_clear()
    torch.manual_seed(99)
    again = task.build(settings)
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.ema is None
    assert len(first.parameters()) < len(list(first.model.parameters()))


# --- gan


def test_the_distance_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(4, 4, generator=generator, dtype=torch.double)
    a = torch.randn(500, 4, generator=generator, dtype=torch.double)
    b = torch.randn(400, 4, generator=generator, dtype=torch.double) @ mixed + 2
    first, second = (np.cov(x.numpy().T) for x in (a, b))
    apart = ((a.mean(0) - b.mean(0)) ** 2).sum().item()
    expected = apart + np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert gan.frechet(a, b) == pytest.approx(expected, rel=1e-6)
    assert gan.frechet(a, a) == pytest.approx(0, abs=1e-9)
    assert gan.frechet(a, 3 * a + 1) == pytest.approx(
        ((2 * a.mean(0) + 1) ** 2).sum().item() + 4 * np.trace(first)
    )
    b[7, 1] = torch.nan
    assert np.isnan(gan.frechet(a, b))


def test_features_are_the_same_whatever_is_random_elsewhere(data: Data) -> None:
    pictures = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = gan.features([pictures])
    gan._random_layers.cache_clear()
    torch.manual_seed(5)
    torch.testing.assert_close(gan.features([pictures[:20], pictures[20:]]), found)
    assert found.shape == (32, 4 * gan.FEATURES)


def test_the_distance_tells_worse_pictures() -> None:
    """Noise, blur, shift, one picture for all: each is farther away than other real pictures."""
    x, _, other, _ = gan.pixels(Data(), "digits8x8", None, CPU)
    real, other = gan.features([scaled(x)]), scaled(other)
    worse = {
        "noise": other + 0.5 * torch.randn(other.shape, generator=torch.Generator().manual_seed(0)),
        "blur": torch.nn.functional.avg_pool2d(other, 3, 1, 1),
        "shift": other.roll(1, -1),
        "one for all": other[:1].expand_as(other),
    }
    level = gan.frechet(real, gan.features([other]))
    for name, pictures in worse.items():
        assert gan.frechet(real, gan.features([pictures])) > 3 * level, name


@pytest.mark.parametrize("method", ["adamw", "mechanic"])
def test_two_optimizers_play_in_turn(method: str, data: Data) -> None:
    """The run of the bench is this loop, to the last digit."""
    task = SUITES["gan"](data)[1]
    settings, lr = BuildSettings("smoke", 0, CPU, data), 1e-3 if method == "adamw" else 1.0
    outcome = train(task, METHODS[method], "adamw", lr, settings)
    problem = task.build(settings)
    generator, opponent = problem.model, problem.opponent
    assert opponent is not None
    makers = [
        torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.5, 0.999), weight_decay=0.0)
        for m in (opponent.model, generator)
    ]
    critics, generators = map(mechanize, makers) if method == "mechanic" else makers
    mean = [p.detach().clone() for p in generator.parameters()]
    before = [p.detach().clone() for p in opponent.model.parameters()]
    for step in range(problem.steps):
        batch = next(problem.batches)
        critics.zero_grad()
        with torch.no_grad():
            made = generator(batch.codes)
        right, wrong = opponent.model(batch.real), opponent.model(made)
        loss = -right.sigmoid().log().mean() - (1 - wrong.sigmoid()).log().mean()
        torch.testing.assert_close(opponent.loss(batch), loss)
        opponent.loss(batch).backward()
        critics.step()
        generators.zero_grad()
        problem.loss(batch).backward()
        generators.step()
        share = 1 - min(0.9, (2 + step) / (11 + step))
        mean = [
            m + share * (p.detach() - m) for m, p in zip(mean, generator.parameters(), strict=True)
        ]
    assert not any(map(torch.equal, before, opponent.model.parameters()))
    with torch.no_grad():
        for p, m in zip(generator.parameters(), mean, strict=True):
            p.copy_(m)
        generator.eval()
        expected = problem.evaluate()
    assert outcome.metrics == pytest.approx(expected, rel=1e-5)
