"""The cost of a mechanized step, as a ratio to the step of its base.

    python benchmarks/step_cost.py                               # on the CPU, one thread
    python benchmarks/step_cost.py --device cuda --whole-step    # on a GPU: everything
    python benchmarks/step_cost.py --device cuda --cases 124M --methods mechanic black-box
    python benchmarks/step_cost.py --device cuda --methods mechanic-dtensor    # sharded parameters
    python benchmarks/step_cost.py --device cuda --cases --whole-step    # training steps alone
    python benchmarks/step_cost.py --output FILE.md              # write the tables there too

Everything is measured in one run, in rounds. A round times one step of every method, so that other
work on the machine affects all of them alike. The ratio is the median over the rounds of a method's
time divided by its base's time in the same round. On a GPU the clock runs from before the first
call of the host to the end of the last kernel. The gradients are drawn again in each round.

The rows "over DTensors" are sharded over one process: all that sharding costs the host and the
device is there, with a message over nccl that travels nowhere.
"""

import argparse
import datetime
import math
import platform
import random
import statistics
import subprocess
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

import torch
from gpu_cases import (
    FIRST,
    GPT2,
    LOOKED_AT,
    PADDED,
    SEED,
    WHOLE,
    Gradients,
    Method,
    Params,
    Result,
    Row,
    Shapes,
    Work,
    clock,
    copy_bandwidth,
    free_memory,
    loss,
    shapes,
    start,
    training_steps,
)
from sharded_cases import ROWS, leave
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import mechanize
from mechanic.torch.native import step as native

Emit = Callable[..., None]

WARM_UP = {"cpu": FIRST, "cuda": LOOKED_AT}
PLAIN = "on the plain path"  # as where there is no C compiler
TOKENS = (32, 1024)
RUN = 3  # training steps that are timed together, because the host works ahead of the GPU

# name: the shapes of the parameters
CASES: dict[str, dict[str, Shapes]] = {
    "cpu": {
        "25M in 100 tensors": [(500, 500)] * 100,
        "25M in 4 tensors": [(2500, 2500)] * 4,
        "0.5M in 500 tensors": [(1000,)] * 500,
        "5K in 4 tensors": [(64, 64), (64,), (10, 64), (10,)],
    },
    "cuda": {
        "124M": shapes(768, 12),
        "1.56B": shapes(1600, 48),
        "1M": [(1000,)] * 1000,
    },
}


def methods() -> dict[str, dict[str, Method]]:
    """On a CPU: each base, and the methods that are compared with it; the base comes first."""
    import mechanic_pytorch
    import prodigyopt

    def peer(base: type[Optimizer]) -> type[Optimizer]:
        return mechanic_pytorch.mechanize(base)

    return {
        "AdamW": {
            "base": lambda p: AdamW(p, lr=1e-3),
            "mechanic": lambda p: mechanize(AdamW(p, lr=1e-3)),
            PLAIN: lambda p: mechanize(AdamW(p, lr=1e-3)),
            "mechanic-pytorch": lambda p: peer(AdamW)(p, lr=1e-3),
            "Prodigy": lambda p: prodigyopt.Prodigy(p),
        },
        "AdamW(fused=True)": {
            "base": lambda p: AdamW(p, lr=1e-3, fused=True),
            "mechanic": lambda p: mechanize(AdamW(p, lr=1e-3, fused=True)),
            PLAIN: lambda p: mechanize(AdamW(p, lr=1e-3, fused=True)),
            "mechanic-pytorch": lambda p: peer(AdamW)(p, lr=1e-3, fused=True),
            "Prodigy": lambda p: prodigyopt.Prodigy(p),
        },
        "SGD(momentum=0.9)": {
            "base": lambda p: SGD(p, lr=1e-3, momentum=0.9),
            "mechanic": lambda p: mechanize(SGD(p, lr=1e-3, momentum=0.9)),
            PLAIN: lambda p: mechanize(SGD(p, lr=1e-3, momentum=0.9)),
            "mechanic-pytorch": lambda p: peer(SGD)(p, lr=1e-3, momentum=0.9),
        },
    }


def make_params(gradients: list[torch.Tensor]) -> Params:
    """Parameters that have these gradients."""
    generator = torch.Generator().manual_seed(SEED)
    params = []
    for gradient in gradients:
        param = torch.nn.Parameter(torch.randn(gradient.shape, generator=generator) * 0.02)
        param.grad = gradient
        params.append(param)
    return params


def on_plain_path(step: Callable[[], object]) -> Callable[[], None]:
    """A step that no compiled code makes."""

    def run() -> None:
        was_on, native.IS_ON = native.IS_ON, False
        try:
            step()
        finally:
            native.IS_ON = was_on

    return run


def in_rounds(
    works: dict[str, Work],
    device: str,
    rounds: int,
    warm_up: int,
    begin_round: Callable[[], object] = lambda: None,
) -> dict[str, list[list[float]]]:
    """The times of each work: one list for each of its parts, which run one after another."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in works[name]] for name in works}
    order, chance = list(works), random.Random(SEED)
    for turn in range(warm_up + rounds):
        begin_round()
        chance.shuffle(order)  # so that no method always follows the same other one
        for name in order:
            for part, kept in zip(works[name], times[name], strict=True):
                seconds = clock(part, device)
                if turn >= warm_up:
                    kept.append(seconds)
    return times


def ratios(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """The median over the rounds, and the bounds of the middle half."""
    own = sorted(time / other for time, other in zip(times, base, strict=True))
    quarter = len(own) // 4
    return statistics.median(own), own[quarter], own[-1 - quarter]


def show_ratio(times: list[float], base: list[float]) -> str:
    """Two cells of a table."""
    middle, low, high = (f"{r:.1f}" if r >= 10 else f"{r:.3f}" for r in ratios(times, base))
    return f"{middle}× | {low} – {high}"


def cpu_table(rounds: int, emit: Emit) -> None:
    columns = ("mechanic", PLAIN, "mechanic-pytorch", "Prodigy")
    emit(
        f"| parameters | base | ms | {' | '.join(columns)} |", "|---|---|---:|---:|---:|---:|---:|"
    )
    chance = torch.Generator().manual_seed(SEED)
    for case, sizes in CASES["cpu"].items():
        gradients = [torch.empty(shape) for shape in sizes]

        def draw(gradients: list[torch.Tensor] = gradients) -> None:
            for gradient in gradients:
                gradient.normal_(std=1e-3, generator=chance)

        for base, variants in methods().items():
            made = {n: make(make_params(gradients)) for n, make in variants.items()}
            works: dict[str, Work] = {n: [optimizer.step] for n, optimizer in made.items()}
            works[PLAIN] = [on_plain_path(made[PLAIN].step)]
            times = in_rounds(works, "cpu", rounds, WARM_UP["cpu"], draw)
            own = {n: parts[0] for n, parts in times.items()}
            cells = [f"{ratios(own[n], own['base'])[0]:.2f}×" if n in own else "–" for n in columns]
            median = statistics.median(own["base"]) * 1e3
            emit(f"| {case} | {base} | {median:.2f} | {' | '.join(cells)} |")


def groups(names: Iterable[str], room: float) -> list[list[str]]:
    """Split the methods into groups that fit in `room` words per parameter, each with its base."""
    made: list[list[str]] = []
    for name in names:
        both = dict.fromkeys([ROWS[name].base, name])
        joined = list(dict.fromkeys(made[-1] if made else []) | both)
        kept = sum(ROWS[n].kept for n in joined) + max(ROWS[n].passing for n in joined)
        if made and kept + 1 <= room:  # 1: the gradients
            made[-1] = joined
        else:
            made.append(list(both))
    return made


def measure_group(
    names: list[str], case: Shapes, rounds: int, device: str
) -> dict[str, Result | str]:
    """Time methods that fit into the memory together; a method that fails gives its error."""
    gradients = Gradients(case, device)
    works: dict[str, Work] = {}
    results: dict[str, Result | str] = {}
    for name in names:
        try:
            works[name], results[name] = start(ROWS[name], gradients, device)
        except Exception as error:  # an error of one package must not stop the others
            traceback.print_exc()
            results[name] = f"failed: {type(error).__name__}"
        free_memory()
    for name, parts in in_rounds(works, device, rounds, 2, gradients.draw).items():
        results[name].steps = parts.pop()
        results[name].backwards = parts.pop() if parts else []
    return results


def gpu_table(
    case: str, names: Iterable[str], rounds: int, copy: float, emit: Emit, device: str = "cuda"
) -> None:
    """All rows of a case, each group as soon as it is measured, and then the notes."""
    sizes = CASES["cuda"][case]
    size = sum(map(math.prod, sizes))
    emit(f"## {case} parameters in {len(sizes):,} tensors", "")
    emit("| method | over | ms | ratio | middle half | bytes | of a copy | state | peak | first |")
    emit("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    lacking = {name: reason for name in names if (reason := ROWS[name].lacks())}
    room = torch.cuda.mem_get_info()[0] * 0.92 / 4 / size if device == "cuda" else math.inf
    told: set[str] = set()
    notes = []
    for group in groups([name for name in names if name not in lacking], room):
        results = measure_group(group, sizes, rounds, device)
        free_memory()
        for name in group:
            row, own = ROWS[name], results[name]
            if name not in told:
                emit(show_row(row, own, results[row.base], size, copy))
            elif isinstance(own, Result):
                ms = statistics.median(own.steps) * 1e3
                notes.append(f"{row.label}: {ms:.2f} ms in the rounds with {ROWS[group[-1]].label}")
            if row.arrives and isinstance(own, Result):
                ms = statistics.median(own.backwards) * 1e3
                notes.append(
                    f"{row.label}: {ms:.2f} ms for the backward pass that takes the sums, "
                    f"{own.plain_backward * 1e3:.2f} for one that does not"
                )
        told.update(group)
    for name, reason in lacking.items():
        emit(show_row(ROWS[name], reason, reason, size, copy))
    emit("", *(f"- {note}" for note in notes), *[""] * bool(notes))


def show_row(row: Row, own: Result | str, base: Result | str, size: int, copy: float) -> str:
    over = ROWS[row.base].label
    cells = [row.label, "–" if row.label == over else over]
    if isinstance(own, str):
        return f"| {' | '.join([*cells, '–', own, *['–'] * 6])} |"
    seconds = statistics.median(own.steps)
    ratio = show_ratio(own.steps, base.steps) if isinstance(base, Result) else "– | –"
    cells += [f"{seconds * 1e3:.2f}", ratio]
    if row.words is None:
        cells += ["–", "–"]
    else:
        cells += [f"{4 * row.words:g}", f"{4 * row.words * size / seconds / copy:.0%}"]
    cells += ["–"] * 3 if own.memory is None else [f"{value:.1f}" for value in own.memory]
    return f"| {' | '.join(cells)} |"


def whole_step(
    rounds: int,
    emit: Emit,
    device: str = "cuda",
    tokens: tuple[int, int] = TOKENS,
    **shape: int,
) -> None:
    """Whole training steps of GPT-2. Each method has its own model with the same weights."""
    emit("## A whole training step of GPT-2", "")
    emit("| method | ms | ratio | middle half |", "|---|---:|---:|---:|")
    lacking = {name: reason for name in WHOLE if (reason := ROWS[name].lacks())}
    ids = torch.zeros((tokens[0], tokens[1] + 1), dtype=torch.int64, device=device)
    chance = torch.Generator(device).manual_seed(SEED)
    compiled = torch.compile(loss, dynamic=False)
    works: dict[str, Work] = {}
    for name in WHOLE:
        if name not in lacking:
            torch.manual_seed(SEED)
            with torch.device(device):
                model = GPT2(**shape)
            optimizer = ROWS[name].make(list(model.parameters()))
            works[name] = [training_steps(model, optimizer, compiled, ids, RUN)]
    vocabulary = shape.get("vocabulary", PADDED)
    times = in_rounds(
        works,
        device,
        rounds,
        math.ceil(WARM_UP["cuda"] / RUN),
        lambda: ids.random_(0, vocabulary, generator=chance),
    )
    base = times["adamw"][0]
    for name in works:
        own = times[name][0]
        median = statistics.median(own) / RUN * 1e3
        emit(f"| {ROWS[name].label} | {median:.2f} | {show_ratio(own, base)} |")
    for name, reason in lacking.items():
        emit(f"| {ROWS[name].label} | – | {reason} | – |")
    emit(
        "",
        f"{tokens[0] * tokens[1]:,} random tokens per step, a vocabulary of {vocabulary:,}, bf16 "
        f"autocast, compiled; each time is that of {RUN} steps in a row, divided by {RUN}.",
        "",
    )


def versions(packages: Iterable[str]) -> str:
    def own(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "(no version found)"

    return ", ".join(f"{package} {own(package)}" for package in packages)


def environment(args: argparse.Namespace) -> list[str]:
    command = f"python benchmarks/step_cost.py --device {args.device} --rounds {args.rounds}"
    command += f" --threads {args.threads}" if args.threads > 1 else ""
    packages = ["torch", "mechanic-pytorch", "prodigyopt"]
    hardware = _cpu_name()
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name()
        packages[1:1] = ["triton"]
        packages += ["dadaptation", "schedulefree", "lion-pytorch"]
        command += f" --cases {' '.join(args.cases)}".rstrip()
        command += f" --methods {' '.join(args.methods)}" if args.methods else ""
        command += " --whole-step" if args.whole_step else ""
    return [
        f"- command: `{command}`",
        f"- hardware: {hardware}, {torch.get_num_threads()} CPU thread(s)",
        f"- versions: Python {platform.python_version()}, {versions(packages)}",
        f"- date: {datetime.date.today().isoformat()}; seed {SEED}; median of {args.rounds} rounds "
        f"after {WARM_UP[args.device]}",
    ]


def _cpu_name() -> str:
    try:
        described = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        named = [
            line.split(":")[1].strip() for line in described.splitlines() if "Model name" in line
        ]
    except (OSError, subprocess.CalledProcessError):
        named = []
    return f"{named[0] if named else platform.processor() or 'CPU'} ({platform.machine()})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds over which the median is taken"
    )
    parser.add_argument("--output", help="write the table to this Markdown file as well")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument(
        "--cases",
        nargs="*",
        choices=list(CASES["cuda"]),
        metavar="SIZE",
        help="124M, 1.56B and 1M (default the first two; without a size, none)",
    )
    gpu.add_argument(
        "--methods",
        nargs="+",
        choices=list(ROWS),
        metavar="NAME",
        help=f"the rows; their bases are added (default all): {', '.join(ROWS)}",
    )
    gpu.add_argument("--whole-step", action="store_true", help="time training steps of GPT-2 too")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that torch can use")
    if args.device == "cpu" and (args.cases is not None or args.methods or args.whole_step):
        parser.error("--cases, --methods and --whole-step are for a GPU: add --device cuda")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads take a number of at least 1")
    if args.cases is None:
        args.cases = ["124M", "1.56B"]
    return args


LEGEND = """
- "ratio" is the time relative to the method under "over": the median over the rounds. Half of the
  rounds lie in the "middle half". A method that does not fit into the memory beside all others is
  timed in rounds with its base and some of them.
- "bytes" are the bytes per parameter that a step moves, by count. "of a copy" is the rate at which
  they are moved, relative to a copy on the device.
- "state" is what is kept beyond weights and gradients, "peak" is the most that is allocated beyond
  them during a step, and "first" is the same during the first steps, all in bytes per parameter.
"""


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with open(args.output, "w") if args.output else nullcontext() as file:

        def emit(*lines: str) -> None:
            targets: list[TextIO | None] = [None] if file is None else [None, file]
            for target in targets:
                print(*lines, sep="\n", file=target, flush=True)

        emit("# The cost of a step", "", *environment(args))
        if args.device == "cpu":
            emit("")
            cpu_table(args.rounds, emit)
            return
        copy = copy_bandwidth(args.device)
        free_memory()
        emit(f"- a copy on the device: {copy / 1e12:.2f} TB/s, read and written, of 4 GiB", LEGEND)
        for case in args.cases:
            gpu_table(case, args.methods or ROWS, args.rounds, copy, emit)
        if args.whole_step:
            whole_step(args.rounds, emit)
    leave()


if __name__ == "__main__":
    main()
