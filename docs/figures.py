"""Draws the figures of the docs from real runs, into docs/images.

    make figures    # a minute on one core

All of them train the network of examples/digits.py on scikit-learn's handwritten digits.
"""

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import digits

from mechanic.torch import mechanize, tuner

FOLDER = Path(__file__).parent / "images"
STEPS = 250
COLOURS = 128  # enough for lines and letters
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"

Shape = Callable[[int], float]

SCHEDULES: dict[str, Shape] = {
    "constant": lambda t: 1.0,
    "cosine": lambda t: (1 + math.cos(math.pi * t / STEPS)) / 2,
    "warm-up, then linear": lambda t: min((t + 1) / 50, (STEPS - t) / (STEPS - 50)),
}


class History(NamedTuple):
    """What a run was like, step by step."""

    losses: list[float]
    scales: list[float]
    signals: list[float]
    experts: list[list[float]]
    shape: list[float]


def train(shape: Shape, preset: str = "default") -> History:
    """Train with AdamW at a typed lr of 1, so that the scale is a learning rate."""
    torch.manual_seed(0)
    images, labels, *_ = digits.load_data(0)
    network = digits.make_network()
    optimizer = mechanize(torch.optim.AdamW(network.parameters(), lr=1.0), preset=preset)
    schedule = LambdaLR(optimizer, shape)
    history = History([], [], [], [], [])
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (64,))
        loss = cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers = tuner(optimizer).metrics()
        history.losses.append(loss.item())
        history.scales.append(float(numbers["scale"]))
        history.signals.append(float(numbers["signal"]))
        history.experts.append(numbers["scales"].tolist())
        history.shape.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return history


def draw_ramp(figure: Figure) -> None:
    """The first steps: up as long as each step goes along Δ, then around the right size."""
    run, shown = train(SCHEDULES["cosine"]), 100
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps = range(shown)
    above.plot(steps, run.scales[:shown], color=BLUE)
    against = [t for t in steps if run.signals[t] > 0]
    above.plot(against, [run.scales[t] for t in against], "v", color=ORANGE, markersize=5)
    end = against[0]
    above.axvspan(0, end, color=BLUE, alpha=0.08)
    above.text(end / 2, max(run.scales) * 1.3, "ramp", ha="center", va="bottom")
    above.legend(["scale S", "step against Δ: S falls"], loc="lower right", frameon=False)
    above.set(yscale="log", ylabel="scale (= lr, at a typed lr of 1)")
    above.set_ylim(top=max(run.scales) * 4)
    below.plot(steps, run.losses[:shown], color="0.3")
    below.set(xlabel="step", ylabel="loss")


def draw_schedules(figure: Figure) -> None:
    """S under three schedules: it answers what the schedule does, and keeps its shape."""
    axes = figure.subplots(2, 3, sharex=True, sharey="row")
    for column, (name, shape) in enumerate(SCHEDULES.items()):
        run, (above, below) = train(shape), (axes[0, column], axes[1, column])
        above.plot(run.scales, color=BLUE)
        below.plot([s * lr for s, lr in zip(run.scales, run.shape, strict=True)], color=GREEN)
        below.plot([0.01 * lr for lr in run.shape], color="0.6", linestyle="--")
        above.set(title=f"{name}\nloss at the end {sum(run.losses[-15:]) / 15:.2f}", yscale="log")
        below.set(xlabel="step", yscale="log", ylim=(1e-5, 1))
    axes[0, 0].set_ylabel("scale S")
    axes[1, 0].set_ylabel("lr in force: S × schedule")
    axes[1, 0].legend(["lr in force", "0.01 × schedule"], loc="lower right", frameon=False)


def draw_experts(figure: Figure) -> None:
    """The six tuners of the paper's rule, one for each β, and their sum."""
    run = train(SCHEDULES["cosine"], preset="paper")
    ax = figure.subplots()
    for number, scales in enumerate(zip(*run.experts, strict=True), 1):
        ax.plot(scales, label=f"β = {1 - 10**-number:.{number}f}", linewidth=7 - number)
    ax.plot(run.scales, color="black", linewidth=2, label="their sum, S")
    ax.set(yscale="log", xlabel="step", ylabel="scale of each tuner")
    ax.legend(frameon=False, loc="center right")


def save(name: str, figure: Figure) -> None:
    """Save a figure in the folder of the docs."""
    for ax in figure.axes:
        tidy(ax)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, bbox_inches="tight", pad_inches=0.15)
    shrink(Image.open(buffer), FOLDER / name)


def tidy(ax: Axes) -> None:
    """Take away what a reader does not need."""
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def shrink(image: Image.Image, path: Path) -> None:
    """Keep a figure small enough to be committed."""
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def draw_demo() -> None:
    """The part of the demo's plot that has AdamW, by the demo's own code."""
    results = digits.compare(STEPS, seed=0)
    path = FOLDER / "demo.png"
    with rc_context({"font.size": 12}):
        digits.save_plot({"AdamW": results["AdamW"]}, path)
    shrink(Image.open(path), path)


def main() -> None:
    """Draw all figures."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    FOLDER.mkdir(exist_ok=True)
    with rc_context({"font.size": 11}):
        for name, draw, size in (
            ("ramp.png", draw_ramp, (8, 5)),
            ("schedules.png", draw_schedules, (11, 5.5)),
            ("experts.png", draw_experts, (8, 4.5)),
        ):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            save(name, figure)
    draw_demo()


if __name__ == "__main__":
    main()
