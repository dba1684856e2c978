"""What Mechanic adds to a step, by the number of processes and of tensors.

    python benchmarks/scaling.py                        # gloo on a CPU: 1, 2 and 4 processes
    python benchmarks/scaling.py --output FILE.md

The parameters are DTensors, sharded over all processes as FSDP2 shards them. Steps of plain and of
mechanized AdamW alternate. The time of a step is that of the slowest process, because all others
wait for it. The table shows medians. The message, an all-reduce of as many numbers, is also timed
alone.
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

from mechanic.torch import mechanize

ELEMENTS = 2_000_000  # over all processes
NUMBERS = 11  # what a step sends, in float64
WARM_UP = 15  # past the first steps, which send a second message


def make_params(tensors: int) -> list[torch.nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = ELEMENTS // tensors // 64
    made = []
    for index in range(tensors):
        whole = torch.randn(rows, 64, generator=torch.Generator().manual_seed(index))
        part = whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
        weights, gradient = (
            DTensor.from_local(
                own, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride(), run_check=False
            )
            for own in (part, part.roll(1) / 10)
        )
        made.append(torch.nn.Parameter(weights))
        made[-1].grad = gradient
    return made


def clock(work) -> float:
    dist.barrier()
    begun = time.perf_counter()
    work()
    slowest = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1e3 * float(slowest)


def measure(rank: int, size: int, store: str, counts: list[int], rounds: int, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    rows = []
    for tensors in counts:
        plain = torch.optim.AdamW(make_params(tensors), lr=1e-3)
        tuned = mechanize(torch.optim.AdamW(make_params(tensors), lr=1.0))
        numbers = torch.zeros(NUMBERS, dtype=torch.float64)
        works = [plain.step, tuned.step, lambda numbers=numbers: dist.all_reduce(numbers)]
        times = [[clock(work) for work in works] for _ in range(WARM_UP + rounds)][WARM_UP:]
        base, mechanized, message = map(statistics.median, zip(*times, strict=True))
        added = statistics.median(b - a for a, b, _ in times)
        rows.append((size, tensors, base, mechanized, added, message))
    if rank == 0:
        pipe.send(rows)
        pipe.recv()
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, counts: list[int], rounds: int) -> list[tuple]:
    ours, theirs = mp.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, str(Path(folder) / "store"), counts, rounds, theirs)
        job = mp.spawn(measure, args=args, nprocs=size, join=False)
        rows = ours.recv()
        ours.send(None)
        while not job.join():
            pass
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tensors", type=int, nargs="+", default=[4, 40, 400])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [row for n in options.processes for row in run(n, options.tensors, options.rounds)]
    text = "\n".join([*heading(options), *map(line, rows)]) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text, encoding="utf-8")


def heading(options: argparse.Namespace) -> list[str]:
    return [
        "# The cost of a step over several processes",
        "",
        f"- command: `python benchmarks/scaling.py --rounds {options.rounds}`",
        f"- hardware: {platform.machine()}, {os.cpu_count()} cores, gloo over loopback, "
        "one thread per process",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}",
        f"- date: {datetime.date.today()}; {ELEMENTS // 10**6}M parameters in all, sharded; "
        f"median of {options.rounds} rounds after {WARM_UP}",
        "",
        "| processes | tensors | AdamW, ms | mechanized, ms | added, ms | the message alone, ms |",
        "|---:|---:|---:|---:|---:|---:|",
    ]


def line(row: tuple) -> str:
    size, tensors, *times = row
    return f"| {size} | {tensors} | {' | '.join(f'{value:.2f}' for value in times)} |"


if __name__ == "__main__":
    main()
