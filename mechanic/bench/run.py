"""The command `mechanic bench`: starts workers, and shows their progress and the results."""

import signal
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from mechanic.bench import study as studies
from mechanic.bench.methods import GROUPS
from mechanic.bench.plan import BenchPlan, BenchRequest, make_plan, tasks_of
from mechanic.bench.score import Comparison, compare, summarize
from mechanic.bench.study import CellResult, Grid
from mechanic.bench.worker import RESTART, run_worker


class WorkerError(Exception):
    """Workers cannot run here at all."""


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    connection: Connection
    bar: TaskID
    has_reported: bool = False
    """Whether any message has come from it."""


class Bench:
    """The parent process: starts workers, replaces those that die, and shows what they report."""

    def __init__(
        self, request: BenchRequest, plan: BenchPlan, storage: RDBStorage, console: Console
    ) -> None:
        self.request, self.plan, self.storage, self.console = request, plan, storage, console
        width = max(16, min(58, console.width - 62))
        description = TextColumn(f"{{task.description:<{width}.{width}}}")
        columns = description, BarColumn(20), MofNCompleteColumn()
        times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, console=console, transient=True)
        self.workers: list[_Worker] = []
        self.grids: list[Grid] = []
        self.ended: dict[str, set[tuple[float, int]]] = {}
        """The cells that have ended, by the name of their grid."""

    def run(self) -> None:
        """Run all cells of the plan."""
        # Started first, because they spend seconds on imports while the queue is filled here.
        cells = sum(len(grid.cells) for grid in self.plan.grids)
        self.workers = [self._start() for _ in range(min(self.request.jobs, cells))]
        try:
            self.grids = self._queue_all()
            with self.progress:
                self._wait_for_workers()
        finally:
            for worker in self.workers:
                worker.process.kill()

    def _wait_for_workers(self) -> None:
        total = sum(len(grid.cells) for grid in self.plan.grids)
        done = sum(map(len, self.ended.values()))
        self.bar = self.progress.add_task("runs", total=total, completed=done)
        if self.grids:
            for worker in self.workers:
                worker.connection.send(self.grids)
        while self.grids and self.workers:
            ready = wait([worker.connection for worker in self.workers])
            for worker in [worker for worker in self.workers if worker.connection in ready]:
                self._receive(worker)

    def _queue_all(self) -> list[Grid]:
        """Queue the cells of all grids. Returns the grids that have cells to run."""
        open_grids = []
        with self.console.status("looking at the runs in the storage"):
            for grid in self.plan.grids:
                study = studies.open_study(self.storage, grid)
                studies.release_lost(study)
                studies.queue(study, grid, self.request.retry_failed)
                self.ended[grid.name] = studies.finished(study, grid)
                if len(self.ended[grid.name]) < len(grid.cells) or self.request.retry_failed:
                    open_grids.append(grid)
        return open_grids

    def _start(self) -> _Worker:
        context = get_context("spawn")
        connection, worker_connection = context.Pipe()
        process = context.Process(target=run_worker, args=(self.request, worker_connection))
        # Workers inherit that SIGINT is ignored. On Ctrl-C, only the parent acts, and kills them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        worker_connection.close()
        return _Worker(process, connection, self.progress.add_task("starting", total=1))

    def _receive(self, worker: _Worker) -> None:
        try:
            subject, news = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        worker.has_reported = True
        if isinstance(subject, Grid):
            self._show_result(subject, news)
        else:
            done, steps = news
            if done == 0:  # a new run, with a time of its own
                self.progress.reset(worker.bar, description=subject)
            self.progress.update(worker.bar, completed=done, total=steps)

    def _replace(self, worker: _Worker) -> None:
        """A worker has ended. If it was killed, its trial has failed and a new worker starts."""
        worker.process.join()
        self.workers.remove(worker)
        self.progress.remove_task(worker.bar)
        code = worker.process.exitcode or 0
        if code == 0:
            return
        if code != RESTART:
            death = f"of signal {-code}" if code < 0 else f"with exit code {code}"
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            self._record_death(worker, f"the worker died {death}{memory}")
        self.workers.append(self._start())
        self.workers[-1].connection.send(self.grids)

    def _record_death(self, worker: _Worker, reason: str) -> None:
        pid, failed = worker.process.pid or 0, 0
        for grid in self.grids:
            study = studies.open_study(self.storage, grid)
            failed += studies.fail_trials_of(study, self.storage, pid, reason)
        if not failed and not worker.has_reported:  # no run killed it: the next one would die too
            raise WorkerError(f"{reason} before it had run anything; its messages are above")
        self.console.print(reason, style="red")

    def _show_result(self, grid: Grid, result: CellResult | None) -> None:
        """Show the result of a cell. None says that all cells of the grid have ended."""
        if result is None:
            self.ended[grid.name] = set(grid.cells)
            self._show_count()
            return
        self.ended[grid.name].add((result.lr, result.seed))
        what = "train loss " if result.status == "done" else f"{result.status}: "
        style = {"done": "", "diverged": "yellow", "failed": "red"}[result.status]
        line = f"{grid.name}  lr {result.lr:.3g}  seed {result.seed}  {what}{result.text}"
        self.console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
        self._show_count()

    def _show_count(self) -> None:
        self.progress.update(self.bar, completed=sum(map(len, self.ended.values())))


def show_tasks(request: BenchRequest) -> None:
    """List the tasks and methods, and what each task lacks here."""
    console = Console()
    table = Table("task", "description", box=None, pad_edge=False)
    missing: dict[str, list[str]] = {}
    for task in tasks_of(request):
        table.add_row(
            f"{task.suite}/{task.name}", task.about + (" (cannot run)" * bool(task.missing))
        )
        if task.missing:
            missing.setdefault(task.missing, []).append(task.name)
    console.print(table)
    for reason, names in missing.items():
        console.print(
            f"\ncannot run: {', '.join(names)}\n  {reason}", highlight=False, markup=False
        )
    for group, methods in GROUPS.items():
        console.print(f"\n--methods {group}: {', '.join(methods)}", highlight=False)


def _show_results(comparisons: list[Comparison]) -> None:
    """Print the results to standard output. Everything else goes to standard error."""
    console = Console()
    for comparison in comparisons:
        if comparison.budget == "smoke":
            console.print("All tasks that can run here have run; smoke runs compare nothing.")
        elif not comparison.scored:
            console.print("There is no sweep to compare with: add one with --methods sweeps.")
        else:
            console.print(_table(comparison))


def _table(comparison: Comparison) -> Table:
    caption = "In % of what the best of the sweep gained. Rank among the methods of a row."
    table = Table(title=f"Excess over the best of a sweep, {comparison.budget}", caption=caption)
    for column in ("method", "mean", "lost runs", "worst", "mean rank", "rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for summary in summarize(comparison):
        table.add_row(
            summary.method.label,
            f"{summary.mean:+.2f} %",
            summary.lost_of_runs,
            f"{summary.worst:+.2f} %",
            f"{summary.rank:.2f}",
            f"{summary.rows}",
        )
    return table


def run_bench(request: BenchRequest, console: Console) -> int:
    """Run what the request asks for and the storage does not have yet. Returns the exit code."""
    plan = make_plan(request)
    storage = studies.open_storage(request.storage)

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    for line in plan.skipped:
        say(f"skipped  {line}", "yellow")
    if not plan.grids:
        say("Nothing to run.", "red")
        return 1
    cells = sum(len(grid.cells) for grid in plan.grids)
    storage_name = studies.without_password(request.storage)
    say(f"{cells} runs, {request.jobs} at a time, stored in {storage_name}")
    Bench(request, plan, storage, console).run()
    wanted = {(g.suite, g.task, g.budget, g.method, g.base) for g in plan.grids}
    runs = [
        run
        for run in studies.load(storage)
        if (run.suite, run.task, run.budget, run.method, run.base) in wanted
    ]
    _show_results(compare(runs))
    say("mechanic report writes tables and figures of all runs in the storage.")
    reasons = Counter(run.reason for run in runs if run.status == "failed")
    for reason, count in reasons.items():
        say(f"failed: {count} of {len(runs)} runs: {reason}", "red")
    if reasons:
        say("The same command with --retry-failed runs them again.", "red")
    return 1 if reasons else 0


def main(request: BenchRequest) -> int:
    """Run the command. Ctrl-C loses the runs that are under way, and nothing else."""
    console = Console(stderr=True)
    try:
        return run_bench(request, console)
    except KeyboardInterrupt:
        console.print("Stopped. Finished runs are stored: the same command goes on from there.")
        return 130
    except (WorkerError, StorageInternalError, SQLAlchemyError) as error:
        first = str(error).splitlines()[0]
        console.print(f"mechanic bench: {first}", style="red", highlight=False, markup=False)
        return 1
