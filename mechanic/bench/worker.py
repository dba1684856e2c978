"""A process that runs cells, one after the other, and reports to its parent."""

import contextlib
import datetime
import os
import platform
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection

import torch

import mechanic
from mechanic.bench import study as studies
from mechanic.bench.methods import METHODS, version
from mechanic.bench.plan import BenchRequest, tasks_of
from mechanic.bench.record import Outcome
from mechanic.bench.study import Grid
from mechanic.bench.task import BuildSettings, Task
from mechanic.bench.train import train

RESTART = 86  # exit code of a worker that an error has left with a GPU in an unknown state


def run_worker(request: BenchRequest, parent: Connection) -> None:
    """Run the free cells of the grids, until all cells have ended, here or elsewhere."""
    try:
        grids: list[Grid] = parent.recv()
    except EOFError:
        return  # the parent is gone
    threading.Thread(target=_die_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.jobs))
    if platform.machine() == "aarch64":
        # It makes small matrix products slow on this architecture.
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    if _on_gpu(request.device):
        _use_deterministic_operators()
    storage = studies.open_storage(request.storage)
    tasks = {(task.suite, task.name): task for task in tasks_of(request)}
    described = environment(request.device)
    while grids:
        unfinished = []
        for grid in grids:
            study = studies.open_study(storage, grid)
            run = partial(_run, request, tasks[grid.suite, grid.task], grid, parent)
            for result in studies.run_cells(study, run, described):
                _send(parent, grid, result)
                if result.status == "failed" and request.device != "cpu":
                    sys.exit(RESTART)  # an error on a GPU may make all later runs fail
            if studies.unfinished(study, grid):
                studies.release_lost(study)
                studies.queue(study, grid)
                unfinished.append(grid)
            else:
                _send(parent, grid, None)
        if len(unfinished) == len(grids):
            time.sleep(0.5)  # the remaining cells run elsewhere
        grids = unfinished


def _run(
    request: BenchRequest, task: Task, grid: Grid, parent: Connection, lr: float, seed: int
) -> Outcome:
    method, device = METHODS[grid.method], torch.device(request.device)
    settings = BuildSettings(request.budget, seed, device, request.data)
    name = f"{grid.label} lr {lr:.3g} seed {seed} {grid.task}"
    _send(parent, name, (0, 1))
    try:
        return train(task, method, grid.base, lr, settings, lambda *done: _send(parent, name, done))
    finally:
        if _on_gpu(request.device):
            torch.cuda.empty_cache()  # the other workers share the GPU


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _use_deterministic_operators() -> None:
    """Make runs on a GPU end the same to the last digit. A task fails if it needs an operator that
    has no deterministic form."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it at its first product
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _send(parent: Connection, subject: object, news: object) -> None:
    try:
        parent.send((subject, news))
    except OSError:  # the parent is gone, which must not count as a failure of the run
        os._exit(1)


def _die_with_parent(parent: Connection) -> None:
    """Wait for the end of the parent, which sends nothing more, and exit then."""
    try:
        parent.recv()
    except EOFError:
        os._exit(1)


def environment(device: str) -> dict[str, str]:
    """The device and the versions, on which the results may depend."""
    packages = ("torch", "transformers", "jax", *sorted({m.package for m in METHODS.values()}))
    hardware = {"device": _processor()}
    if _on_gpu(device):
        hardware = {"device": torch.cuda.get_device_name(device), "operators": "deterministic"}
    return {
        **hardware,
        "python": platform.python_version(),
        "mechanic": mechanic.__version__,
        **{package: version(package) or "absent" for package in packages},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    """The name of the CPU, where the system gives it, and the number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = [line for line in file if line.startswith("model name")]
        name = lines[0].split(":")[-1].strip() if lines else name
    return f"CPU {name}, {os.cpu_count()} cores"
