"""The cost of a mechanized step, as a ratio to the step of its base.

    python benchmarks/step_cost.py                    # on the CPU, one thread
    python benchmarks/step_cost.py --device cuda      # on a GPU
    python benchmarks/step_cost.py --output FILE.md   # write the table there too

Each row is measured in one run, in rounds: a round times one step of every method, so that what
else the machine does falls on all of them alike. The ratio is the median over the rounds of a
method's time over its base's in the same round.
"""

import argparse
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import mechanize

Params = list[torch.nn.Parameter]
Method = Callable[[Params], Optimizer]

# name: the shapes of the parameters
CASES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "cpu": {
        "25M in 100 tensors": [(500, 500)] * 100,
        "25M in 4 tensors": [(2500, 2500)] * 4,
        "0.5M in 500 tensors": [(1000,)] * 500,
    },
    "cuda": {
        "GPT-2 124M in 148 tensors": [
            (50257, 768),
            (1024, 768),
            *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)] * 12,
            *[(3072, 768), (3072,), (768, 3072), (768,)] * 12,
            *[(768,), (768,)],
        ],
        "1M in 1,000 tensors": [(1000,)] * 1000,
    },
}


def methods() -> dict[str, dict[str, Method]]:
    """Each base with what is measured against it, the base itself first."""
    import mechanic_pytorch
    import prodigyopt

    def peer(base: type[Optimizer]) -> type[Optimizer]:
        return mechanic_pytorch.mechanize(base)

    return {
        "AdamW": {
            "base": lambda p: AdamW(p, lr=1e-3),
            "mechanic": lambda p: mechanize(AdamW(p, lr=1e-3)),
            "mechanic-pytorch": lambda p: peer(AdamW)(p, lr=1e-3),
            "Prodigy": lambda p: prodigyopt.Prodigy(p),
        },
        "AdamW(fused=True)": {
            "base": lambda p: AdamW(p, lr=1e-3, fused=True),
            "mechanic": lambda p: mechanize(AdamW(p, lr=1e-3, fused=True)),
            "mechanic-pytorch": lambda p: peer(AdamW)(p, lr=1e-3, fused=True),
            "Prodigy": lambda p: prodigyopt.Prodigy(p),
        },
        "SGD(momentum=0.9)": {
            "base": lambda p: SGD(p, lr=1e-3, momentum=0.9),
            "mechanic": lambda p: mechanize(SGD(p, lr=1e-3, momentum=0.9)),
            "mechanic-pytorch": lambda p: peer(SGD)(p, lr=1e-3, momentum=0.9),
        },
    }


def make_params(shapes: list[tuple[int, ...]], device: str) -> Params:
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02)
        param.grad = torch.randn(shape, generator=generator, device=device) * 1e-3
        params.append(param)
    return params


def time_step(optimizer: Optimizer, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    optimizer.step()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def measure(
    optimizers: dict[str, Optimizer], device: str, rounds: int
) -> dict[str, tuple[float, float]]:
    """The median time and the median ratio of each method."""
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(rounds + 3):
        for name, optimizer in optimizers.items():
            seconds = time_step(optimizer, device)
            if turn >= 3:  # the first three warm up
                times[name].append(seconds)
    ratios = {n: [t / b for t, b in zip(ts, times["base"], strict=True)] for n, ts in times.items()}
    return {n: (statistics.median(times[n]), statistics.median(ratios[n])) for n in optimizers}


def environment(device: str, rounds: int) -> list[str]:
    hardware = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "mechanic-pytorch", "prodigyopt"))
    return [
        f"- command: `python benchmarks/step_cost.py --device {device} --rounds {rounds}`",
        f"- hardware: {hardware}, {torch.get_num_threads()} CPU thread(s)",
        f"- versions: Python {platform.python_version()}, {packages}",
        f"- date: {datetime.date.today().isoformat()}; seed 0; median of {rounds} rounds after 3",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds to take the median of")
    parser.add_argument("--output", help="write the table to this Markdown file as well")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that torch can use")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads take a number of at least 1")
    torch.set_num_threads(args.threads)

    lines = ["# The cost of a step", "", *environment(args.device, args.rounds), ""]
    lines += ["| parameters | base | ms | mechanic | mechanic-pytorch | Prodigy |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    for case, shapes in CASES[args.device].items():
        for base, variants in methods().items():
            made = {n: make(make_params(shapes, args.device)) for n, make in variants.items()}
            result = measure(made, args.device, args.rounds)
            cells = [f"{result[n][1]:.2f}×" if n in result else "–" for n in _COLUMNS]
            row = f"| {case} | {base} | {result['base'][0] * 1e3:.2f} | {' | '.join(cells)} |"
            lines.append(row)
            print(row, flush=True)
    if args.output:
        with open(args.output, "w") as file:
            file.write("\n".join(lines) + "\n")


_COLUMNS = ("mechanic", "mechanic-pytorch", "Prodigy")

if __name__ == "__main__":
    main()
