"""The problems: logistic regressions, a perceptron, a residual network, a GPT and an LSTM.

Each is a function of the source of the data and of the base, and small enough that dozens of
members train at once.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mechanic.bench.data import Data
from mechanic.bench.task import cosine, step_decay

from .population import Batch, Layout, Problem, Schedule

IMAGES = 20_000
TEXT = {"novels": 4_000_000, "tinyshakespeare": 1_000_000}  # the first so many letters of each
LETTERS = 128  # of ASCII


@dataclass(frozen=True)
class Source:
    """The data of a folder (`mechanic.bench.data`), on a device."""

    folder: Path
    device: torch.device

    def table(self, name: str) -> Batch:
        split = Data(self.folder).tabular(name)
        return self._there(torch.from_numpy(split.x_train), torch.from_numpy(split.y_train))

    def images(self) -> Batch:
        """CIFAR-10 at half its width and height, normalised by channel."""
        split = Data(self.folder).images("cifar10", IMAGES)
        small = split.x_train.reshape(-1, 16, 2, 16, 2, 3).mean((2, 4)).round()
        x = torch.from_numpy(small).float()
        x = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
        y = torch.from_numpy(split.y_train).long()
        return self._there(x.permute(0, 3, 1, 2).contiguous(), y)

    def windows(self, name: str, context: int, most: int | None = None) -> Batch:
        """Windows of a text, one letter longer than the context, in random order."""
        text = Data(self.folder, corpus=name).text().train[: TEXT[name]]
        letters = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
        windows = letters.long().unfold(0, context + 1, context)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        return self._there(windows[order][:most])

    def _there(self, *parts: Tensor) -> Batch:
        return tuple(part.to(self.device) for part in parts)


def half_decades(low: float, high: float) -> list[float]:
    return [10 ** (low + 0.5 * k) for k in range(round(2 * (high - low)) + 1)]


def constant(done: float) -> float:
    return 1.0


def logistic(source: Source, name: str, base: str) -> Problem:
    """Convex: logistic regression from zero."""
    x, y = source.table(name)
    layout, classes = Layout(), int(y.max()) + 1
    layout.add(classes, x.shape[1])
    layout.add(classes)

    def loss(flat: Tensor, batch: Batch, training: bool) -> Tensor:
        weight, bias = layout.views(flat)
        return F.cross_entropy(batch[0] @ weight.T + bias, batch[1])

    grid = {"sgd": (-2, 2), "adamw": (-3, 1), "lion": (-4, 0)}[base]
    schedule = step_decay(0.1, (0.6, 0.8, 0.95))
    return Problem(layout, loss, (x, y), 64, 300, schedule, base, half_decades(*grid))


def perceptron(
    source: Source,
    base: str,
    *,
    batch: int = 32,
    steps: int = 300,
    schedule: Schedule | None = None,
    dropout: float = 0.0,
) -> Problem:
    """Two hidden layers on the digits of scikit-learn."""
    x, y = source.table("digits8x8")
    layout, sizes = Layout(), (x.shape[1], 128, 128, int(y.max()) + 1)
    for before, after, gain in zip(sizes[:-1], sizes[1:], (2, 2, 1), strict=True):
        layout.add(after, before, std=(1 / before) ** 0.5 * gain**0.5)
        layout.add(after)

    def loss(flat: Tensor, batch: Batch, training: bool) -> Tensor:
        *hidden, weight, bias = layout.views(flat)
        h = batch[0]
        for w, b in zip(hidden[::2], hidden[1::2], strict=True):
            h = F.relu(h @ w.T + b)
            h = F.dropout(h, dropout) if dropout and training else h
        return F.cross_entropy(h @ weight.T + bias, batch[1])

    grid = {
        "sgd": (-3, 1),
        "adamw": (-4, 0),
        "lion": (-5, -1),
        "rmsprop": (-4.5, -0.5),
        "adagrad": (-3, 1),
    }[base]
    schedule = schedule or cosine()
    return Problem(layout, loss, (x, y), batch, steps, schedule, base, half_decades(*grid))


def resnet(source: Source, base: str, schedule: Schedule) -> Problem:
    """Three residual blocks with batch normalisation, on CIFAR-10 at 16×16."""
    widths, layout = (16, 32, 64), Layout()

    def declare(inputs: int, outputs: int) -> None:
        layout.add(outputs, inputs, 3, 3, std=(2 / (inputs * 9)) ** 0.5)
        layout.add(outputs, value=1)
        layout.add(outputs)

    declare(3, widths[0])
    for inputs, outputs in zip((widths[0], *widths[:-1]), widths, strict=True):
        declare(inputs, outputs)
        declare(outputs, outputs)
        if inputs != outputs:
            layout.add(outputs, inputs, 1, 1, std=(1 / inputs) ** 0.5)
    layout.add(10, widths[-1], std=(1 / widths[-1]) ** 0.5)
    layout.add(10)

    def normal(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = h.mean((0, 2, 3), keepdim=True)
        variance = h.var((0, 2, 3), keepdim=True, unbiased=False)
        h = (h - mean) * torch.rsqrt(variance + 1e-5)
        return h * weight[:, None, None] + bias[:, None, None]

    def loss(flat: Tensor, batch: Batch, training: bool) -> Tensor:
        views = iter(layout.views(flat))

        def convolve(h: Tensor, stride: int = 1) -> Tensor:
            h = F.conv2d(h, next(views), padding=1, stride=stride)
            return normal(h, next(views), next(views))

        h = F.relu(convolve(batch[0]))
        for width in widths:
            stride = 1 if width == h.shape[1] else 2
            residual = convolve(F.relu(convolve(h, stride)))
            if stride == 2:
                h = F.conv2d(h, next(views), stride=2)
            h = F.relu(h + residual)
        return F.cross_entropy(h.mean((2, 3)) @ next(views).T + next(views), batch[1])

    grid = {"sgd": (-2.5, 0.5), "adamw": (-4, -1)}[base]
    options = {"weight_decay": {"sgd": 5e-4, "adamw": 0.1}[base]}
    lrs, images = half_decades(*grid), source.images()
    how = (128, 600, schedule, base, lrs, options)
    return Problem(layout, loss, images, *how, clip=1.0, evals=4096)


def gpt(
    source: Source,
    base: str,
    *,
    text: str = "novels",
    steps: int = 600,
    schedule: Schedule | None = None,
    decay: bool = True,
    clip: float = 1.0,
    first: Tensor | None = None,
) -> Problem:
    """Four layers over letters."""
    width, heads, layers, context, std = 128, 4, 4, 64, 0.02
    layout = Layout()
    layout.add(LETTERS, width, std=std)
    layout.add(context, width, std=std)
    thin = std / math.sqrt(2 * layers)

    def declare_norm() -> None:
        layout.add(width, value=1)
        layout.add(width)

    for _ in range(layers):
        declare_norm()
        layout.add(3 * width, width, std=std)
        layout.add(width, width, std=thin)
        declare_norm()
        layout.add(4 * width, width, std=std)
        layout.add(4 * width)
        layout.add(width, 4 * width, std=thin)
        layout.add(width)
    declare_norm()
    mask = torch.full((context, context), -1e9, device=source.device).triu(1)

    def loss(flat: Tensor, batch: Batch, training: bool) -> Tensor:
        views = iter(layout.views(flat))
        embedding = next(views)
        inputs, targets = batch[0][:, :-1], batch[0][:, 1:]

        def normal(h: Tensor) -> Tensor:
            return F.layer_norm(h, (width,), next(views), next(views))

        def attend(h: Tensor) -> Tensor:
            parts = (h @ next(views).T).view(*inputs.shape, 3, heads, width // heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-1, -2)) / math.sqrt(width // heads) + mask
            mixed: Tensor = (weights.softmax(-1) @ v).transpose(1, 2).reshape(*inputs.shape, width)
            return mixed @ next(views).T

        h = F.embedding(inputs, embedding) + next(views)
        for _ in range(layers):
            h = h + attend(normal(h))
            inner = F.gelu(normal(h) @ next(views).T + next(views))
            h = h + inner @ next(views).T + next(views)
        return F.cross_entropy((normal(h) @ embedding.T).flatten(0, 1), targets.flatten())

    weight_decay = {"adamw": 0.1, "lion": 0.3}[base] if decay else 0.0
    betas = {"betas": (0.9, 0.95)} if base == "adamw" else {}
    grid = {"adamw": (-4, -1), "lion": (-5, -2)}[base]
    options = {"weight_decay": weight_decay, **betas}
    how = (32, steps, schedule or cosine(0.05), base, half_decades(*grid), options)
    windows = source.windows(text, context)
    return Problem(layout, loss, windows, *how, clip=clip, evals=1024, first=first)


def lstm(source: Source) -> Problem:
    """One layer over letters, with AdamW."""
    width, context = 128, 32
    std = width**-0.5 / 3**0.5
    layout = Layout()
    layout.add(LETTERS, width, std=0.1)
    layout.add(4 * width, width, std=std)
    layout.add(4 * width, width, std=std)
    layout.add(4 * width)
    layout.add(LETTERS, width, std=std)
    layout.add(LETTERS)

    def loss(flat: Tensor, batch: Batch, training: bool) -> Tensor:
        embedding, of_input, of_state, bias, weight, out_bias = layout.views(flat)
        x = F.embedding(batch[0][:, :-1], embedding) @ of_input.T + bias
        h = c = torch.zeros_like(x[:, 0, :width])
        states = []
        for k in range(context):
            i, f, o, new = (x[:, k] + h @ of_state.T).chunk(4, -1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(new)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        outputs = torch.stack(states, 1) @ weight.T + out_bias
        return F.cross_entropy(outputs.flatten(0, 1), batch[0][:, 1:].flatten())

    options = {"betas": (0.9, 0.98), "weight_decay": 0.01}
    how = (32, 400, cosine(0.05), "adamw", half_decades(-4, -0.5), options)
    windows = source.windows("novels", context, 60_000)
    return Problem(layout, loss, windows, *how, clip=1.0, evals=1024)
