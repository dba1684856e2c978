"""No command reaches for the network. `mechanic bench --download` alone does, where it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import MECHANIC, environment, write

# First on the path of every process that a command starts. What stays on this machine is let pass.
WATCH = """
import os
import sys


def watch(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            tell(event, address)
    elif event == "socket.getaddrinfo" and arguments[0] not in ("127.0.0.1", "::1", "localhost"):
        tell(event, arguments)
    elif event == "urllib.Request":
        tell(event, arguments)


def tell(event, what):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{event} {what}\\n")
    raise OSError("the tests allow no network")


sys.addaudithook(watch)
"""

BENCH = "bench convex --budget smoke --tasks logistic-iris --device cpu --seeds 1 --methods presets"
COMMANDS = (
    "run --log log --plot run.png train.py",
    "plot log -o plot.png",
    "doctor log",
    BENCH,
    "report",
)


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    watch = folder / "watch"
    watch.mkdir(exist_ok=True)
    (watch / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    path = os.pathsep.join([str(watch), str(Path(__file__).parents[1])])
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(SEEN=str(folder / "seen"), PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_what_would_be_seen(tmp_path: Path) -> None:
    for code in (
        "import socket; socket.create_connection(('192.0.2.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://example.invalid')",
        "import socket; socket.getaddrinfo('example.invalid', 80)",
    ):
        assert call(tmp_path, sys.executable, "-c", code).returncode == 1
    assert len((tmp_path / "seen").read_text("utf-8").splitlines()) == 3


@pytest.mark.nightly
def test_no_command_reaches_for_the_network(tmp_path: Path) -> None:
    write(
        tmp_path,
        "model = make_model()\ntrain(model, torch.optim.AdamW(model.parameters()), steps=40)",
    )
    for command in COMMANDS:
        done = call(tmp_path, *MECHANIC, *command.split())
        assert done.returncode == 0, (command, done.stderr)
        assert not (tmp_path / "seen").exists(), (command, (tmp_path / "seen").read_text("utf-8"))
