"""All runs, in an Optuna storage: what is to be run, by whom it is being run, and what came of it.

A `Grid` (one method over one base on one task: learning rates times seeds) is one Optuna study, a
cell of it one trial. Cells are queued once; Optuna hands a queued trial to one process only, on
whatever machine. How a trial ends:

    COMPLETE               with its outcome
    FAIL with a reason     diverged, or an error: a result too, never run again unless asked
    FAIL without a reason  lost with its process: the cell is queued again
    PRUNED                 two processes queued the cell at the same time; the later one yields
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

from mechanic.bench.record import Curve, Kind, Run, Status
from mechanic.bench.train import DivergedError, Outcome

_BEAT = 10  # seconds between two signs of life of a running trial
_INTRODUCTION = 10  # seconds to say who has taken a trial; it takes milliseconds
_GRACE = 60  # seconds without one after which another machine takes it for dead


def _host() -> str:
    """Where a process number means the same: machines and containers may share a name."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


_HOST = _host()
_nameless: dict[tuple[str, int], float] = {}  # running trials that nobody owns to: when first seen

optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # what happened to a trial is in the storage


@dataclass(frozen=True)
class Grid:
    """The cells of one method over one base on one task."""

    suite: str
    task: str
    budget: str
    method: str
    kind: Kind
    base: str
    metric: str
    data: str
    """What tells its data from others of the same name."""
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the study."""
        parts = self.suite, self.task, self.budget, self.method, self.base
        return "/".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """Method and base for people, who need not hear "adamw over adamw"."""
        return self.method if self.base in ("", self.method) else f"{self.method}/{self.base}"

    @property
    def cells(self) -> list[tuple[float, int]]:
        """Typed lr and seed of each run."""
        return list(itertools.product(self.lrs, self.seeds))


class _Sampler(GridSampler):
    """Optuna's, for cells that are queued.

    Left to itself it gives one cell to two processes that ask at the same moment, and a grid that
    grows by a seed would be numbered anew.
    """

    def after_trial(self, *args: Any) -> None:
        """The end is where no cell is left in the queue, which `work` sees."""


def open_storage(url: str) -> RDBStorage:
    """Any database that Optuna takes; made if it is not there."""
    lite = url.startswith("sqlite")
    if lite and url.removeprefix("sqlite://") in ("", "/", "/:memory:"):
        raise ValueError(f"--storage {url} is lost with its process; name a file: sqlite:///FILE")
    # Several processes write to one file: let them wait for each other.
    options = {"connect_args": {"timeout": 120}} if lite else {"pool_pre_ping": True}
    for attempt in itertools.count():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                storage = RDBStorage(url, options, heartbeat_interval=_BEAT, grace_period=_GRACE)
            break
        except (ImportError, sqlalchemy.exc.SQLAlchemyError) as error:
            # Two processes that make the tables at the same moment get in each other's way.
            if attempt == 4 or not isinstance(error, sqlalchemy.exc.DBAPIError):
                raise _cannot_open(url, error) from error
            time.sleep(0.2 * 2**attempt)
    if lite:
        _lock_from_the_start(storage.engine)
    return storage


def check_storage(url: str) -> None:
    """Refuse what is no storage of Optuna's, before it is made into one."""
    file = url.removeprefix("sqlite:///")
    if file != url and not Path(file).is_file():
        raise ValueError(f"--storage: there is no file {file}; mechanic bench makes it")
    try:
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as link:
            there = sqlalchemy.inspect(link).has_table("studies")
        engine.dispose()
    except (ImportError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _cannot_open(url, error) from error
    if not there:
        raise ValueError(f"--storage {shown(url)} is no storage of mechanic bench")


def shown(url: str) -> str:
    """A storage for people to read: without the password."""
    return re.sub(r":[^:@/]*@", ":***@", url)


def _cannot_open(url: str, error: Exception) -> ValueError:
    return ValueError(f"--storage {shown(url)} cannot be opened: {str(error).splitlines()[0]}")


def _lock_from_the_start(engine: sqlalchemy.Engine) -> None:
    """Make "is it free? then it is mine" one transaction in SQLite, which has no row locks."""
    sqlalchemy.event.listen(
        engine, "connect", lambda link, _: setattr(link, "isolation_level", None)
    )
    sqlalchemy.event.listen(engine, "begin", lambda link: link.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections made before know nothing of it


def open_study(storage: RDBStorage, grid: Grid) -> optuna.Study:
    """The grid's study, made if it is not there."""
    space = {"lr": grid.lrs, "seed": grid.seeds}
    study = optuna.create_study(
        storage=storage, study_name=grid.name, sampler=_Sampler(space), load_if_exists=True
    )
    if "grid" not in study.user_attrs:
        about = asdict(grid)
        del about["lrs"], about["seeds"]
        study.set_user_attr("grid", about)
    elif study.user_attrs["grid"].get("data", grid.data) != grid.data:
        raise ValueError(
            f"the storage holds runs of {grid.task} on other data than there is now; "
            "give other data another --storage"
        )
    return study


def _cell(trial: FrozenTrial) -> tuple[float, int]:
    params = trial.system_attrs["fixed_params"]
    return params["lr"], params["seed"]


def _counts(trial: FrozenTrial) -> bool:
    """Whether a trial stands for its cell: it waits, runs, or ended with a result."""
    if "fixed_params" not in trial.system_attrs or trial.state == TrialState.PRUNED:
        return False
    return trial.state != TrialState.FAIL or "reason" in trial.user_attrs


def queue(study: optuna.Study, grid: Grid, retry_failed: bool = False) -> None:
    """Queue the cells that no trial stands for; with `retry_failed` those too that met an error."""
    attempts: dict[tuple[float, int], int] = {}
    for trial in study.get_trials(deepcopy=False):
        if _counts(trial):
            again = retry_failed and trial.user_attrs.get("status") == "failed"
            attempts[_cell(trial)] = trial.user_attrs["attempt"] + 1 if again else -1
    for cell in grid.cells:
        attempt = attempts.get(cell, 0)
        if attempt >= 0:
            params = {"lr": cell[0], "seed": cell[1]}
            study.enqueue_trial(params, user_attrs={"attempt": attempt})


def reap(study: optuna.Study) -> None:
    """Give up the running trials whose process is gone, so that `queue` queues their cells again.

    A process of this machine is looked up; of one elsewhere the heartbeat tells.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        if worker is None:  # perhaps killed in the moment between taking it and saying so
            seen = _nameless.setdefault((study.study_name, trial.number), time.monotonic())
            dead = time.monotonic() - seen > _INTRODUCTION
        else:
            dead = worker["host"] == _HOST and not _alive(worker["pid"])
        if dead:
            _end(study, trial.number)


def bury(study: optuna.Study, storage: RDBStorage, pid: int, reason: str) -> int:
    """Record what killed a worker as the reason for which its trial failed; how many there were."""
    buried = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("worker") == {"host": _HOST, "pid": pid}:
            storage.set_trial_user_attr(trial._trial_id, "status", "failed")
            storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            _end(study, trial.number)
            buried += 1
    return buried


def _end(study: optuna.Study, number: int) -> None:
    with contextlib.suppress(UpdateFinishedTrialError):  # another process was faster
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's, and there
        pass
    return True


Train = Callable[[float, int], Outcome]  # of a typed lr and a seed


class Ended(NamedTuple):
    """How a cell ended, for those who watch."""

    lr: float
    seed: int
    status: Status
    text: str
    """The train loss, or the reason."""


def work(study: optuna.Study, train: Train, environment: Mapping[str, str]) -> Iterator[Ended]:
    """Run cells until none waits."""
    ended: list[Ended] = []
    current = -1

    def objective(trial: optuna.Trial) -> float:
        nonlocal current
        current = trial.number
        trial.set_user_attr("worker", {"host": _HOST, "pid": os.getpid()})
        if _yields(study, trial):
            raise optuna.TrialPruned("another process has this cell")
        # Bounds are of no use here, and an open interval lets a grid grow.
        lr = trial.suggest_float("lr", 0.0, 1e300)
        seed = trial.suggest_int("seed", 0, 2**53)
        try:
            outcome = train(lr, seed)
        except Exception as error:
            status: Status = "diverged" if isinstance(error, DivergedError) else "failed"
            what = (str(error).splitlines() or [""])[0]
            reason = what if status == "diverged" else f"{type(error).__name__}: {what}"
            trial.set_user_attr("environment", dict(environment))
            trial.set_user_attr("status", status)
            trial.set_user_attr("reason", reason)
            ended.append(Ended(lr, seed, status, reason))
            raise
        trial.set_user_attr("environment", dict(environment))
        trial.set_user_attr("outcome", json.dumps(asdict(outcome)))
        ended.append(Ended(lr, seed, "done", f"{outcome.metrics['train_loss']:.4g}"))
        return outcome.metrics["train_loss"]

    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            try:
                study.optimize(objective, n_trials=1, catch=(Exception,))
            except ValueError:
                if not study.get_trials(deepcopy=False)[current].state.is_finished():
                    raise
                ended.clear()  # it was silent for too long, and another process has its cell
        yield from ended
        ended.clear()


def _yields(study: optuna.Study, trial: optuna.Trial) -> bool:
    """Whether a trial has no cell of its own: it came from no queue, or from a double entry."""
    trials = study.get_trials(deepcopy=False)
    mine = trials[trial.number]
    if "fixed_params" not in mine.system_attrs:
        return True
    return any(
        _counts(other)
        and _cell(other) == _cell(mine)
        and other.user_attrs["attempt"] == mine.user_attrs["attempt"]
        for other in trials[: trial.number]
    )


def finished(study: optuna.Study, grid: Grid) -> set[tuple[float, int]]:
    """The cells that have a result."""
    return set(grid.cells) & {
        _cell(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and _counts(trial)
    }


def unfinished(study: optuna.Study, grid: Grid) -> int:
    """How many cells have none yet."""
    return len(grid.cells) - len(finished(study, grid))


def load(storage: RDBStorage) -> list[Run]:
    """Every run that has ended, of every study of the bench in the storage."""
    runs = []
    for name in optuna.study.get_all_study_names(storage):
        study = optuna.load_study(study_name=name, storage=storage)
        about = study.user_attrs.get("grid")
        if about is None:  # a study of somebody else's
            continue
        latest: dict[tuple[float, int], FrozenTrial] = {}
        for trial in study.get_trials(deepcopy=False):
            if _counts(trial) and trial.state.is_finished():
                latest[_cell(trial)] = trial
        runs += [_to_run(about, trial) for trial in latest.values()]
    return runs


def _to_run(about: Mapping[str, Any], trial: FrozenTrial) -> Run:
    lr, seed = _cell(trial)
    attrs = trial.user_attrs
    about = {key: value for key, value in about.items() if key != "data"}
    common = {**about, "lr": lr, "seed": seed, "environment": attrs.get("environment", {})}
    if trial.state == TrialState.FAIL:
        return Run(**common, status=attrs["status"], reason=attrs["reason"])
    outcome = json.loads(attrs["outcome"])
    outcome["curve"] = Curve(**outcome["curve"])
    return Run(**common, **outcome, status="done")
