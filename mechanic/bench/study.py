"""All runs, in an Optuna storage: which runs wait, which process has taken which, and the results.

A `Grid` holds the runs of one method over one base on one task. It is one Optuna study. Each of its
cells, a learning rate and a seed, is one trial. Cells are queued once. Optuna gives a queued trial
to a single process, on any machine. A trial ends in one of these states:

    COMPLETE               with its outcome
    FAIL with a reason     it diverged or met an error; it runs again only if the user asks for it
    FAIL without a reason  its process was lost; the cell is queued again
    PRUNED                 two processes queued the cell at the same time; this trial came later
"""

import contextlib
import itertools
import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import GridSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from mechanic.bench.course import DivergedError
from mechanic.bench.record import Curve, MethodKind, Outcome, Run, Status

_HEARTBEAT = 10  # seconds between two heartbeats of a running trial
_GRACE = 60  # seconds without a heartbeat after which other machines take a process for dead
_CLAIM_TIME = 10  # seconds for a process to write its name into a trial; milliseconds are enough


def _host() -> str:
    """A name for this machine or container, within which process numbers are unique. The host name
    alone would not do: several may share one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


_HOST = _host()
_unclaimed: dict[tuple[str, int], float] = {}  # when a running trial without a name was first seen

optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # the storage says what happened to a trial


@dataclass(frozen=True)
class Grid:
    """The runs of one method over one base on one task: learning rates times seeds."""

    suite: str
    task: str
    budget: str
    method: str
    kind: MethodKind
    base: str
    metric: str
    data: str
    """A hash of the data, which tells it from other data of the same name."""
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the study."""
        parts = self.suite, self.task, self.budget, self.method, self.base
        return "/".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """Method and base for the user, but "adamw" where "adamw/adamw" would say no more."""
        return self.method if self.base in ("", self.method) else f"{self.method}/{self.base}"

    @property
    def cells(self) -> list[tuple[float, int]]:
        """The typed lr and the seed of each run."""
        return list(itertools.product(self.lrs, self.seeds))


class _Sampler(GridSampler):
    """Optuna's sampler, restricted to cells that are queued.

    The original would give one cell to two processes that ask at the same moment, and would number
    the cells again when the grid grows by a seed.
    """

    def after_trial(self, *args: Any) -> None:
        """The original would stop the study here. Instead, `run_cells` stops at an empty queue."""


def open_storage(url: str) -> RDBStorage:
    """Open a database that Optuna supports. It is created if it does not exist."""
    is_sqlite = url.startswith("sqlite")
    if is_sqlite and url.removeprefix("sqlite://") in ("", "/", "/:memory:"):
        raise ValueError(f"--storage {url} is lost with its process; use a file: sqlite:///FILE")
    # Several processes write to one file: let them wait for each other.
    options = {"connect_args": {"timeout": 120}} if is_sqlite else {"pool_pre_ping": True}
    for attempt in itertools.count():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                storage = RDBStorage(
                    url, options, heartbeat_interval=_HEARTBEAT, grace_period=_GRACE
                )
            break
        except (ImportError, sqlalchemy.exc.SQLAlchemyError) as error:
            # Two processes that create the tables at the same moment disturb each other: try again.
            if attempt == 4 or not isinstance(error, sqlalchemy.exc.DBAPIError):
                raise _cannot_open(url, error) from error
            time.sleep(0.2 * 2**attempt)
    if is_sqlite:
        _begin_immediate(storage.engine)
    return storage


def check_storage(url: str) -> None:
    """Refuse what is no Optuna storage, before `open_storage` turns it into one."""
    file = url.removeprefix("sqlite:///")
    if file != url and not Path(file).is_file():
        raise ValueError(f"--storage: there is no file {file}; mechanic bench creates it")
    try:
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as connection:
            is_storage = sqlalchemy.inspect(connection).has_table("studies")
        engine.dispose()
    except (ImportError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _cannot_open(url, error) from error
    if not is_storage:
        raise ValueError(f"--storage {without_password(url)} is no storage of mechanic bench")


def without_password(url: str) -> str:
    """The URL of a storage, safe to show."""
    return re.sub(r":[^:@/]*@", ":***@", url)


def _cannot_open(url: str, error: Exception) -> ValueError:
    reason = str(error).splitlines()[0]
    return ValueError(f"--storage {without_password(url)} cannot be opened: {reason}")


def _begin_immediate(engine: sqlalchemy.Engine) -> None:
    """Lock an SQLite file from the start of each transaction. SQLite has no row locks, so another
    process could otherwise take a trial between the check that it is free and the claim."""

    def without_implicit_begin(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlalchemy.event.listen(engine, "connect", without_implicit_begin)
    sqlalchemy.event.listen(engine, "begin", begin)
    engine.dispose()  # the connections so far do not have these listeners


def open_study(storage: RDBStorage, grid: Grid) -> optuna.Study:
    """Open the study of a grid. It is created if it does not exist."""
    space = {"lr": grid.lrs, "seed": grid.seeds}
    study = optuna.create_study(
        storage=storage, study_name=grid.name, sampler=_Sampler(space), load_if_exists=True
    )
    if "grid" not in study.user_attrs:
        description = asdict(grid)
        del description["lrs"], description["seeds"]
        study.set_user_attr("grid", description)
    elif study.user_attrs["grid"].get("data", grid.data) != grid.data:
        raise ValueError(
            f"the storage holds runs of {grid.task} on other data of the same name; "
            "use another --storage for this data"
        )
    return study


def _cell(trial: FrozenTrial) -> tuple[float, int]:
    params = trial.system_attrs["fixed_params"]
    return params["lr"], params["seed"]


def _is_valid(trial: FrozenTrial) -> bool:
    """Whether a trial counts for its cell: it waits, it runs, or it has ended with a result."""
    if "fixed_params" not in trial.system_attrs or trial.state == TrialState.PRUNED:
        return False
    return trial.state != TrialState.FAIL or "reason" in trial.user_attrs


def queue(study: optuna.Study, grid: Grid, retry_failed: bool = False) -> None:
    """Queue the cells that have no valid trial. With `retry_failed`, queue those that met an error
    as well."""
    attempts: dict[tuple[float, int], int] = {}
    for trial in study.get_trials(deepcopy=False):
        if _is_valid(trial):
            again = retry_failed and trial.user_attrs.get("status") == "failed"
            attempts[_cell(trial)] = trial.user_attrs["attempt"] + 1 if again else -1
    for cell in grid.cells:
        attempt = attempts.get(cell, 0)
        if attempt >= 0:
            params = {"lr": cell[0], "seed": cell[1]}
            study.enqueue_trial(params, user_attrs={"attempt": attempt})


def release_lost(study: optuna.Study) -> None:
    """End the running trials whose process is gone, so that `queue` queues their cells again.

    On this machine the process is looked up. On another machine its heartbeat tells.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        if worker is None:  # the process may have been killed before it wrote its name
            seen = _unclaimed.setdefault((study.study_name, trial.number), time.monotonic())
            dead = time.monotonic() - seen > _CLAIM_TIME
        else:
            dead = worker["host"] == _HOST and not _is_alive(worker["pid"])
        if dead:
            _fail(study, trial.number)


def fail_trials_of(study: optuna.Study, storage: RDBStorage, pid: int, reason: str) -> int:
    """End the trials of a dead worker as failed, for the given reason. Returns their number."""
    failed = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("worker") == {"host": _HOST, "pid": pid}:
            storage.set_trial_user_attr(trial._trial_id, "status", "failed")
            storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            _fail(study, trial.number)
            failed += 1
    return failed


def _fail(study: optuna.Study, number: int) -> None:
    with contextlib.suppress(UpdateFinishedTrialError):  # another process has ended it
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, but belongs to another user
        pass
    return True


TrainCell = Callable[[float, int], Outcome]
"""Trains one cell, given the typed lr and the seed."""


class CellResult(NamedTuple):
    """How a cell ended, to be shown to the user."""

    lr: float
    seed: int
    status: Status
    text: str
    """The train loss, or the reason why it failed."""


def run_cells(
    study: optuna.Study, train: TrainCell, environment: Mapping[str, str]
) -> Iterator[CellResult]:
    """Run queued cells until none is left."""
    results: list[CellResult] = []
    current = -1

    def objective(trial: optuna.Trial) -> float:
        nonlocal current
        current = trial.number
        trial.set_user_attr("worker", {"host": _HOST, "pid": os.getpid()})
        if _is_superfluous(study, trial):
            raise optuna.TrialPruned("another process has this cell")
        # The values come from the queue. The bounds are wide, so that a grid may grow.
        lr = trial.suggest_float("lr", 0.0, 1e300)
        seed = trial.suggest_int("seed", 0, 2**53)
        try:
            outcome = train(lr, seed)
        except Exception as error:
            status: Status = "diverged" if isinstance(error, DivergedError) else "failed"
            message = (str(error).splitlines() or [""])[0]
            reason = message if status == "diverged" else f"{type(error).__name__}: {message}"
            trial.set_user_attr("environment", dict(environment))
            trial.set_user_attr("status", status)
            trial.set_user_attr("reason", reason)
            results.append(CellResult(lr, seed, status, reason))
            raise
        trial.set_user_attr("environment", dict(environment))
        trial.set_user_attr("outcome", json.dumps(asdict(outcome)))
        results.append(CellResult(lr, seed, "done", f"{outcome.metrics['train_loss']:.4g}"))
        return outcome.metrics["train_loss"]

    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            try:
                study.optimize(objective, n_trials=1, catch=(Exception,))
            except ValueError:
                if not study.get_trials(deepcopy=False)[current].state.is_finished():
                    raise
                results.clear()  # it was silent for too long, and another process has its cell
        yield from results
        results.clear()


def _is_superfluous(study: optuna.Study, trial: optuna.Trial) -> bool:
    """Whether a trial did not come from the queue, or its cell was queued twice."""
    trials = study.get_trials(deepcopy=False)
    this = trials[trial.number]
    if "fixed_params" not in this.system_attrs:
        return True
    return any(
        _is_valid(other)
        and _cell(other) == _cell(this)
        and other.user_attrs["attempt"] == this.user_attrs["attempt"]
        for other in trials[: trial.number]
    )


def finished(study: optuna.Study, grid: Grid) -> set[tuple[float, int]]:
    """The cells that have a result."""
    return set(grid.cells) & {
        _cell(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and _is_valid(trial)
    }


def unfinished(study: optuna.Study, grid: Grid) -> int:
    """The number of cells that have no result yet."""
    return len(grid.cells) - len(finished(study, grid))


def load(storage: RDBStorage) -> list[Run]:
    """Load every run that has ended, from all studies of the bench in a storage."""
    runs = []
    for name in optuna.study.get_all_study_names(storage):
        study = optuna.load_study(study_name=name, storage=storage)
        description = study.user_attrs.get("grid")
        if description is None:  # the study does not belong to the bench
            continue
        latest: dict[tuple[float, int], FrozenTrial] = {}
        for trial in study.get_trials(deepcopy=False):
            if _is_valid(trial) and trial.state.is_finished():
                latest[_cell(trial)] = trial
        runs += [_to_run(description, trial) for trial in latest.values()]
    return runs


def _to_run(description: Mapping[str, Any], trial: FrozenTrial) -> Run:
    lr, seed = _cell(trial)
    attrs = trial.user_attrs
    common = {key: value for key, value in description.items() if key != "data"}
    common |= {"lr": lr, "seed": seed, "environment": attrs.get("environment", {})}
    if trial.state == TrialState.FAIL:
        return Run(**common, status=attrs["status"], reason=attrs["reason"])
    outcome = json.loads(attrs["outcome"])
    outcome["curve"] = Curve(**outcome["curve"])
    return Run(**common, **outcome, status="done")
