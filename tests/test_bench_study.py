"""The queue of runs: nothing is lost, run twice, or taken for what it is not."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from mechanic.bench import study as studies
from mechanic.bench.record import Curve
from mechanic.bench.score import find_lost
from mechanic.bench.study import Grid
from mechanic.bench.train import DivergedError, Outcome

GRID = Grid(
    "convex", "iris", "short", "adamw", "sweep", "adamw", "test_accuracy", "", (0.1, 1.0), (0, 1)
)


@pytest.fixture
def storage(tmp_path: Path) -> RDBStorage:
    return studies.open_storage(f"sqlite:///{tmp_path / 'bench.db'}")


def outcome(loss: float) -> Outcome:
    return Outcome(2.0, {"train_loss": loss}, Curve([1, 2], [2.0, loss], [0.1, float("nan")]), 0.5)


class Trainer:
    """Loss = lr + seed / 10; remembers what it was asked, and raises what it is told to."""

    def __init__(self, errors: dict[tuple[float, int], BaseException] | None = None) -> None:
        self.asked: list[tuple[float, int]] = []
        self.errors = errors or {}

    def __call__(self, lr: float, seed: int) -> Outcome:
        self.asked.append((lr, seed))
        if error := self.errors.get((lr, seed)):
            raise error
        return outcome(lr + seed / 10)


def run_all(storage: RDBStorage, grid: Grid, trainer: Trainer, retry: bool = False) -> list:
    study = studies.open_study(storage, grid)
    studies.queue(study, grid, retry)
    return list(studies.run_cells(study, trainer, {"device": "test"}))


def test_every_cell_runs_once_and_is_read_back(storage):
    trainer = Trainer()
    ended = run_all(storage, GRID, trainer)
    assert trainer.asked == GRID.cells
    assert [(end.lr, end.seed, end.status) for end in ended] == [(*c, "done") for c in GRID.cells]
    runs = studies.load(storage)
    assert [(run.lr, run.seed) for run in runs] == GRID.cells
    assert [run.metrics["train_loss"] for run in runs] == [0.1, 0.2, 1.0, 1.1]
    first = runs[0]
    assert (first.suite, first.task, first.budget, first.method) == (
        "convex",
        "iris",
        "short",
        "adamw",
    )
    assert (first.kind, first.base, first.metric, first.start_loss) == (
        "sweep", "adamw", "test_accuracy", 2.0
    )  # fmt: skip
    assert first.curve.step == [1, 2]
    assert first.curve.lr[1] != first.curve.lr[1]  # NaN comes back as it went
    assert first.environment == {"device": "test"}


def test_a_record_without_a_loss_at_the_start_is_read_and_is_no_lost_run(storage):
    study = studies.open_study(storage, GRID)
    old = {"metrics": {"train_loss": 0.5}, "curve": asdict(Curve([], [], [])), "seconds": 1.0}
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.COMPLETE,
            value=0.5,
            user_attrs={"attempt": 0, "outcome": json.dumps(old)},
            system_attrs={"fixed_params": {"lr": 0.1, "seed": 0}},
        )
    )
    (run,) = studies.load(storage)
    assert math.isnan(run.start_loss)
    assert (run.status, run.metrics) == ("done", {"train_loss": 0.5})
    assert find_lost([run]) == []


def test_what_has_ended_is_not_run_again(storage):
    run_all(storage, GRID, Trainer())
    again = Trainer()
    assert run_all(storage, GRID, again) == []
    assert again.asked == []


def test_a_grid_may_grow(storage):
    run_all(storage, GRID, Trainer())
    more = Trainer()
    run_all(storage, replace(GRID, lrs=(0.1, 1.0, 10.0), seeds=(0, 1, 2)), more)
    assert set(more.asked) == {(0.1, 2), (1.0, 2), (10.0, 0), (10.0, 1), (10.0, 2)}
    assert len(studies.load(storage)) == 9


def test_failures_carry_their_reason_and_are_never_good(storage):
    errors = {
        (0.1, 0): DivergedError("the loss is nan at step 3"),
        (1.0, 1): MemoryError("no room"),
    }
    ended = run_all(storage, GRID, Trainer(errors))
    assert [end.status for end in ended] == ["diverged", "done", "done", "failed"]
    by_cell = {(run.lr, run.seed): run for run in studies.load(storage)}
    assert by_cell[0.1, 0].status == "diverged"
    assert by_cell[0.1, 0].reason == "the loss is nan at step 3"
    assert by_cell[1.0, 1].status == "failed"
    assert by_cell[1.0, 1].reason == "MemoryError: no room"
    assert by_cell[0.1, 0].metrics == by_cell[1.0, 1].metrics == {}
    study = studies.open_study(storage, GRID)
    assert study.best_trial.system_attrs["fixed_params"] == {"lr": 0.1, "seed": 1}
    assert studies.unfinished(study, GRID) == 0


def test_retry_runs_errors_again_but_not_divergence(storage):
    errors = {(0.1, 0): DivergedError("lost"), (1.0, 1): ValueError("bad data")}
    run_all(storage, GRID, Trainer(errors))
    mended = Trainer()
    run_all(storage, GRID, mended, retry=True)
    assert mended.asked == [(1.0, 1)]
    by_cell = {(run.lr, run.seed): run.status for run in studies.load(storage)}
    assert by_cell == {(0.1, 0): "diverged", (0.1, 1): "done", (1.0, 0): "done", (1.0, 1): "done"}


def test_an_interrupted_run_is_lost_and_queued_again(storage):
    with pytest.raises(KeyboardInterrupt):
        run_all(storage, GRID, Trainer({(0.1, 1): KeyboardInterrupt()}))
    study = studies.open_study(storage, GRID)
    assert studies.unfinished(study, GRID) == 3
    rest = Trainer()
    run_all(storage, GRID, rest)
    assert sorted(rest.asked) == [(0.1, 1), (1.0, 0), (1.0, 1)]
    assert len(studies.load(storage)) == 4


def claim(storage: RDBStorage, pid: int | None, host: str = studies._HOST) -> None:
    """Take the first waiting trial as another process would."""
    study = studies.open_study(storage, GRID)
    (trial, *_) = study.get_trials(states=(TrialState.WAITING,))
    assert storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    if pid is not None:
        storage.set_trial_user_attr(trial._trial_id, "worker", {"host": host, "pid": pid})
        storage.record_heartbeat(trial._trial_id)


def test_a_dead_process_gives_its_cell_back_a_living_one_keeps_it(storage):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    study = studies.open_study(storage, GRID)
    studies.queue(study, GRID)
    claim(storage, gone.pid)
    claim(storage, alive.pid)
    claim(storage, gone.pid, host="elsewhere")  # its pid says nothing here
    claim(storage, None)  # killed before it could say who it is: only time tells
    studies.release_lost(study)
    studies.queue(study, GRID)
    rest = Trainer()
    assert len(list(studies.run_cells(study, rest, {}))) == 1
    assert rest.asked == GRID.cells[:1]
    assert studies.unfinished(study, GRID) == 3
    alive.communicate(b"\n")
    studies.release_lost(study)
    studies.queue(study, GRID)
    assert len(list(studies.run_cells(study, rest, {}))) == 1
    assert rest.asked == GRID.cells[:2]


def test_no_sign_of_life_gives_the_cell_back(storage, monkeypatch):
    study = studies.open_study(storage, GRID)
    studies.queue(study, GRID)
    claim(storage, 1, host="elsewhere")
    claim(storage, None)
    monkeypatch.setattr(studies, "_CLAIM_TIME", -1)
    with storage.engine.connect() as connection:  # as if a minute had passed
        connection.exec_driver_sql("update trial_heartbeats set heartbeat = '2020-01-01 00:00:00'")
        connection.commit()
    studies.release_lost(study)
    studies.queue(study, GRID)
    rest = Trainer()
    list(studies.run_cells(study, rest, {}))
    assert sorted(rest.asked) == GRID.cells


def test_a_cell_queued_twice_runs_once(storage):
    study = studies.open_study(storage, GRID)
    studies.queue(study, GRID)
    for lr, seed in GRID.cells:  # as two processes do that look at the same moment
        study.enqueue_trial({"lr": lr, "seed": seed}, user_attrs={"attempt": 0})
    trainer = Trainer()
    list(studies.run_cells(study, trainer, {}))
    assert trainer.asked == GRID.cells
    assert len(studies.load(storage)) == 4


def test_a_dead_worker_is_a_failure_with_a_reason(storage):
    study = studies.open_study(storage, GRID)
    studies.queue(study, GRID)
    claim(storage, 12345678)
    assert studies.fail_trials_of(study, storage, 12345678, "the worker died of signal 9") == 1
    assert studies.fail_trials_of(study, storage, 12345678, "again") == 0
    studies.queue(study, GRID)
    rest = Trainer()
    list(studies.run_cells(study, rest, {}))
    assert rest.asked == GRID.cells[1:]
    (failed,) = [run for run in studies.load(storage) if run.status == "failed"]
    assert failed.reason == "the worker died of signal 9"


def test_studies_of_others_in_the_storage_are_left_alone(storage):
    optuna.create_study(storage=storage, study_name="theirs")
    run_all(storage, GRID, Trainer())
    assert len(studies.load(storage)) == 4


def test_a_run_that_was_silent_for_too_long_is_left_to_the_others(storage):
    """Another process takes it for dead and runs its cell: the late result is dropped."""
    study = studies.open_study(storage, GRID)
    studies.queue(study, GRID)

    class Sleeper(Trainer):
        def __call__(self, lr: float, seed: int) -> Outcome:
            if (lr, seed) == GRID.cells[0] and (lr, seed) not in self.asked:
                study.tell(0, state=TrialState.FAIL)
            return super().__call__(lr, seed)

    sleeper = Sleeper()
    ended = list(studies.run_cells(study, sleeper, {}))
    assert [(end.lr, end.seed) for end in ended] == GRID.cells[1:]
    assert studies.unfinished(study, GRID) == 1
    studies.queue(study, GRID)
    assert len(list(studies.run_cells(study, sleeper, {}))) == 1
    assert [run.status for run in studies.load(storage)] == ["done"] * 4


def test_other_data_under_the_same_name_is_refused(storage):
    run_all(storage, GRID, Trainer())
    with pytest.raises(ValueError, match="use another --storage for this data"):
        studies.open_study(storage, replace(GRID, data="another"))
