"""The command `mechanic bench`: the workers, and what people see of them."""

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
from mechanic.bench.plan import Plan, Request, make_plan, tasks_of
from mechanic.bench.score import Comparison, compare, summarize
from mechanic.bench.study import Ended, Grid
from mechanic.bench.worker import SPOILT, work


class WorkerError(Exception):
    """Workers do not work here."""


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    line: Connection
    bar: TaskID
    heard: bool = False
    """Whether it has said anything yet."""


class Bench:
    """The parent: starts workers, buries the dead, and shows what comes."""

    def __init__(self, request: Request, plan: Plan, storage: RDBStorage, console: Console) -> None:
        self.request, self.plan, self.storage, self.console = request, plan, storage, console
        room = max(16, min(58, console.width - 62))
        words = TextColumn(f"{{task.description:<{room}.{room}}}")
        columns = words, BarColumn(20), MofNCompleteColumn()
        times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
        self.progress = Progress(*columns, *times, console=console, transient=True)
        self.workers: list[_Worker] = []
        self.grids: list[Grid] = []
        self.ended: dict[str, set[tuple[float, int]]] = {}

    def run(self) -> None:
        """All cells."""
        # They spend their first seconds importing, while we look at what there is to do.
        cells = sum(len(grid.cells) for grid in self.plan.grids)
        self.workers = [self._start() for _ in range(min(self.request.jobs, cells))]
        try:
            self.grids = self._queue_all()
            with self.progress:
                self._watch()
        finally:
            for worker in self.workers:
                worker.process.kill()

    def _watch(self) -> None:
        total = sum(len(grid.cells) for grid in self.plan.grids)
        done = sum(map(len, self.ended.values()))
        self.bar = self.progress.add_task("runs", total=total, completed=done)
        if self.grids:
            for worker in self.workers:
                worker.line.send(self.grids)
        while self.grids and self.workers:
            for line in wait([worker.line for worker in self.workers]):
                self._listen(next(worker for worker in self.workers if worker.line is line))

    def _queue_all(self) -> list[Grid]:
        """The grids that have cells to run, each queued."""
        open_grids = []
        with self.console.status("looking at what is there"):
            for grid in self.plan.grids:
                study = studies.open_study(self.storage, grid)
                studies.reap(study)
                studies.queue(study, grid, self.request.retry_failed)
                self.ended[grid.name] = studies.finished(study, grid)
                if len(self.ended[grid.name]) < len(grid.cells) or self.request.retry_failed:
                    open_grids.append(grid)
        return open_grids

    def _start(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(self.request, theirs))
        # Ctrl-C is ours alone, and we end them: what is ignored here is ignored there from birth.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()
        return _Worker(process, ours, self.progress.add_task("starting", total=1))

    def _listen(self, worker: _Worker) -> None:
        try:
            subject, news = worker.line.recv()
        except (EOFError, OSError):
            self._mourn(worker)
            return
        worker.heard = True
        if isinstance(subject, Grid):
            self._note(subject, news)
        else:
            done, steps = news
            if done == 0:  # a new run, with a time of its own
                self.progress.reset(worker.bar, description=subject)
            self.progress.update(worker.bar, completed=done, total=steps)

    def _mourn(self, worker: _Worker) -> None:
        """A worker has gone: its trial failed if it was killed, and another takes its place."""
        worker.process.join()
        self.workers.remove(worker)
        self.progress.remove_task(worker.bar)
        code = worker.process.exitcode or 0
        if code == 0:
            return
        if code != SPOILT:
            death = f"of signal {-code}" if code < 0 else f"with exit code {code}"
            memory = " (out of memory?)" if code == -signal.SIGKILL else ""
            self._bury(worker, f"the worker died {death}{memory}")
        self.workers.append(self._start())
        self.workers[-1].line.send(self.grids)

    def _bury(self, worker: _Worker, reason: str) -> None:
        pid, buried = worker.process.pid or 0, 0
        for grid in self.grids:
            study = studies.open_study(self.storage, grid)
            buried += studies.bury(study, self.storage, pid, reason)
        if not buried and not worker.heard:  # it did not die of a run: so would the next one
            raise WorkerError(f"{reason} before it had run anything; what it said is above")
        self.console.print(reason, style="red")

    def _note(self, grid: Grid, ended: Ended | None) -> None:
        if ended is None:
            self._all_ended(grid)
            return
        self.ended[grid.name].add((ended.lr, ended.seed))
        text = (
            f"train loss {ended.text}"
            if ended.status == "done"
            else f"{ended.status}: {ended.text}"
        )
        style = {"done": "", "diverged": "yellow", "failed": "red"}[ended.status]
        line = f"{grid.name}  lr {ended.lr:.3g}  seed {ended.seed}  {text}"
        self.console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
        self._show_count()

    def _all_ended(self, grid: Grid) -> None:
        self.ended[grid.name] = set(grid.cells)
        self._show_count()

    def _show_count(self) -> None:
        self.progress.update(self.bar, completed=sum(map(len, self.ended.values())))


def show_tasks(request: Request) -> None:
    """What there is to run, and what each task lacks here."""
    console = Console()
    table = Table("task", "what", box=None, pad_edge=False)
    lacking: dict[str, list[str]] = {}
    for task in tasks_of(request):
        table.add_row(
            f"{task.suite}/{task.name}", task.about + (" (cannot run)" * bool(task.missing))
        )
        if task.missing:
            lacking.setdefault(task.missing, []).append(task.name)
    console.print(table)
    for reason, names in lacking.items():
        console.print(
            f"\ncannot run: {', '.join(names)}\n  {reason}", highlight=False, markup=False
        )
    for group, methods in GROUPS.items():
        console.print(f"\n--methods {group}: {', '.join(methods)}", highlight=False)


def _show_results(comparisons: list[Comparison]) -> None:
    """The end of it, on the standard output; all else is on the other stream."""
    console = Console()
    for comparison in comparisons:
        if comparison.budget == "smoke":
            console.print("All that could run has run; smoke is too short to compare anything.")
        elif not comparison.scored:
            console.print("No sweep to compare with: --methods sweeps adds them.")
        else:
            console.print(_table(comparison))


def _table(comparison: Comparison) -> Table:
    caption = "Of what the best of the sweep gained; rank among the methods of a row."
    table = Table(title=f"Excess over the best of a sweep, {comparison.budget}", caption=caption)
    for column in ("method", "mean", "worst", "mean rank", "rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for line in summarize(comparison):
        numbers = f"{line.mean:+.2f} %", f"{line.worst:+.2f} %", f"{line.rank:.2f}", f"{line.rows}"
        table.add_row(line.method.label, *numbers)
    return table


def run_bench(request: Request, console: Console) -> int:
    """Run all that is asked for and not there yet; the exit code."""
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
    say(f"{cells} runs, {request.jobs} at a time, kept in {studies.shown(request.storage)}")
    Bench(request, plan, storage, console).run()
    wanted = {(g.suite, g.task, g.budget, g.method, g.base) for g in plan.grids}
    runs = [
        run
        for run in studies.load(storage)
        if (run.suite, run.task, run.budget, run.method, run.base) in wanted
    ]
    _show_results(compare(runs))
    say("mechanic report writes tables and figures of all that is in the storage.")
    reasons = Counter(run.reason for run in runs if run.status == "failed")
    for reason, count in reasons.items():
        say(f"failed: {count} of {len(runs)} runs: {reason}", "red")
    if reasons:
        say("The same command with --retry-failed runs them again.", "red")
    return 1 if reasons else 0


def main(request: Request) -> int:
    """As the command does it: Ctrl-C loses the running cells and nothing else."""
    console = Console(stderr=True)
    try:
        return run_bench(request, console)
    except KeyboardInterrupt:
        console.print("Stopped. What has ended is kept: the same command goes on from there.")
        return 130
    except (WorkerError, StorageInternalError, SQLAlchemyError) as error:
        first = str(error).splitlines()[0]
        console.print(f"mechanic bench: {first}", style="red", highlight=False, markup=False)
        return 1
