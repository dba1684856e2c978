"""A process that runs cells, one after the other, and tells its parent how they go."""

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
from mechanic.bench.plan import Request, tasks_of
from mechanic.bench.study import Grid
from mechanic.bench.task import Setting, Task
from mechanic.bench.train import Outcome, train

SPOILT = 86  # exit code of a worker that has told all, and whose GPU is not to be trusted


def work(request: Request, line: Connection) -> None:
    """Run whatever cell of the grids is free, until all have ended, here or elsewhere."""
    try:
        grids: list[Grid] = line.recv()
    except EOFError:
        return  # the parent is gone
    threading.Thread(target=_die_with_parent, args=(line,), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.jobs))
    if platform.machine() == "aarch64":
        # Small matrix products are slow in it there.
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    if _on_gpu(request.device):
        _repeat()
    storage = studies.open_storage(request.storage)
    tasks = {(task.suite, task.name): task for task in tasks_of(request)}
    about = environment(request.device)
    while grids:
        left = []
        for grid in grids:
            study = studies.open_study(storage, grid)
            run = partial(_run, request, tasks[grid.suite, grid.task], grid, line)
            for ended in studies.work(study, run, about):
                _tell(line, grid, ended)
                if ended.status == "failed" and request.device != "cpu":
                    sys.exit(SPOILT)  # an error on a GPU may fail all that comes after it
            if studies.unfinished(study, grid):
                studies.reap(study)
                studies.queue(study, grid)
                left.append(grid)
            else:
                _tell(line, grid, None)
        if len(left) == len(grids):
            time.sleep(0.5)  # what is left runs elsewhere
        grids = left


def _run(
    request: Request, task: Task, grid: Grid, line: Connection, lr: float, seed: int
) -> Outcome:
    method, device = METHODS[grid.method], torch.device(request.device)
    setting = Setting(request.budget, seed, device, request.data)
    name = f"{grid.label} lr {lr:.3g} seed {seed} {grid.task}"
    _tell(line, name, (0, 1))
    try:
        return train(task, method, grid.base, lr, setting, lambda *done: _tell(line, name, done))
    finally:
        if _on_gpu(request.device):
            torch.cuda.empty_cache()  # the other workers share the card


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _repeat() -> None:
    """The same losses each time on a GPU, to the last digit; what has no such operator fails."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first product there
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _tell(line: Connection, subject: object, news: object) -> None:
    try:
        line.send((subject, news))
    except OSError:  # the parent is gone, and that is no failure of the run
        os._exit(1)


def _die_with_parent(line: Connection) -> None:
    """The parent sends nothing: what arrives here is its end."""
    try:
        line.recv()
    except EOFError:
        os._exit(1)


def environment(device: str) -> dict[str, str]:
    """What the numbers may depend on."""
    packages = ("torch", "transformers", *sorted({m.package for m in METHODS.values()}))
    about = {"device": _processor()}
    if _on_gpu(device):
        about = {"device": torch.cuda.get_device_name(device), "operators": "deterministic"}
    return {
        **about,
        "python": platform.python_version(),
        "mechanic": mechanic.__version__,
        **{package: version(package) or "absent" for package in packages},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    """The CPU by its name, where the system tells it, and how many cores there are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = [line for line in file if line.startswith("model name")]
        name = lines[0].split(":")[-1].strip() if lines else name
    return f"CPU {name}, {os.cpu_count()} cores"
