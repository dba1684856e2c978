"""The overhead of `mechanic run` compared with a script that calls `mechanize` itself.

    python benchmarks/run_overhead.py                    # 1,000 steps, 10 rounds
    python benchmarks/run_overhead.py --output FILE.md   # write the table there too

A round runs the same training loop four times, each in a process of its own: twice under python
with `mechanize` in the script (which shows how far two equal runs differ), and unedited under
`mechanic run`, without and with a log. Each process prints the time of its loop without imports: by
the clock, and as processor time, which other work on the machine disturbs less. The ratio is the
median over the rounds of a way's time divided by the time of the first way in the same round.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

LOOP = """
import sys, time
import torch
from torch import nn
{imports}
steps, width = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
inputs, targets = torch.randn(64, 20), torch.randn(64, 1)
model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 1))
optimizer = {wrapped}
for step in range(steps + 50):
    if step == 50:
        clock, processor = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
print(time.perf_counter() - clock, time.process_time() - processor)
"""
# The same loop in one process, with and without the notes that `mechanic run` takes, in turn. Two
# processes differ by more than the notes cost.
TURNS = """
import statistics, sys, time
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
steps, width = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
inputs, targets = torch.randn(64, 20), torch.randn(64, 1)
model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
(noting,) = hooks.items()
times = {True: [], False: []}
for step in range(2 * steps + 50):
    noted = step % 2 == 0
    hooks.update([noting]) if noted else hooks.clear()
    start = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    if step >= 50:
        times[noted].append(time.perf_counter() - start)
print(*(statistics.median(times[noted]) for noted in (False, True)))
"""
PLAIN = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
WAYS = ("mechanize in the script", "the same again", "mechanic run", "mechanic run --log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [row for width in (64, 1024) for row in measure(options.steps, options.rounds, width)]
    notes = [measure_notes(options.steps, width) for width in (64, 1024)]
    text = "\n".join([*heading(options), *rows, "", *NOTES, *notes]) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text, encoding="utf-8")


def measure(steps: int, rounds: int, width: int) -> list[str]:
    times: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain.py").write_text(LOOP.format(imports="", wrapped=PLAIN))
        imports = "from mechanic.torch import mechanize"
        own = LOOP.format(imports=imports, wrapped=f"mechanize({PLAIN})")
        (folder / "own.py").write_text(own)
        for i in range(rounds):
            for way in WAYS:
                times[way].append(loop_times(folder, way, i, steps, width))
    return [
        row(f"20-{width}-1, {kind}", steps, [[pair[k] for pair in times[way]] for way in WAYS])
        for k, kind in enumerate(("clock", "processor"))
    ]


NOTES = [
    "Steps with and without notes in turn, in one process under `mechanic run`: medians.",
    "",
    "| MLP, AdamW | without: ms per step | with: ms per step | ratio |",
    "|---|---:|---:|---:|",
]


def measure_notes(steps: int, width: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "plain.py").write_text(TURNS)
        without, noted = loop_times(Path(name), "mechanic run", 0, steps, width)
    cells = f"{1e3 * without:.3f} | {1e3 * noted:.3f} | {noted / without:.3f}×"
    return f"| 20-{width}-1 | {cells} |"


def row(name: str, steps: int, times: list[list[float]]) -> str:
    first = times[0]
    cells = [f"{1e3 * statistics.median(first) / steps:.2f}"]
    for own in times[1:]:
        ratios = sorted(one / base for one, base in zip(own, first, strict=True))
        cells.append(f"{statistics.median(ratios):.3f}× ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    return f"| {name} | {' | '.join(cells)} |"


def loop_times(folder: Path, way: str, i: int, steps: int, width: int) -> tuple[float, ...]:
    command = [sys.executable]
    if way.startswith("mechanic run"):
        command += ["-m", "mechanic", "run", "--quiet"]
    if way.endswith("--log"):
        command += ["--log", f"log-{width}-{i}"]
    script = "plain.py" if way.startswith("mechanic run") else "own.py"
    done = subprocess.run(
        [*command, script, str(steps), str(width)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(map(float, done.stdout.split()))


def heading(options: argparse.Namespace) -> list[str]:
    return [
        "# The overhead of `mechanic run`",
        "",
        f"- command: `python benchmarks/run_overhead.py --steps {options.steps} "
        f"--rounds {options.rounds}`",
        f"- hardware: {processor()}, 1 CPU thread",
        f"- versions: Python {platform.python_version()}, torch {version('torch')}, "
        f"mechanic {version('mechanic')}",
        f"- date: {datetime.date.today()}; median (smallest to largest) of {options.rounds} rounds",
        "",
        f"| MLP, AdamW | {WAYS[0]}: ms per step | {' | '.join(WAYS[1:])} |",
        "|---|---:|---:|---:|---:|",
    ]


def processor() -> str:
    done = subprocess.run(["lscpu"], capture_output=True, text=True, check=False)
    names = [
        line.split(":")[1].strip() for line in done.stdout.splitlines() if "Model name" in line
    ]
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


if __name__ == "__main__":
    main()
