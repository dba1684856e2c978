"""Draws the figures of the docs from real runs, into docs/images.

    make figures    # a minute on one core

All of them train the network of examples/digits.py on scikit-learn's handwritten digits. They are
narrow, with large letters, so that they can be read on a phone too.
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
WIDTH = 6.0  # inches; the letters are 12 points, which is 10 pixels on a phone of 390
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
    above.set(yscale="log", ylabel="scale S = lr")
    above.set_ylim(top=max(run.scales) * 4)
    below.plot(steps, run.losses[:shown], color="0.3")
    below.set(xlabel="step", ylabel="loss")


def draw_schedules(figure: Figure) -> None:
    """S under three schedules: it answers what the schedule does, and keeps its shape."""
    axes = figure.subplots(3, 1, sharex=True, sharey=True)
    for ax, (name, shape) in zip(axes, SCHEDULES.items(), strict=True):
        run = train(shape)
        in_force = [s * lr for s, lr in zip(run.scales, run.shape, strict=True)]
        ax.plot(run.scales, color=BLUE, label="scale S", linewidth=4)
        ax.plot(in_force, color=GREEN, label="lr in force, S × schedule")
        ax.plot([0.01 * lr for lr in run.shape], "--", color="0.6", label="0.01 × schedule")
        end = sum(run.losses[-15:]) / 15
        ax.set_title(f"{name}: loss at the end {end:.2f}", fontsize="medium")
        ax.set(yscale="log", ylim=(1e-5, 2))
    axes[-1].set_xlabel("step")
    axes[0].legend(loc="lower right", frameon=False)


def draw_experts(figure: Figure) -> None:
    """The six tuners of the paper's rule, one for each β, and their sum."""
    run = train(SCHEDULES["cosine"], preset="paper")
    ax = figure.subplots()
    for number, scales in enumerate(zip(*run.experts, strict=True), 1):
        ax.plot(scales, label=f"β = {1 - 10**-number:.{number}f}", linewidth=7 - number)
    ax.plot(run.scales, color="black", linewidth=2, label="their sum, S")
    ax.set(yscale="log", xlabel="step", ylabel="scale of each tuner")
    ax.legend(frameon=False, loc="center right")


def draw_demo(figure: Figure) -> None:
    """Where each run of AdamW in the demo ends, by the lr that was typed."""
    result, ax = digits.compare(STEPS, seed=0)["AdamW"], figure.subplots()
    guessing, best = digits.GUESSING, result.best()
    ax.axhline(guessing, color="0.6", linewidth=1)
    ax.text(1e4, guessing * 1.07, "guessing", color="0.4", ha="right")
    typed = [run.typed for run in result.sweep]
    ends = [min(run.train_loss, digits.TOP) for run in result.sweep]
    ax.plot(typed, ends, "o-", color=ORANGE, linewidth=2, markersize=7)
    ax.text(3, 0.75, "AdamW: nine runs,\nthe best at 0.01", color=ORANGE, va="center")
    ax.plot(best.typed, best.train_loss, "*", color=ORANGE, markersize=18)
    ours = [run.train_loss for run in result.mechanic]
    ax.plot(digits.TYPED, ours, "D-", color=BLUE, linewidth=3, markersize=9)
    ax.text(
        1, 1.12 * ours[1], "AdamW with Mechanic: three runs", color=BLUE, va="bottom", ha="center"
    )
    ax.set(xscale="log", xlabel="typed learning rate", yscale="log", ylabel="train loss at the end")
    ax.set_xticks([10.0**power for power in range(-4, 5, 2)])
    ax.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    ax.minorticks_off()
    ax.set_ylim(0.1, 3.3)
    print(digits.verdict("AdamW", result))


def save(name: str, figure: Figure) -> None:
    """Save a figure in the folder of the docs."""
    for ax in figure.axes:
        tidy(ax)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=160, bbox_inches="tight", pad_inches=0.15)
    shrink(Image.open(buffer), FOLDER / name)


def tidy(ax: Axes) -> None:
    """Take away what a reader does not need."""
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def shrink(image: Image.Image, path: Path) -> None:
    """Keep a figure small enough to be committed."""
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Draw all figures."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    FOLDER.mkdir(exist_ok=True)
    with rc_context({"font.size": 12}):
        for name, draw, height in (
            ("ramp.png", draw_ramp, 4.5),
            ("schedules.png", draw_schedules, 7),
            ("experts.png", draw_experts, 4.5),
            ("demo.png", draw_demo, 4),
        ):
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            draw(figure)
            save(name, figure)


if __name__ == "__main__":
    main()
