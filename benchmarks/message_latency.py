"""How long the message of a sharded step takes, between processes that share one GPU.

    python benchmarks/message_latency.py                  # nccl alone, gloo with 2 and 4 processes
    python benchmarks/message_latency.py --output FILE.md

The message is 11 float64 numbers on the GPU. "host" is the time that the host takes to send it, and
"whole" the time until the sums are there, both as the median over 200 messages. nccl refuses two
processes on one GPU; what it says is printed.
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from mechanic.torch.measure import Parts

CASES = [("nccl", 1), ("nccl", 2), ("gloo", 2), ("gloo", 4)]
WARM_UP, COUNT = 20, 200


def measure(rank: int, backend: str, size: int, store: str, answers: Any) -> None:
    """One process: send messages, and put the medians or the error into `answers`."""
    torch.cuda.set_device(0)
    os.environ["NCCL_DEBUG"] = "ERROR"
    try:
        own: Any = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
        dist.init_process_group(backend, **own)
        numbers = torch.ones(len(Parts._fields), dtype=torch.float64, device="cuda")
        hosts, wholes = [], []
        for turn in range(WARM_UP + COUNT):
            torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(numbers, async_op=True).wait()
            sent = time.perf_counter()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                hosts.append(sent - began)
                wholes.append(time.perf_counter() - began)
            numbers.fill_(1.0)
        answers.put((rank, statistics.median(hosts), statistics.median(wholes)))
        dist.destroy_process_group()
    except Exception as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}"))


def row(backend: str, size: int) -> str:
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        own = backend, size, str(Path(folder) / "store"), answers
        processes = [context.Process(target=measure, args=(rank, *own)) for rank in range(size)]
        for process in processes:
            process.start()
        found = [answers.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(20)
            process.kill()
    _, host, whole = min(found, key=lambda answer: answer[0])
    if host is None:
        words = " ".join(str(whole).split())
        return f"| {backend} | {size} | – | {words[:300]} |"
    return f"| {backend} | {size} | {1e6 * host:.0f} | {1e6 * whole:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use")
    lines = [
        "# The message of a sharded step, between processes on one GPU",
        "",
        "- command: `python benchmarks/message_latency.py`",
        f"- hardware: {torch.cuda.get_device_name()}",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}",
        f"- date: {datetime.date.today()}; {len(Parts._fields)} float64 numbers, median of {COUNT}",
        "",
        "| backend | processes | host, µs | whole, µs |",
        "|---|---:|---:|---:|",
        *(row(*case) for case in CASES),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
