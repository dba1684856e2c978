"""`mechanic run` on the scripts of examples/unmodified/, against a sweep of the learning rate.

    python benchmarks/run_examples.py                     # every script, three seeds
    python benchmarks/run_examples.py plain_loop gan      # these alone
    python benchmarks/run_examples.py --output FILE.md    # write the table there too

Each script first runs under plain python at several learning rates in half decades, and then under
`mechanic run` with the lr typed 100 times smaller and 100 times larger than the best of these. What
is compared is the number on the last line that the script prints, as a mean over the seeds: the
loss over the training set, or for the GAN a distance between its drawings and the data.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

SCRIPTS = Path(__file__).parents[1] / "examples" / "unmodified"
GRIDS = {  # half decades, the best of which is not at an end
    "plain_loop": [0.003, 0.01, 0.03, 0.1],
    "trainer": [0.0003, 0.001, 0.003, 0.01],
    "lightning_module": [0.001, 0.003, 0.01, 0.03],
    "accelerate_loop": [0.003, 0.01, 0.03],
    "grad_scaler": [0.01, 0.03, 0.1, 0.3, 1.0],
    "accumulation": [0.01, 0.03, 0.1, 0.3],
    "gan": [0.001, 0.003, 0.01, 0.03],
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
_END = "-- end of a run --"
_REPEAT = f"""
import runpy, sys
script, *runs = sys.argv[1:]
for arguments in runs:
    sys.argv = [script, *arguments.split()]
    runpy.run_path(script, run_name="__main__")
    print({_END!r})
"""


class Tuned(NamedTuple):
    loss: float
    learned: list[float]  # what the summary says to paste, for each optimizer


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def last_number(output: str) -> float:
    """The number at the end of the last line; infinity if it is NaN."""
    value = float(output.rstrip().rsplit(maxsplit=1)[-1])
    return math.inf if math.isnan(value) else value


def sweep(name: str, lrs: Sequence[float], seeds: Sequence[int], *more: str) -> dict[float, float]:
    """The mean final loss at each lr under plain python. One process runs all, to import once."""
    runs = [(lr, seed) for lr in lrs for seed in seeds]
    arguments = [" ".join(["--lr", str(lr), "--seed", str(seed), *more]) for lr, seed in runs]
    output = _output([sys.executable, "-W", "ignore", "-c", _REPEAT, script(name), *arguments])
    losses = list(map(last_number, output.split(_END)[:-1]))
    each = len(seeds)
    return {lr: fmean(losses[i * each : (i + 1) * each]) for i, lr in enumerate(lrs)}


def tuned(name: str, lr: float, seed: int, *more: str) -> Tuned:
    """One run under `mechanic run`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-W", "ignore", "-m", "mechanic", "run", "--log", str(log)]
        arguments = ["--lr", str(lr), "--seed", str(seed), *more]
        loss = last_number(_output([*command, script(name), *arguments]))
        summary = json.loads((log / "summary.json").read_text())
    return Tuned(loss, [one["suggested"][0] for one in summary["optimizers"]])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} … failed:\n{done.stderr[-2000:]}")
    return done.stdout


def row(name: str, seeds: Sequence[int]) -> str:
    losses = sweep(name, GRIDS[name], seeds)
    best = min(losses, key=losses.__getitem__)
    runs = {lr: [tuned(name, lr, seed) for seed in seeds] for lr in (best / 100, best * 100)}
    cells = [_learned(runs), f"{best:g}", f"{losses[best]:.4g}"]
    for of_lr in runs.values():
        loss = fmean(run.loss for run in of_lr)
        cells.append(f"{loss:.4g} ({100 * (loss / losses[best] - 1):+.1f} %)")
    others = ", ".join(f"{lr:g}: {loss:.4g}" for lr, loss in losses.items())
    return f"| `{name}.py` | {' | '.join([*cells[1:], cells[0], others])} |"


def _learned(runs: dict[float, list[Tuned]]) -> str:
    """The smallest and the largest lr to paste of each optimizer."""
    columns = zip(*(run.learned for of_lr in runs.values() for run in of_lr), strict=True)
    return "; ".join(f"{min(column):.2g} to {max(column):.2g}" for column in columns)


def environment(command: str, seeds: int) -> list[str]:
    packages = ("torch", "transformers", "lightning", "accelerate", "scikit-learn")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return [
        f"- command: `{command}`",
        f"- hardware: {_cpu_name()}, 1 CPU thread",
        f"- versions: Python {platform.python_version()}, {versions}",
        f"- date: {datetime.date.today().isoformat()}; mean of seeds 0 to {seeds - 1}",
    ]


def _cpu_name() -> str:
    found = subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
    named = [line.split(":")[1].strip() for line in found if "Model name" in line]
    return f"{named[0] if named else 'CPU'} ({platform.machine()})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GRIDS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1 of each run")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file too")
    args = parser.parse_args()
    if wrong := [name for name in args.names if name not in GRIDS]:
        parser.error(f"there is no {wrong[0]}; there are {', '.join(GRIDS)}")
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    command = f"python benchmarks/run_examples.py --seeds {args.seeds}"
    lines = ["# Examples under `mechanic run`", "", *environment(command, args.seeds), ""]
    lines += [
        "| script | best lr | final loss there | typed / 100 | typed × 100 | lr to paste | sweep |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in args.names or GRIDS:
        lines.append(row(name, range(args.seeds)))
        print(lines[-1], flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
