"""`mechanic run`: the script's process is python's own, and no death of it loses the log."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import MECHANIC, Logged, call, environment, write

SEES = """
import os, signal, sys, __main__
print(sys.argv, __name__, __main__.__file__, os.getcwd(), __package__, sys.flags.dev_mode)
print(sys.stdin.read(), end="")
print([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (["--quiet"], ["train.py", "--quiet", "--help", "-m", "--", "a b"]),
        (["--quiet", "--"], ["train.py", "--log", "x"]),
        (["--quiet", "--only=AdamW"], ["-m", "pkg.train", "--log", "x", "--dry-run"]),
        (["--quiet", "--skip", "SGD"], ["pkg", "1"]),
    ],
)
def test_the_script_sees_what_it_sees_under_python(
    options: list[str], target: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/train.py", "pkg/__main__.py"):
        (tmp_path / name).write_text(SEES)

    def streams(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(PYTHONDEVMODE="1"), input="in\n", text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    plain = streams(sys.executable, *target)

    assert streams(*MECHANIC, "run", *options, *target) == plain
    assert plain[0] == 7
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise RuntimeError('mine')", 1, "exit code 1"),
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("import os; os._exit(4)", 4, "exit code 4"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("import os; os.abort()", -signal.SIGABRT, "killed by SIGABRT"),
    ],
)
def test_it_ends_as_the_script_ended(body: str, code: int, words: str, tmp_path: Path) -> None:
    write(tmp_path, body, training=False)
    plain = call(tmp_path, "train.py", python=True)

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == plain.returncode == code
    assert run.stderr.startswith(plain.stderr)  # the script's own traceback
    assert words in run.stderr
    reason = "the script failed before it made" if code else "the script made no torch optimizer"
    assert reason in run.stderr
    log = Logged(tmp_path / "log")
    assert log.summary["exit_code"] == (code if code > 0 else 128 - code)
    assert [line["event"] for line in log.lines] == ["start", "end"]
    assert log.lines[0]["command"] == ["train.py"]


def test_no_death_loses_a_step(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import ctypes, os, sys

        def story(die):
            model = make_model()
            train(model, torch.optim.AdamW(model.parameters()), steps=25)
            die()

        before = make_model()
        optimizer = torch.optim.SGD(before.parameters(), lr=0.1)
        train(before, optimizer, steps=3)
        for die in (lambda: os._exit(3), lambda: os.kill(os.getpid(), 9),
                    lambda: ctypes.string_at(0)):
            child = os.fork()
            if not child:
                train(before, optimizer, steps=4)  # its own from here on
                story(die)
            os.waitpid(child, 0)
        train(before, optimizer, steps=1)
        raise RuntimeError("half-way")
        """,
    )

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == 1
    assert "RuntimeError: half-way" in run.stderr
    log = Logged(tmp_path / "log")
    names = {one["optimizer"]: one["steps"] for one in log.summary["optimizers"]}
    forked = {"SGD 2": 4, "SGD 3": 4, "SGD 4": 4, "AdamW": 25, "AdamW 2": 25, "AdamW 3": 25}
    assert names == {"SGD": 4, **forked}
    for name, steps in names.items():
        assert [row["step"] for row in log.of(name)] == list(range(1, steps + 1))
    assert log.of("AdamW")[-1]["scale"] > 2 * log.of("AdamW")[0]["scale"]


@pytest.mark.nightly
def test_workers_forked_and_spawned(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import sys
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from torch.utils.data import DataLoader, TensorDataset

        def work(rank, folder):
            address = f"file://{folder}/meeting"  # a port might be another test's by then
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
            model = nn.parallel.DistributedDataParallel(make_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(model, optimizer, steps=20)
            sys.stdout.write(type(optimizer).__module__ + "\\n")
            leave_group()

        if __name__ == "__main__":
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
            loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, num_workers=2)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            import os
            mp.spawn(work, (os.getcwd(),), nprocs=2)
        """,
    )

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["mechanic.torch"] * 2  # tuned on both ranks
    log = Logged(tmp_path / "log")
    steps = {one["optimizer"]: one["steps"] for one in log.summary["optimizers"]}
    assert steps == {"AdamW": 8, "SGD": 20}  # reported once


DISTRIBUTED = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
train(model, optimizer, steps=20)
# one write: what two ranks print comes in pieces
sys.stdout.write(f"{dist.get_rank()} {type(optimizer).__module__} {sys.argv[1:]}\\n")
leave_group()
"""


@pytest.mark.parametrize("by", ["--nproc", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_distributed_is_tuned_on_every_rank_and_reported_once(by: str, tmp_path: Path) -> None:
    write(tmp_path, DISTRIBUTED)
    if by == "--nproc":
        run = call(tmp_path, "--nproc", "2", "--log", "log", "-m", "train", "--nproc", "3")
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        mechanic = [
            "--no-python",
            "--",
            *MECHANIC,
            "run",
            "--log",
            "log",
            "train.py",
            "--nproc",
            "3",
        ]
        run = call(tmp_path, *torchrun, *mechanic, python=True)

    assert run.returncode == 0, run.stderr
    said = "mechanic.torch ['--nproc', '3']"
    assert sorted(run.stdout.splitlines()) == [f"0 {said}", f"1 {said}"]
    assert run.stderr.count("mechanic run:") == 1
    assert run.stderr.count("AdamW: tuned, 20 steps") == 1
    assert len(Logged(tmp_path / "log").of("AdamW")) == 20


def call_with_files_up_to(
    kibibytes: int, folder: Path, *options: str, steps: int
) -> subprocess.CompletedProcess[str]:
    """`mechanic run` where no file may grow beyond a size, as on a disk that is full."""
    write(
        folder,
        f"""
        model = make_model()
        train(model, torch.optim.AdamW(model.parameters()), steps={steps})
        print("trained")
        """,
    )
    mechanic = " ".join([*MECHANIC, "run", *options, "train.py"])
    return subprocess.run(
        ["bash", "-c", f"ulimit -f {kibibytes}; exec {mechanic}"], cwd=folder,
        env=environment(PYTHONDONTWRITEBYTECODE="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_disk_that_fills_up_ends_the_notes_and_not_the_script(tmp_path: Path) -> None:
    run = call_with_files_up_to(12, tmp_path, "--log", "log", steps=100)

    assert run.returncode == 0, run.stderr
    assert run.stdout == "trained\n"
    assert "AdamW is no longer recorded" in run.stderr


def test_a_full_temporary_folder_is_told_and_ends_no_script(tmp_path: Path) -> None:
    run = call_with_files_up_to(0, tmp_path, steps=20)
    said = " ".join(run.stderr.split())
    assert run.returncode == 0, run.stderr
    assert run.stdout == "trained\n"
    assert "no folder for temporary files can be written to" in said
    assert "Set TMPDIR" in said
    assert "made no torch optimizer" not in said


@pytest.mark.nightly
def test_a_temporary_folder_that_fills_up_is_told_and_ends_no_script(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import resource, tempfile
        tempfile.gettempdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        model = make_model()
        train(model, torch.optim.AdamW(model.parameters()), steps=20)
        print("trained")
        """,
    )
    run = call(tmp_path, "train.py")
    assert run.stdout == "trained\n"
    assert "AdamW is no longer recorded" in run.stderr
    assert "AdamW was not recorded to its end" in run.stderr
    assert "made no torch optimizer" not in run.stderr


WAITS = """
import os, signal, sys, time

def handler(number, frame):
    open("got", "a").write(signal.Signals(number).name + " ")
    if number != signal.SIGUSR1:
        sys.exit(5)

for name in ("SIGUSR1", "SIGTERM", "SIGHUP", "SIGINT"):
    signal.signal(getattr(signal, name), handler)
open("ready", "w").write(str(os.getpid()))
for _ in range(200):
    time.sleep(0.05)
"""


def started(folder: Path, process: "subprocess.Popen[bytes]") -> int:
    """Wait for the script, and return its process."""
    ready = folder / "ready"
    end = time.monotonic() + 20
    while not (ready.exists() and ready.read_text()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(ready.read_text())


def supervised(folder: Path, body: str) -> "subprocess.Popen[bytes]":
    write(folder, body, training=False)
    return subprocess.Popen(
        [*MECHANIC, "run", "--quiet", "train.py"], cwd=folder, env=environment(TMPDIR=str(folder)),
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signals_to_the_supervisor_reach_the_script(name: str, tmp_path: Path) -> None:
    process = supervised(tmp_path, WAITS)
    started(tmp_path, process)

    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.send_signal(getattr(signal, name))

    assert process.wait(20) == 5
    assert (tmp_path / "got").read_text().split() == ["SIGUSR1", name]


def test_a_script_that_a_signal_kills_takes_the_supervisor_along(tmp_path: Path) -> None:
    body = "import os, time; open('ready', 'w').write(str(os.getpid())); time.sleep(20)"
    process = supervised(tmp_path, body)
    started(tmp_path, process)

    process.terminate()

    assert process.wait(20) == -signal.SIGTERM  # a shell says 143


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_supervisor_takes_the_script_along(tmp_path: Path) -> None:
    process = supervised(tmp_path, WAITS)
    script = started(tmp_path, process)

    process.kill()
    process.wait(20)

    end = time.monotonic() + 10
    while Path(f"/proc/{script}").exists() and _state(script) != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="there are no locks on folders")
def test_the_next_run_removes_what_a_killed_supervisor_has_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    write(tmp_path, WAITS, training=False)
    write(tmp_path, "print('here')", name="other.py", training=False)

    def start() -> "tuple[subprocess.Popen[bytes], str]":
        before = set(os.listdir(temporary))
        (tmp_path / "ready").unlink(missing_ok=True)
        process = subprocess.Popen(
            [*MECHANIC, "run", "--quiet", "train.py"],
            cwd=tmp_path,
            env=environment(TMPDIR=str(temporary)),
            start_new_session=True,
        )
        started(tmp_path, process)
        (folder,) = set(os.listdir(temporary)) - before
        return process, folder

    killed, left = start()
    killed.kill()
    killed.wait(20)
    assert os.listdir(temporary) == [left]
    living, used = start()
    assert os.listdir(temporary) == [used]
    (temporary / "mechanic-run-of-no-run").symlink_to(tmp_path)
    (temporary / "another-program").mkdir()
    kept = {used, "mechanic-run-of-no-run", "another-program"}

    assert call(tmp_path, "other.py", TMPDIR=str(temporary)).stdout == "here\n"

    assert set(os.listdir(temporary)) == kept
    assert (tmp_path / "train.py").exists()
    living.terminate()
    assert living.wait(20) == 5
    assert set(os.listdir(temporary)) == kept - {used}


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    write(tmp_path, "print('here')", training=False)

    run = call(tmp_path, "train.py", TMPDIR=str(tmp_path / "tmp"))

    assert run.stdout == "here\n"
    assert os.listdir(tmp_path / "tmp") == []
