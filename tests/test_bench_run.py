"""`mechanic bench` as a command: what it runs, what it survives, and who shares the work."""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from subprocess import PIPE, Popen
from textwrap import dedent
from typing import NamedTuple

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState
from running import MECHANIC, PATH, SITE, environment

from mechanic.bench import study as studies
from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.plan import BenchRequest, make_plan
from mechanic.bench.record import Run
from mechanic.bench.report.text import summary_csv
from mechanic.bench.score import compare
from mechanic.bench.suites import convex
from mechanic.cli import main

SMALL = ["bench", "convex", "--budget", "smoke", "--tasks", "logistic-iris", "--device", "cpu"]

LRS = len(convex.GRIDS["adamw"])


def bench(*options: str, storage: str) -> int:
    """`mechanic bench` with this process as the parent: its workers are processes of their own."""
    return main([*SMALL, *options, "--storage", storage])


def start(*options: str, storage: str, cwd: Path, site: Path = SITE) -> "Popen[str]":
    """`mechanic bench` in a process of its own."""
    command = [*MECHANIC, *SMALL, *options, "--storage", storage]
    more = {"PYTHONPATH": f"{site}{os.pathsep}{PATH}"}
    return Popen(command, cwd=cwd, env=environment(**more), stderr=PIPE, text=True)


def end(process: "Popen[str]") -> tuple[int, str]:
    """Its exit code, and what it said."""
    said = process.communicate(timeout=300)[1]
    return process.returncode, said


def customize(folder: Path, code: str) -> Path:
    """A site of processes that are to be quick and run some code first."""
    quickly = (SITE / "sitecustomize.py").read_text()
    (folder / "sitecustomize.py").write_text(quickly + dedent(code))
    return folder


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATH)


def numbers(runs: list[Run]) -> dict[tuple[object, ...], object]:
    """What of the runs must not depend on when and where they ran."""
    return {
        (run.task, run.method, run.base, run.lr, run.seed): (
            run.status,
            run.reason,
            run.start_loss,
            dict(run.metrics),
            list(run.curve.loss),
        )
        for run in runs
    }


def load(url: str) -> list[Run]:
    storage = studies.open_storage(url)
    try:
        return studies.load(storage)
    finally:
        storage.engine.dispose()


def states(url: str) -> Counter[TrialState]:
    storage = studies.open_storage(url)
    names = optuna.study.get_all_study_names(storage)
    loaded = [optuna.load_study(study_name=name, storage=storage) for name in names]
    found = Counter(trial.state for study in loaded for trial in study.trials)
    storage.engine.dispose()
    return found


def kill(process: "Popen[str]") -> None:
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()


class Whole(NamedTuple):
    """A study that nothing disturbed."""

    url: str
    options: tuple[str, ...]
    said: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    url = f"sqlite:///{folder}/bench.db"
    options = ("--methods", "adamw", "mechanic", "prodigy", "--jobs", "2", "--seeds", "1")
    code, said = end(start(*options, storage=url, cwd=folder))
    assert code == 0, said
    return Whole(url, options, said)


def test_runs_goes_on_and_stops(whole: Whole, tmp_path: Path, capsys) -> None:
    shutil.copy(whole.url.removeprefix("sqlite:///"), tmp_path / "bench.db")
    url = f"sqlite:///{tmp_path}/bench.db"
    runs = load(url)
    assert Counter(run.method for run in runs) == {"adamw": LRS, "mechanic": 3, "prodigy": 1}
    assert all(run.status == "done" and len(run.curve.step) == 20 for run in runs)
    assert {run.environment["mechanic"] for run in runs} == {__import__("mechanic").__version__}
    lines = [line for line in whole.said.splitlines() if line.startswith("convex/")]
    assert len(lines) == len(set(lines)) == LRS + 4  # each result as it comes, once
    assert bench(*whole.options, "--jobs", "1", storage=url) == 0
    assert "train loss" not in capsys.readouterr().err


@pytest.mark.nightly
def test_a_second_seed_is_added_to_the_first(whole: Whole, tmp_path: Path, capsys) -> None:
    shutil.copy(whole.url.removeprefix("sqlite:///"), tmp_path / "bench.db")
    url = f"sqlite:///{tmp_path}/bench.db"
    assert bench(*whole.options, "--seeds", "2", "--jobs", "1", storage=url) == 0
    assert capsys.readouterr().err.count("train loss") == LRS + 4
    assert len(load(url)) == 2 * LRS + 8


@pytest.mark.nightly
@pytest.mark.parametrize(("early", "late"), [(1, 1), (3, 7)])
def test_killed_many_times_the_table_is_that_of_an_undisturbed_run(
    whole: Whole, tmp_path: Path, early: int, late: int
) -> None:
    undisturbed, disturbed, options = whole.url, f"sqlite:///{tmp_path}/killed.db", whole.options
    if late > 1:
        options = ("--methods", "adamw", "lion", "prodigy", "--jobs", "2", "--seeds", "2")
        undisturbed = f"sqlite:///{tmp_path}/whole.db"
        assert bench(*options, storage=undisturbed) == 0
    draw = random.Random(0)
    for _ in range(early):  # while it starts, makes the tables, or fills the queue
        process = start(*options, storage=disturbed, cwd=tmp_path)
        time.sleep(draw.uniform(0.5, 4.0))
        kill(process)
    lost = 0
    while late > 0 or not lost:  # while it runs: after some results, at any moment from then on
        process = start(*options, storage=disturbed, cwd=tmp_path)
        results = (line for line in process.stderr or () if "train loss" in line)
        for _ in range(draw.randrange(1, 4 + (late > 1))):
            assert next(results)
        time.sleep(draw.uniform(0.0, 0.2))
        kill(process)
        lost, late = lost + states(disturbed)[TrialState.RUNNING], late - 1
    assert 0 < len(load(disturbed)) < len(load(undisturbed))
    assert bench(*options, "--jobs", "1", storage=disturbed) == 0
    assert states(disturbed)[TrialState.FAIL] > 0  # some were lost on the way
    assert numbers(load(disturbed)) == numbers(load(undisturbed))
    tables = [summary_csv(compare(load(url))) for url in (undisturbed, disturbed)]
    assert tables[0] == tables[1]
    assert tables[0].count("prodigy") == 1


@pytest.mark.nightly
def test_a_worker_that_is_killed_is_a_failure_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/bench.db"
    options = ("--methods", "adamw", "--seeds", "1", "--jobs", "1")
    dying = """
        import mechanic.bench.train as t, os, signal
        original = t._run
        def run(problem, players, *rest):
            if abs(players[0].running.optimizer.param_groups[0]["lr"] - 0.1) < 1e-9:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(problem, players, *rest)
        t._run = run
        """
    monkeypatch.setitem(convex.GRIDS, "adamw", [0.03, 0.1, 0.3])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(customize(tmp_path, dying)), prepend=os.pathsep)
        assert bench(*options, storage=url) == 1
    statuses = {run.lr: (run.status, run.reason) for run in load(url)}
    assert statuses.pop(0.1) == ("failed", "the worker died of signal 9 (out of memory?)")
    assert set(statuses.values()) == {("done", "")}
    assert len(statuses) == 2
    assert bench(*options, "--retry-failed", storage=url) == 0
    assert all(run.status == "done" for run in load(url))


@pytest.mark.nightly
def test_divergence_is_a_result_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    url = f"sqlite:///{tmp_path}/bench.db"
    monkeypatch.setitem(convex.GRIDS, "sgd", [0.1, 1e38])
    # a result like any other
    assert bench("--methods", "sgd", "--seeds", "1", "--jobs", "1", storage=url) == 0
    good, lost = sorted(load(url), key=lambda run: run.lr)
    assert (good.status, good.reason) == ("done", "")
    assert lost.status == "diverged"
    assert re.fullmatch(r"the loss is (nan|inf) at step \d+ of 20", lost.reason)
    assert lost.reason in capsys.readouterr().err


@pytest.mark.nightly
def test_an_idle_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """Two cells and two workers: the one that is done first is killed, the other finishes."""
    url = f"sqlite:///{tmp_path}/bench.db"
    waiting = f"""
        import mechanic.bench.train as t, os, time
        original = t._run
        def run(*all):
            try:
                with open({str(tmp_path / "busy")!r}, "x") as busy:
                    busy.write(str(os.getpid()))
                time.sleep(8)
            except FileExistsError:
                pass
            return original(*all)
        t._run = run
        """
    customize(tmp_path, waiting)
    options = ("--methods", "prodigy", "--seeds", "2", "--jobs", "2")
    process = start(*options, storage=url, cwd=tmp_path, site=tmp_path)
    busy = tmp_path / "busy"
    while not busy.exists() or not busy.read_text():
        time.sleep(0.05)
    assert process.stderr is not None
    assert any("train loss" in line for line in process.stderr)  # the other one is done
    time.sleep(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    (idle,) = set(workers) - {busy.read_text()}
    os.kill(int(idle), signal.SIGKILL)
    code, said = end(process)
    assert code == 0, said
    assert [run.status for run in load(url)] == ["done", "done"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["bench"], "give one or more of convex"),
        (["bench", "nope"], "got nope"),
        (["bench", "convex", "--methods", "adam"], "there is no 'adam'"),
        (["bench", "convex", "--tasks", "moon"], "no task is named moon"),
        (["bench", "convex", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["bench", "convex", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["bench", "convex", "--typed", "-1"], "positive and finite, got -1.0"),
        (
            ["bench", "convex", "--data", "nowhere"],
            "--data must name an existing folder, got nowhere",
        ),
        (["bench", "convex", "--device", "abacus"], "--device abacus cannot be used"),
        (["bench", "convex", "--storage", "nonsense"], "nonsense"),
        (["bench", "convex", "--storage", "sqlite:///:memory:"], "is lost with its process"),
        (["bench", "convex", "--storage", "sqlite:///no/folder/x.db"], "cannot be opened"),
        (["report"], "there is no file mechanic-bench.db"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(options)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # nothing is left behind


def request(**changes: object) -> BenchRequest:
    given = {
        "suites": ("convex",), "tasks": (), "methods": (), "seeds": 3, "budget": "smoke",
        "typed": (1.0,), "data": Data(), "device": "cpu", "storage": "", "jobs": 1,
        "retry_failed": False,
    }  # fmt: skip
    return BenchRequest(**{**given, **changes})  # type: ignore[arg-type]


def uninstall(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as anyone who asks can tell."""
    original = metadata.version

    def version(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError
        return original(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_peer_that_is_not_installed_is_named_and_skipped(monkeypatch) -> None:
    uninstall("prodigyopt", monkeypatch)
    plan = make_plan(request())
    assert plan.skipped == ["prodigy: prodigyopt is not installed; pip install prodigyopt"]
    assert "prodigy" not in {grid.method for grid in plan.grids}
    assert "dog" in {grid.method for grid in plan.grids}


def test_without_lion_nothing_that_wraps_it_is_planned(monkeypatch) -> None:
    uninstall("lion-pytorch", monkeypatch)
    plan = make_plan(request(methods=("lion", "mechanic", "adamw")))
    assert {(grid.method, grid.base) for grid in plan.grids} == {
        ("mechanic", "sgd"), ("mechanic", "adamw"), ("adamw", "adamw"),
    }  # fmt: skip
    said = "lion-pytorch is not installed; pip install lion-pytorch"
    assert plan.skipped == [f"lion: {said}", f"mechanic/lion: {said}"]


def test_the_plan_has_every_method_on_every_base(monkeypatch) -> None:
    plan = make_plan(request(typed=(1e-4, 1.0)))
    grids = {(g.task, g.method, g.base): g for g in plan.grids}
    tasks = {grid.task for grid in plan.grids}
    assert len(tasks) == 4
    for task in tasks:
        for base in ("sgd", "adamw", "lion"):
            assert len(grids[task, base, base].lrs) >= 9
            assert grids[task, "mechanic", base].lrs == (1e-4, 1.0)
            assert grids[task, "mechanic-paper", base].seeds == (0, 1, 2)
            assert grids[task, "mechanic-pytorch", base].lrs == (1.0,)
        for peer in ("prodigy", "dog", "ldog", "schedulefree-adamw"):
            assert grids[task, peer, ""].kind == "peer"
    assert {grid.method for grid in plan.grids} == {
        name
        for name, method in METHODS.items()
        if not method.on_request and "torch" in method.libraries
    }


def find_postgres() -> Path | None:
    places = [Path(found).parent] if (found := shutil.which("initdb")) else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists()), None)


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """A server of our own, in a folder of our own, reached by its socket."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed")
    folder = Path("/tmp") / f"mechanic-postgres-{os.getpid()}"  # a socket's path must be short
    folder.mkdir()
    prefix = []
    if os.geteuid() == 0:  # it refuses to run as root
        shutil.chown(folder, "postgres")
        prefix = ["runuser", "-u", "postgres", "--"]
    data = folder / "data"

    def run(program: str, *options: str) -> None:
        command = [*prefix, str(programs / program), "-D", str(data), *options]
        subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL)

    run("initdb", "--auth=trust", "--username=postgres")
    try:
        run(
            "pg_ctl",
            "start",
            "-w",
            "-o",
            f"-k {folder} -c listen_addresses=''",
            "-l",
            f"{folder}/log",
        )
        yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
    finally:
        for engine in [one for one in gc.get_objects() if type(one) is sqlalchemy.Engine]:
            engine.dispose()  # psycopg warns of connections that nobody has closed
        run("pg_ctl", "stop", "-m", "immediate")
        shutil.rmtree(folder)


# Each of two workers waits with its first run until the other has come to its own.
TOGETHER = """
import mechanic.bench.train as t, os, pathlib, time
here, original = pathlib.Path({folder!r}), t._run

def run(*all):
    (here / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while len(list(here.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    return original(*all)

t._run = run
"""


@pytest.mark.nightly
def test_two_processes_share_a_study_on_postgresql(
    postgres: str, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "begun").mkdir()
    site = customize(tmp_path, TOGETHER.format(folder=str(tmp_path / "begun")))
    options = [*whole.options, "--jobs", "1"]
    one = start(*options, storage=postgres, cwd=tmp_path, site=site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    other = bench(*options, storage=postgres)  # with this process as the second parent
    code, heard = end(one)
    assert (code, other) == (0, 0), heard
    said = heard, capsys.readouterr().err
    cells = LRS + 4
    assert len(load(postgres)) == cells
    ended = [line for text in said for line in text.splitlines() if "train loss" in line]
    assert len(ended) == len(set(ended)) == cells  # each run once, by the one or the other
    assert min(text.count("train loss") for text in said) > 2  # and both took part
    assert states(postgres)[TrialState.COMPLETE] == cells
    assert numbers(load(postgres)) == numbers(load(whole.url))


@pytest.mark.nightly
def test_two_machines_may_start_at_the_same_moment(tmp_path: Path) -> None:
    """On one SQLite file as well, and from no file at all."""
    url = f"sqlite:///{tmp_path}/bench.db"
    options = ["--methods", "adamw", "--seeds", "2", "--jobs", "2"]
    processes = []
    for _ in range(2):
        processes.append(start(*options, storage=url, cwd=tmp_path))
        time.sleep(0.05)
    assert [code for code, _ in map(end, processes)] == [0, 0]
    assert len(load(url)) == 2 * LRS
    assert states(url)[TrialState.COMPLETE] == 2 * LRS
