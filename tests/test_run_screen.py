"""The status line, on a terminal that `pyte` plays, and on one of tmux."""

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest
from running import MECHANIC, environment, write

from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History
from mechanic.run.summary import status_lines

ROWS, COLUMNS = 24, 80
REGION = re.compile(rb"\x1b\[(\d*)(?:;(\d*))?r")
# What the line writes, each time in one piece, between what the script writes
LINE = re.compile(rb"(?:\x1b7\x1b\[r\x1b8\x1bD)?\x1b7[^\n]*?\x1b8(?:\x1b\[1A)?")


# Makes the terminal that of its session, and becomes what is to run there.
LEAD = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A terminal with a process in its foreground."""

    def __init__(self, folder: Path, *arguments: str, term: str = "xterm", **streams: int) -> None:
        self.master, slave = pty.openpty()
        self._size(ROWS, COLUMNS)
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""

        command = [sys.executable, "-c", LEAD, *MECHANIC, "run", *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(TERM=term), stdin=slave,
            stdout=streams.get("stdout", slave), stderr=streams.get("stderr", slave),
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)

    def _size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, rows: int, columns: int) -> None:
        self._size(rows, columns)  # the kernel sends SIGWINCH
        self.screen.resize(rows, columns)

    def read(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Show what comes until something is so, or until the end: then, the exit status."""
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end, self.output[-2000:]
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:  # how a terminal ends on Linux
                    data = b""
                if not data:
                    return self.process.wait(10)
                self.output += data
                self._stream.feed(data)
        return None

    def last_row(self) -> str:
        return self.screen.display[-1].rstrip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        """
        import sys
        from tqdm import tqdm

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for i in tqdm(range(1234), mininterval=0.02):
            train(model, optimizer, steps=1)
            if i % 30 == 0:
                tqdm.write(f"line {i}")
            if i == 600:
                sys.stdin.readline()
        print("a half", end="", flush=True)
        """,
    )
    return tmp_path


@pytest.mark.nightly
def test_the_line_lives_with_tqdm_and_a_resize_and_leaves_no_trace(folder: Path) -> None:
    terminal = Terminal(folder, "--log", "log", "train.py")

    terminal.read(lambda: "step 601" in terminal.last_row())
    before = list(terminal.screen.display)
    assert re.match(
        r"mechanic  AdamW  step 601  \S+/s  scale \S+  lr \S+e-\d+$", before[-1].rstrip()
    )
    assert any(re.search(r"\d+/1234 \[", row) for row in before[:-1])  # tqdm's own bar
    assert sum("mechanic" in row for row in before) == 1
    terminal.resize(12, 60)
    terminal.read(lambda: "step 601" in terminal.last_row())
    os.write(terminal.master, b"\n")
    assert terminal.read() == 0

    text = terminal.output
    regions = REGION.findall(text)
    assert (b"1", b"23") in regions
    assert (b"1", b"11") in regions
    assert regions[-1] == (b"", b"")  # given back
    own = LINE.sub(b"", text)
    shown = [int(step) for step in re.findall(rb"^(?:.*\r)?line (\d+)\r$", own, re.MULTILINE)]
    assert shown == list(range(0, 1234, 30))  # the script's output came whole
    assert b"a half" in text
    assert terminal.screen.margins is None
    assert "lr learned" in "\n".join(terminal.screen.display)
    assert b"AdamW: tuned, 1,234 steps" in text
    last = (folder / "log" / "history.jsonl").read_text().splitlines()[-2]
    assert '"step": 1234' in last  # thinned from 1,000 on, but for the last


@pytest.mark.parametrize("how", ["--quiet", "dumb", "redirected"])
def test_no_line_where_none_is_wanted(how: str, tmp_path: Path) -> None:
    write(tmp_path, "print('out')", training=False)
    options = ["--quiet"] if how == "--quiet" else []
    with open(tmp_path / "errors", "wb") as errors:
        streams = {"stderr": errors.fileno()} if how == "redirected" else {}
        term = "dumb" if how == "dumb" else "xterm"
        terminal = Terminal(tmp_path, *options, "train.py", term=term, **streams)
        assert terminal.read() == 0

    assert b"\x1b" not in terminal.output
    assert (b"mechanic run" in terminal.output) == (how == "dumb")
    assert b"\x1b" not in (tmp_path / "errors").read_bytes()


def test_ctrl_c_reaches_the_script_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import time
        count = 0
        while count < 2:
            try:
                print("ready", flush=True)
                for _ in range(40):
                    time.sleep(0.05)
                break
            except KeyboardInterrupt:
                count += 1
        print("interrupts:", count)
        """,
        training=False,
    )
    terminal = Terminal(tmp_path, "train.py")
    terminal.read(lambda: b"ready" in terminal.output)

    os.write(terminal.master, b"\x1a")  # Ctrl-Z, where no shell could continue us, does nothing
    os.write(terminal.master, b"\x03")

    assert terminal.read() == 0
    assert b"interrupts: 1" in terminal.output


def test_ctrl_c_kills_as_it_kills_python(tmp_path: Path) -> None:
    write(tmp_path, "import time; print('ready', flush=True); time.sleep(30)", training=False)
    terminal = Terminal(tmp_path, "train.py")
    terminal.read(lambda: b"ready" in terminal.output)

    os.write(terminal.master, b"\x03")

    assert terminal.read() == -signal.SIGINT
    assert terminal.output.count(b"KeyboardInterrupt") == 1
    assert b"killed by SIGINT" in terminal.output


class Tmux:
    """A terminal of tmux with a shell in it. Unlike `pyte`, it moves the cursor to the top where a
    scroll region is set, as real terminals do."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "socket"), "-f", "/dev/null"]
        shell = "bash --norc --noprofile -i"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._call("new-session", "-d", *size, f"cd {shlex.quote(str(folder))} && exec {shell}")
        self.type("PS1='$ '", "Enter")

    def _call(self, *arguments: str) -> str:
        command = [*self._tmux, *arguments]
        kept = {k: v for k, v in environment().items() if not k.startswith("TMUX")}
        run = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
        return run.stdout

    def type(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def rows(self) -> list[str]:
        return self._call("capture-pane", "-p").splitlines()

    def read(self, until: Callable[[list[str]], bool]) -> list[str]:
        end = time.monotonic() + 60
        while not until(rows := self.rows()):
            assert time.monotonic() < end, "\n".join(rows)
            time.sleep(0.05)
        return rows

    def end(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    write(
        tmp_path,
        """
        import sys
        one, two = make_model(), make_model()
        first = torch.optim.AdamW(one.parameters(), lr=1e-4)
        second = torch.optim.SGD(two.parameters(), lr=1e-4)
        for i in range(3):
            train(one, first, steps=2)
            train(two, second, steps=2)
            print("script", i, flush=True)
            sys.stdin.readline()
        """,
    )
    terminal = Tmux(tmp_path)
    yield terminal
    terminal.end()


def _at(label: str, step: int, *rates: float) -> History:
    row = HistoryRow(step, 0.0, 1.0, 1.0, 0, rates, ())
    return History(label, 0, label, "tuned", rows=[row])


@pytest.mark.parametrize("step", [999, 12_345, 1_234_567])
@pytest.mark.parametrize("rates", [(0.1,), (0.1, 0.2)])
@pytest.mark.parametrize(
    "labels", [("AdamW", "SGD"), ("Adafactor", "SparseAdam"), ("AdamW 1", "AdamW 2", "Muon")]
)
def test_each_lr_is_shown_whole_in_80_columns(labels, rates, step) -> None:
    lines = status_lines([_at(label, step, *rates) for label in labels])
    assert [len(line) for line in lines] == sorted(map(len, lines), reverse=True)
    shown = next(line for line in lines if len(line) < 80)
    for label in labels:
        assert label in shown
    assert len(re.findall(r"\de-01", shown)) == len(labels) * len(rates)


def test_nothing_is_written_over_in_a_real_terminal(tmux: Tmux) -> None:
    """What stood there stays, and what comes follows below it, also after Ctrl-Z and fg."""

    def has(*texts: str) -> Callable[[list[str]], bool]:
        return lambda rows: all(any(text in row for row in rows) for text in texts)

    def place(rows: list[str], text: str) -> int:
        return next(i for i, row in enumerate(rows) if row.startswith(text))

    tmux.type("clear; seq -f 'before %g' 6", "Enter")
    tmux.read(has("before 6"))
    tmux.type(" ".join(map(shlex.quote, [*MECHANIC, "run", "train.py"])), "Enter")
    rows = tmux.read(has("script 0", "AdamW  step 2", "SGD  step 2"))
    assert [row for row in rows if row.startswith("before")] == [f"before {i}" for i in range(1, 7)]
    assert place(rows, "before 6") < place(rows, "script 0")
    # both optimizers, whole, in the last of 80 columns
    assert re.match(
        r"mechanic  AdamW  step 2  lr \S+e-\d+  \|  SGD  step 2  lr \S+e-\d+$", rows[-1]
    )
    tmux.type("C-z")
    tmux.read(has("Stopped"))
    tmux.type("fg", "Enter")
    tmux.type("", "Enter")
    rows = tmux.read(has("script 1", "step 4"))
    assert place(rows, "before 6") < place(rows, "script 0") < place(rows, "script 1")
    tmux.type("", "Enter")
    tmux.read(has("script 2"))
    tmux.type("", "Enter")
    rows = tmux.read(has("mechanic run: train.py: exit code 0"))
    assert place(rows, "script 2") < place(rows, "mechanic run:")
    assert not any("step 6" in row for row in rows)  # the status line has left no trace
