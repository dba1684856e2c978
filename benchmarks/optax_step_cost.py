"""The cost of a mechanized step in JAX, as a ratio to the step of optax.adamw.

    python benchmarks/optax_step_cost.py                          # a tiny model, on any device
    python benchmarks/optax_step_cost.py --size 124M --rounds 50  # GPT-2's shapes, for a GPU
    python benchmarks/optax_step_cost.py --steps 20               # 20 steps in one jit
    python benchmarks/optax_step_cost.py --calls 1 20             # also 20 calls before it waits
    python benchmarks/optax_step_cost.py --output FILE.md         # write the table there too

A step is `update` and `apply_updates` in one `jit`, with parameters and state donated. Everything
is measured in one run, in rounds. A round times one step of every method, so that other work on the
machine affects all of them alike. The ratio is the median over the rounds of a method's time
divided by that of adamw in the same round. The first steps, in which Mechanic measures the norm of
the update, are made before.

With one call a round, the clock also sees the host before and after the device works. Where a model
is trained, the host hands over the next step while the device works on this one: `--calls 20` does
so, with 20 calls a round. `--steps 20` shows the time of the device alone: 20 steps are one call.

Memory is what the compiled step needs at its peak, as the compiler has planned it: arguments,
results that are not written in their place, and what is stored in between.
"""

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mechanic.optax import mechanize, metrics

WARM_UP = 12  # two more than the steps in which the update is measured


class Size(NamedTuple):
    """The size of a GPT-2."""

    width: int
    layers: int
    vocabulary: int
    context: int


SIZES = {
    "tiny": Size(64, 2, 512, 64),
    "10M": Size(256, 6, 16384, 512),
    "124M": Size(768, 12, 50257, 1024),
}

METHODS: dict[str, Callable[[], Any]] = {
    "optax.adamw": lambda: optax.adamw(1e-3),
    "mechanic": lambda: mechanize(optax.adamw(1.0)),
    "mechanic, displacement in bfloat16": lambda: mechanize(
        optax.adamw(1.0), displacement="bfloat16"
    ),
    'mechanic, preset="paper"': lambda: mechanize(optax.adamw(1.0), preset="paper"),
    "optax.contrib.mechanize": lambda: optax.contrib.mechanize(optax.adamw(1.0)),
}
FIRST = "optax.adamw"


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """The parameters of a GPT-2, 12 for each layer and 4 besides."""
    d = size.width
    layer = {
        **{f"{norm}.{part}": (d,) for norm in ("norm1", "norm2") for part in ("scale", "bias")},
        **{"qkv": (d, 3 * d), "qkv.bias": (3 * d,), "out": (d, d), "out.bias": (d,)},
        **{"up": (d, 4 * d), "up.bias": (4 * d,), "down": (4 * d, d), "down.bias": (d,)},
    }
    every = {f"{i}.{name}": own for i in range(size.layers) for name, own in layer.items()}
    ends = {"tokens": (size.vocabulary, d), "places": (size.context, d)}
    return ends | every | {"norm.scale": (d,), "norm.bias": (d,)}


def draw(key: Any, like: dict[str, tuple[int, ...]], scale: float, dtype: Any) -> dict[str, Any]:
    keys = jax.random.split(key, len(like))
    return {
        name: scale * jax.random.normal(own, shape, dtype)
        for own, (name, shape) in zip(keys, like.items(), strict=True)
    }


class Run:
    """One method, with parameters of its own."""

    def __init__(self, tx: Any, make_params: Callable[[], Any], grads: Any, steps: int) -> None:
        self.steps = steps
        self.params = make_params()
        self.state = jax.tree.map(jnp.copy, tx.init(self.params))  # contrib's holds the parameters

        def step(t: Any, carried: Any, grads: Any) -> Any:
            params, state = carried
            # As if they were new in each step, or the compiler would take their norm once.
            grads, _ = jax.lax.optimization_barrier((grads, t))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def call(params: Any, state: Any, grads: Any) -> Any:
            if steps == 1:
                return step(jnp.float32(0), (params, state), grads)
            return jax.lax.fori_loop(0, steps, partial(step, grads=grads), (params, state))

        jitted = jax.jit(call, donate_argnums=(0, 1))
        self.compiled = jitted.lower(self.params, self.state, grads).compile()

    def step(self, grads: Any, calls: int = 1) -> float:
        """Make some calls; the seconds for each step, to the end of the last kernel."""
        began = time.perf_counter()
        for _ in range(calls):
            self.params, self.state = self.compiled(self.params, self.state, grads)
        jax.block_until_ready((self.params, self.state))
        return (time.perf_counter() - began) / self.steps / calls

    @property
    def bytes(self) -> int:
        plan = self.compiled.memory_analysis()
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return int(plan.argument_size_in_bytes + results + plan.temp_size_in_bytes)


def measure(
    size: Size, methods: list[str], rounds: int, dtype: Any, steps: int, calls: list[int]
) -> dict[int, dict[str, list[str]]]:
    """The cells of a row for each method, for each number of calls."""
    like = shapes(size)
    new_grads = jax.jit(lambda t: draw(jax.random.fold_in(jax.random.key(1), t), like, 1e-3, dtype))
    make_params = partial(draw, jax.random.key(0), like, 0.02, dtype)
    grads = new_grads(0)
    runs = {name: Run(METHODS[name](), make_params, grads, steps) for name in methods}
    for t in range(WARM_UP):
        for run in runs.values():
            run.step(new_grads(t))
    tables = {}
    for count in calls:
        times: dict[str, list[float]] = {name: [] for name in methods}
        for t in range(rounds):
            grads = jax.block_until_ready(new_grads(WARM_UP + t))
            for name, run in runs.items():
                times[name].append(run.step(grads, count))
        tables[count] = show(runs, times)
    return tables


def show(runs: dict[str, Run], times: dict[str, list[float]]) -> dict[str, list[str]]:
    rows = {}
    for name, run in runs.items():
        ratios = [own / first for own, first in zip(times[name], times[FIRST], strict=True)]
        least, most = statistics.quantiles(ratios, n=10)[::8]
        rows[name] = [
            f"{1e3 * statistics.median(times[name]):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{least:.2f} to {most:.2f}",
            f"{run.bytes / 2**20:,.1f}",
            f"{run.bytes / runs[FIRST].bytes:.2f}",
        ]
        if name.startswith("mechanic"):
            assert int(metrics(run.state)["skipped"]) == 0
    return rows


def table(rows: dict[str, list[str]]) -> str:
    head = ["method", "ms", "ratio", "nine of ten", "MiB at the peak", "ratio of memory"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[f"`{name}`", *cells] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1, help="the steps of one call")
    parser.add_argument(
        "--calls", type=int, nargs="+", default=[1], help="the calls of a round, for each table"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    if min(args.steps, *args.calls) < 1:
        parser.error(f"--steps and --calls must be at least 1, got {args.steps}, {args.calls}")
    methods = list(dict.fromkeys([FIRST, *args.methods]))
    size = SIZES[args.size]
    count = sum(int(jnp.prod(jnp.array(shape))) for shape in shapes(size).values())
    device = jax.devices()[0]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "optax"))
    head = (
        f"{args.size}: {count:,} parameters in {len(shapes(size))} arrays of {args.dtype}, "
        f"{args.rounds} rounds, {args.steps} steps a call, "
        f"on {device.device_kind} ({device.platform}, {platform.machine()}), "
        f"{packages}, {datetime.date.today()}\n"
    )
    own = size, methods, args.rounds, jnp.dtype(args.dtype), args.steps, args.calls
    tables = measure(*own)
    text = "\n".join(
        [head, *(f"{count} calls a round:\n\n{table(rows)}\n" for count, rows in tables.items())]
    )
    print(text)
    if args.output:
        args.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
