"""What the scale does in noise: the scalar rule alone, many seeds at once, without a model.

    python research/noise.py                       # the default, some 30 s
    python research/noise.py --steps 100000 --preset paper

After a ramp of 20 steps whose gradients lie along the displacement, every cosine is drawn around 0,
whatever the scale. A scale that is safe stays within a factor of 2 upwards and of 10 downwards of
where it was 20 steps after the ramp, at every step. The table counts the seeds in which it did not.
"""

import argparse
from collections.abc import Callable

import numpy as np

from mechanic.options import Options
from mechanic.tuner import State, Sums, init, update

SEEDS, RAMP, SETTLED, OUTLIER_AT = 32, 20, 20, 300
SIZES = (1e-4, 1e-3, 1e-2, 0.05, 0.2, 0.7)
UP, DOWN = 2.0, 0.1

Numbers = np.ndarray
Draw = Callable[[np.random.Generator, Numbers], Numbers]


class Runs(np.ndarray):
    """Numbers of independent runs. A rule that sums over its tuners finds one in each."""

    def sum(self, *_: object, **__: object) -> "Runs":  # type: ignore[override]
        return self

    def __len__(self) -> int:
        return 1


def following(correlation: float) -> Draw:
    """Normal numbers that follow the ones before."""

    def draw(generator: np.random.Generator, before: Numbers) -> Numbers:
        fresh = np.sqrt(1 - correlation**2) * generator.normal(size=before.shape)
        return correlation * before + fresh

    return draw


KINDS: dict[str, Draw] = {
    "normal": following(0.0),
    "heavy tails": lambda generator, before: generator.standard_t(2, size=before.shape),
    "signs alone": lambda generator, before: generator.choice([-1.0, 1.0], size=before.shape),
    "correlated, 0.5": following(0.5),
    "correlated, 0.9": following(0.9),
    "one outlier": following(0.0),
}


def simulate(options: Options, kind: str, steps: int) -> tuple[Numbers, Numbers]:
    """The largest and the smallest scale over the settled one, for each size and seed."""
    generator, sizes = np.random.default_rng(0), np.repeat(SIZES, SEEDS)
    state: State = init(options, np.full(sizes.shape, options.betas[0]).view(Runs))
    noise = generator.normal(size=sizes.shape)
    settled, high, low = np.ones(sizes.shape), np.ones(sizes.shape), np.ones(sizes.shape)
    for step in range(RAMP + steps):
        noise = KINDS[kind](generator, noise)
        times = 100.0 if kind == "one outlier" and step == RAMP + OUTLIER_AT else 1.0
        cosine = np.full(sizes.shape, 0.3) if step < RAMP else np.clip(sizes * noise * times, -1, 1)
        one = np.ones(sizes.shape)
        sums = Sums(
            dg=-cosine * times,
            dx=0 * one,
            gg=times**2 * one,
            xx=one,
            x1=one,
            d=1e4 * one,
            dd=one,
            uu=one * (step < 10),
        )
        with np.errstate(all="ignore"):
            state, _ = update(options, state, Sums(*(value.view(Runs) for value in sums)))
        scale = np.asarray(state.s)
        if step == RAMP + SETTLED:
            settled = scale
        elif step > RAMP + SETTLED:
            high, low = np.maximum(high, scale / settled), np.minimum(low, scale / settled)
    return high.reshape(len(SIZES), SEEDS), low.reshape(len(SIZES), SEEDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--preset", default="default")
    asked = parser.parse_args()
    options = Options(preset=asked.preset, betas=(0.99,))
    print(
        f"{asked.preset}, {asked.steps:,} steps, {SEEDS} seeds of each size: seeds above × {UP:g}"
    )
    print(f"and below × {DOWN:g}, and the extremes of all\n")
    print("| noise |", " | ".join(f"{size:g}" for size in SIZES), "| highest | lowest |")
    print("|---" * (len(SIZES) + 3) + "|")
    for kind in KINDS:
        high, low = simulate(options, kind, asked.steps)
        cells = zip((high > UP).sum(1), (low < DOWN).sum(1), strict=True)
        counts = " | ".join(f"{up}, {down}" for up, down in cells)
        print(f"| {kind} | {counts} | {high.max():.3g} | {low.min():.3g} |", flush=True)


if __name__ == "__main__":
    main()
