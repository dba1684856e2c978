"""`mechanic bench` as a command: what it runs, what it survives, and who shares the work."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from mechanic.bench import study as studies
from mechanic.bench.data import Data
from mechanic.bench.methods import METHODS
from mechanic.bench.plan import Request, make_plan
from mechanic.bench.record import Run
from mechanic.bench.report.text import summary_csv
from mechanic.bench.score import compare
from mechanic.bench.suites import convex

MECHANIC = [sys.executable, "-m", "mechanic"]
SMALL = ["bench", "convex", "--budget", "smoke", "--tasks", "logistic-iris", "--device", "cpu"]

LRS = len(convex.GRIDS["adamw"])


def bench(*options: str, storage: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*MECHANIC, *SMALL, *options, "--storage", storage]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


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


def test_runs_goes_on_and_stops(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bench.db"
    options = ("--methods", "adamw", "mechanic", "prodigy", "--seeds", "2", "--jobs", "2")
    done = bench(*options, storage=url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = load(url)
    assert Counter(run.method for run in runs) == {"adamw": 2 * LRS, "mechanic": 6, "prodigy": 2}
    assert all(run.status == "done" and len(run.curve.step) == 20 for run in runs)
    assert {run.environment["mechanic"] for run in runs} == {__import__("mechanic").__version__}
    lines = [line for line in done.stderr.splitlines() if line.startswith("convex/")]
    assert len(lines) == len(set(lines)) == 2 * LRS + 8  # each result as it comes, once
    again = bench(*options, storage=url, cwd=tmp_path)
    assert again.returncode == 0
    assert "train loss" not in again.stderr
    more = bench(*options[:-3], "3", storage=url, cwd=tmp_path)
    assert more.returncode == 0
    assert len(load(url)) == 3 * LRS + 12


@pytest.mark.parametrize("kills", [5, pytest.param(10, marks=pytest.mark.nightly)])
def test_killed_many_times_the_table_is_that_of_an_undisturbed_run(
    tmp_path: Path, kills: int
) -> None:
    options = ("--seeds", "2", "--jobs", "2", "--methods", "adamw", "lion", "prodigy")
    undisturbed, disturbed = (f"sqlite:///{tmp_path}/{name}.db" for name in ("whole", "killed"))
    assert bench(*options, storage=undisturbed, cwd=tmp_path).returncode == 0
    draw = random.Random(0)
    command = [*MECHANIC, *SMALL, *options, "--storage", disturbed]
    for kill in range(kills):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        if kill < 3:  # while it starts, makes the tables, or fills the queue
            time.sleep(draw.uniform(0.5, 4.0))
        else:  # while it runs: after some results, at any moment of those that follow
            results = (line for line in process.stderr if "train loss" in line)
            for _ in range(draw.randrange(1, 6)):
                assert next(results)
            time.sleep(draw.uniform(0.0, 0.2))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 0 < len(load(disturbed)) < len(load(undisturbed))
    last = bench(*options, storage=disturbed, cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert states(disturbed)[TrialState.FAIL] > 0  # some were lost on the way
    assert numbers(load(disturbed)) == numbers(load(undisturbed))
    tables = [summary_csv(compare(load(url))) for url in (undisturbed, disturbed)]
    assert tables[0] == tables[1]
    assert tables[0].count("prodigy") == 1


def test_a_worker_that_is_killed_is_a_failure_and_the_rest_goes_on(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bench.db"
    options = ("--methods", "adamw", "--seeds", "1", "--jobs", "1", "--storage", url)
    (tmp_path / "sitecustomize.py").write_text(
        "import mechanic.bench.train as t, os, signal\n"
        "original = t._run\n"
        "def run(problem, live, *rest):\n"
        "    if abs(live.optimizer.param_groups[0]['lr'] - 0.1) < 1e-9:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(problem, live, *rest)\n"
        "t._run = run\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(
        [*MECHANIC, *SMALL, *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 1, process.stderr
    statuses = {run.lr: (run.status, run.reason) for run in load(url)}
    assert statuses.pop(0.1) == ("failed", "the worker died of signal 9 (out of memory?)")
    assert set(statuses.values()) == {("done", "")}
    assert len(statuses) == LRS - 1
    again = bench("--methods", "adamw", "--seeds", "1", "--retry-failed", storage=url, cwd=tmp_path)
    assert again.returncode == 0
    assert all(run.status == "done" for run in load(url))


def test_divergence_is_a_result_with_its_reason(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bench.db"
    (tmp_path / "sitecustomize.py").write_text(
        "import mechanic.bench.suites.convex as convex\nconvex.GRIDS['sgd'] = [0.1, 1e38]\n"
    )
    done = subprocess.run(
        [*MECHANIC, *SMALL, "--methods", "sgd", "--seeds", "1", "--jobs", "1", "--storage", url],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr  # a result like any other
    good, lost = sorted(load(url), key=lambda run: run.lr)
    assert (good.status, good.reason) == ("done", "")
    assert lost.status == "diverged"
    assert re.fullmatch(r"the loss is (nan|inf) at step \d+ of 20", lost.reason)
    assert lost.reason in done.stderr


@pytest.mark.nightly
def test_an_idle_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """Two cells and two workers: the one that is done first is killed, the other finishes."""
    url = f"sqlite:///{tmp_path}/bench.db"
    (tmp_path / "sitecustomize.py").write_text(
        "import mechanic.bench.train as t, os, time\n"
        "original = t._run\n"
        "def run(*all):\n"
        "    try:\n"
        f"        with open({str(tmp_path / 'busy')!r}, 'x') as busy:\n"
        "            busy.write(str(os.getpid()))\n"
        "        time.sleep(8)\n"
        "    except FileExistsError:\n"
        "        pass\n"
        "    return original(*all)\n"
        "t._run = run\n"
    )
    options = ("--methods", "prodigy", "--seeds", "2", "--jobs", "2", "--storage", url)
    process = subprocess.Popen(
        [*MECHANIC, *SMALL, *options],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
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
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
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
        (["bench", "convex", "--data", "nowhere"], "--data must name a folder, got nowhere"),
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
    from mechanic.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(options)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # nothing is left behind


def request(**changes: object) -> Request:
    given = {
        "suites": ("convex",), "tasks": (), "methods": (), "seeds": 3, "budget": "smoke",
        "typed": (1.0,), "data": Data(), "device": "cpu", "storage": "", "jobs": 1,
        "retry_failed": False,
    }  # fmt: skip
    return Request(**{**given, **changes})  # type: ignore[arg-type]


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
        name for name, method in METHODS.items() if not method.on_request
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
        run("pg_ctl", "stop", "-m", "immediate")
        shutil.rmtree(folder)


def test_two_processes_share_a_study_on_postgresql(postgres: str, tmp_path: Path) -> None:
    options = [
        "--methods",
        "sweeps",
        "prodigy",
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--storage",
        postgres,
    ]
    command = [*MECHANIC, *SMALL, *options]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    cells = 3 * LRS * 2 + 2
    assert len(load(postgres)) == cells
    ended = [line for text in said for line in text.splitlines() if "train loss" in line]
    assert len(ended) == len(set(ended)) == cells  # each run once, by the one or the other
    assert min(text.count("train loss") for text in said) > 5  # and both took part
    assert states(postgres)[TrialState.COMPLETE] == cells
    alone = f"sqlite:///{tmp_path}/alone.db"
    assert bench(*options[:-2], storage=alone, cwd=tmp_path).returncode == 0
    assert numbers(load(postgres)) == numbers(load(alone))


@pytest.mark.nightly
def test_two_machines_may_start_at_the_same_moment(tmp_path: Path) -> None:
    """On one SQLite file as well, and from no file at all."""
    url = f"sqlite:///{tmp_path}/bench.db"
    options = ["--methods", "adamw", "--seeds", "2", "--jobs", "2", "--storage", url]
    processes = []
    for _ in range(2):
        processes.append(subprocess.Popen([*MECHANIC, *SMALL, *options], stderr=subprocess.DEVNULL))
        time.sleep(0.05)
    assert [process.wait(300) for process in processes] == [0, 0]
    assert len(load(url)) == 2 * LRS
    assert states(url)[TrialState.COMPLETE] == 2 * LRS
