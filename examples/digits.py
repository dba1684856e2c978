"""One run of Mechanic against a sweep of nine learning rates, on scikit-learn's handwritten digits.

    make demo
    python examples/digits.py --output demo.png --steps 250 --seed 0

AdamW and SGD with momentum train a small network on digits shifted by up to a pixel. The sweep runs
nine learning rates. Mechanic runs once with each of the typed learning rates 1e-4, 1 and 1e4. All
runs share the initial weights, the batches and a cosine schedule without warm-up. The seed
determines all of these; try others.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import mechanize, tuner

# Half decades: two decades to either side of a usual choice, 0.01 for AdamW and 0.1 for SGD.
SWEEPS = {
    "AdamW": [10 ** (k / 2) for k in range(-8, 1)],
    "SGD with momentum": [10 ** (k / 2) for k in range(-6, 3)],
}
TYPED = [1e-4, 1.0, 1e4]
GUESSING = math.log(10)  # the loss of giving each digit the same probability

# The colours of Okabe and Ito, which suit all kinds of colour vision. The three lines of Mechanic
# coincide, so each is thinner than the one below it.
STYLES: dict[str, dict[str, Any]] = {
    "best of sweep": {"color": "#e69f00", "marker": "*", "markersize": 14, "zorder": 3},
    "10x too small": {"color": "#cc79a7", "marker": "v", "markersize": 9},
    "10x too large": {"color": "#d55e00", "marker": "^", "markersize": 9},
    "Mechanic, typed 0.0001": {"color": "#56b4e9", "linewidth": 6},
    "Mechanic, typed 1": {"color": "#0072b2", "linewidth": 3, "linestyle": "--"},
    "Mechanic, typed 10000": {"color": "black", "linewidth": 1.5, "linestyle": ":"},
}
LOSS_TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
TOP = 5  # where the plot cuts the loss of runs that blow up

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # images and labels to train on, then to test on


class Run(NamedTuple):
    typed: float
    found: float  # the lr before its schedule: the typed one, or the median of Mechanic's
    rates: list[float]  # the lr in force, step by step
    losses: list[float]  # the loss of the batch, step by step
    train_loss: float  # over all training images at the end; infinite if the run diverged
    accuracy: float  # on the test images, in percent


class Comparison(NamedTuple):
    sweep: list[Run]
    mechanic: list[Run]

    def best(self) -> Run:
        return min(self.sweep, key=lambda run: run.train_loss)

    def shown(self) -> dict[str, Run]:
        """By label: the sweep's best, the runs at ten times less and more, and Mechanic's."""
        best = self.sweep.index(self.best())
        places = {"best of sweep": best, "10x too small": best - 2, "10x too large": best + 2}
        runs = {label: self.sweep[i] for label, i in places.items() if 0 <= i < len(self.sweep)}
        return runs | {f"Mechanic, typed {run.typed:g}": run for run in self.mechanic}


def shifted(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each image in nine places: more than a small network can memorize in a few steps."""
    padded = pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    places = [padded[:, i : i + 8, j : j + 8].flatten(1) for i in range(3) for j in range(3)]
    return torch.cat(places), labels.repeat(9)


def load_data(seed: int) -> Data:
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    parts = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    return *shifted(parts[0], parts[2]), *shifted(parts[1], parts[3])


def make_network() -> nn.Module:
    hidden = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def train(
    data: Data, name: str, lr: float, mechanic: bool, steps: int, tick: Callable[[], None]
) -> Run:
    images, labels, test_images, test_labels = data
    network = make_network()
    optimizer: Optimizer = AdamW(network.parameters(), lr=lr)
    if name == "SGD with momentum":
        optimizer = SGD(network.parameters(), lr=lr, momentum=0.9)
    if mechanic:
        optimizer = mechanize(optimizer)
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    found, rates, losses = [], [], []
    for _ in range(steps):
        batch = torch.randint(len(labels), (64,))
        loss = cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(tuner(optimizer).suggest_lr()[0] if mechanic else lr)
        rate = tuner(optimizer).effective_lr[0] if mechanic else optimizer.param_groups[0]["lr"]
        rates.append(float(rate))
        losses.append(loss.item())
        schedule.step()
        tick()
    with torch.no_grad():
        end = cross_entropy(network(images), labels).item()
        right = network(test_images).argmax(1) == test_labels
    accuracy = 100 * right.float().mean().item()
    return Run(lr, median(found), rates, losses, end if math.isfinite(end) else math.inf, accuracy)


def compare(steps: int, seed: int) -> dict[str, Comparison]:
    """All runs, with two progress bars: for the runs, and for the steps of the current one."""
    data = load_data(seed)
    jobs = [(name, lr, False) for name in SWEEPS for lr in SWEEPS[name]]
    jobs += [(name, lr, True) for name in SWEEPS for lr in TYPED]
    results = {name: Comparison([], []) for name in SWEEPS}
    columns = TextColumn("{task.description:<38}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        runs = progress.add_task("all runs", total=len(jobs))
        present = progress.add_task("", total=steps)
        for name, lr, mechanic in jobs:
            method = "Mechanic" if mechanic else "sweep"
            progress.reset(present, description=f"{name}, {method}, lr {lr:.3g}")
            torch.manual_seed(seed)
            run = train(data, name, lr, mechanic, steps, lambda: progress.advance(present))
            (results[name].mechanic if mechanic else results[name].sweep).append(run)
            progress.advance(runs)
    return results


def make_table(results: dict[str, Comparison], title: str) -> Table:
    sweeps = [run for result in results.values() for run in result.sweep]
    lost = sum(run.train_loss >= GUESSING for run in sweeps)
    caption = (
        "Best: the lowest train loss. Found by Mechanic: the median over the steps. "
        f"{lost} of the {len(sweeps)} sweep runs ended no better than guessing."
    )
    table = Table("run", title=title, caption=caption)
    for column in ("lr typed", "train loss", "test acc.", "lr found", "runs"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(f"[bold]{name}")
        for label, run in result.shown().items():
            loss = f"{run.train_loss:.3f}" if run.train_loss < math.inf else "diverged"
            found = "" if label.startswith("10x") else f"{run.found:.3g}"
            spent = len(result.sweep) if run is result.best() else 1
            cells = f"{run.typed:.3g}", loss, f"{run.accuracy:.1f} %", found, str(spent)
            table.add_row("  " + label.split(",")[0], *cells)
        table.add_section()
    return table


def span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def verdict(name: str, result: Comparison) -> str:
    best = result.best()
    losses = span([run.train_loss / best.train_loss for run in result.mechanic], ".2f")
    points = span([run.accuracy - best.accuracy for run in result.mechanic], "+.1f")
    return (
        f"{name}: one run of Mechanic ends at {losses} times the train loss of the best of "
        f"{len(result.sweep)} runs, with {points} points of test accuracy"
    )


def plot_ends(ax: Axes, result: Comparison) -> None:
    ax.axhline(GUESSING, color="0.6", linewidth=1)
    ax.text(0.5, GUESSING * 1.05, "guessing", transform=ax.get_yaxis_transform(), ha="center")
    ends = [min(run.train_loss, TOP) for run in result.sweep]
    ax.plot([run.typed for run in result.sweep], ends, "o-", color="0.45", label="sweep")
    for label, run in result.shown().items():
        if run in result.sweep:
            ax.plot(run.typed, min(run.train_loss, TOP), linestyle="", label=label, **STYLES[label])
        else:
            ax.axhline(run.train_loss, zorder=1, label=label, **STYLES[label])
    ends = [run.train_loss for run in result.mechanic]
    found = [run.found for run in result.mechanic]
    ax.plot(found, ends, "D", color="#0072b2", markerfacecolor="white", label="lr found")
    ax.set_xscale("log")
    ax.set(title="Where each run ends", xlabel="learning rate", ylabel=f"train loss, cut at {TOP}")


def plot_losses(ax: Axes, result: Comparison) -> None:
    for label, run in result.shown().items():
        steps = len(run.losses)
        smooth = [fmean(run.losses[max(0, i - 14) : i + 1]) for i in range(steps)]
        ax.plot(smooth, markevery=(steps // 10, steps // 5), **STYLES[label])
    ax.set(title="How the loss gets there", xlabel="step", ylabel="batch loss, mean of 15 steps")


def plot_rates(ax: Axes, result: Comparison) -> None:
    for label, run in result.shown().items():
        if not label.startswith("10x"):
            ax.plot(run.rates, **STYLES[label] | {"marker": ""})
    found, best = [run.found for run in result.mechanic], result.best().typed
    title = f"The lr: typed 1e8 apart, found {max(found) / min(found) - 1:.1%} apart"
    ax.set(title=title, xlabel="step", ylabel="learning rate, with its schedule")
    ax.set(yscale="log", ylim=(best / 1e4, best * 10))


def save_plot(results: dict[str, Comparison], path: Path) -> None:
    figure = Figure(figsize=(15, 5 * len(results)), layout="constrained")
    for row, (name, result) in enumerate(results.items()):
        part = figure.add_subfigure(figure.add_gridspec(len(results))[row])
        part.suptitle(verdict(name, result), fontweight="bold")
        ends, losses, rates = part.subplots(1, 3)
        plot_ends(ends, result)
        plot_losses(losses, result)
        plot_rates(rates, result)
        for ax in ends, losses:
            ax.set_yscale("log")
            ax.set_yticks(LOSS_TICKS, map(str, LOSS_TICKS))
            ax.minorticks_off()
            ax.set_ylim(min(run.train_loss for run in result.shown().values()) / 1.5, TOP)
        for ax in ends, losses, rates:
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ends.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.2)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning-rate sweep against Mechanic.")
    parser.add_argument("--output", type=Path, default="demo.png", help="where to save the plot")
    parser.add_argument("--steps", type=int, default=250, help="steps of each run, at least 10")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split, the weights and the batches"
    )
    options = parser.parse_args()
    if options.output.suffix != ".png" or options.output.is_dir():
        parser.error(f"--output must name a .png file, got {options.output}")
    if options.steps < 10:
        parser.error(f"--steps must be at least 10, got {options.steps}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be from 0 to 4294967295, got {options.seed}")
    try:
        options.output.touch()
    except OSError as error:
        parser.error(f"--output cannot be written: {error}")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # a small network is slower with more threads and with oneDNN
    torch.backends.mkldnn.set_flags(False)
    results = compare(options.steps, options.seed)
    save_plot(results, options.output)
    console = Console()
    console.print(make_table(results, f"Digits, {options.steps} steps, seed {options.seed}"))
    console.print("; ".join(verdict(name, result) for name, result in results.items()) + ".")
    console.print(f"Plot saved as {options.output}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
