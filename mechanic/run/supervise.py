"""The supervisor: starts the script, forwards signals, reports, and ends as the script ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import mechanic
from mechanic.run.log import Log
from mechanic.run.request import RunRequest
from mechanic.run.screen import Screen
from mechanic.run.settings import VARIABLE, is_first_rank
from mechanic.run.signals import Signals, die_by, open_signals
from mechanic.run.spool import Spool
from mechanic.run.summary import Ending, as_json, as_text, status_lines

_INJECT = str(Path(__file__).with_name("inject"))
_PREFIX = "mechanic-run-"
# Seconds between two looks at the spool, with a status line and without one.
_LIVE_INTERVAL, _QUIET_INTERVAL = 0.2, 0.5


def main(request: RunRequest) -> int:
    """Run the script and return its exit code. If a signal killed it, die by the same signal."""
    if not is_first_rank():  # only the first rank reports
        _become_the_script(request)
    try:
        spool = _make_folder()
    except OSError as error:
        sys.stderr.write(
            f"mechanic run: no folder for temporary files can be written to ({error}). The script "
            "runs, and its optimizers are tuned, but steps are not recorded. Set TMPDIR to a "
            "folder with room.\n"
        )
        sys.stderr.flush()
        _become_the_script(request)
    try:
        code = Supervisor(request, spool).run()
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    if code < 0:
        die_by(-code)
    return code


def _make_folder() -> str:
    """A folder for the steps, locked while this process lives; those of dead ones are removed."""
    with contextlib.suppress(OSError):
        _remove_left_behind(tempfile.gettempdir())
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(OSError):  # not every file system has locks
            _lock(folder)
        if os.path.isdir(folder):  # another run may have taken it for one that was left behind
            return folder


def _lock(folder: str, *, wait: bool = True) -> int | None:
    """Lock a folder until this process ends, however it does. Returns the descriptor that holds the
    lock, and None where there are no locks (Windows).

    Raises:
        OSError: if it cannot be locked, or if another process has done so and `wait` is false.
    """
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left_behind(where: str) -> None:
    """Remove the folders of this user's runs that were killed: no process holds their lock."""
    with os.scandir(where) as entries:
        found = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for entry in found:
        with contextlib.suppress(OSError):
            is_own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if not is_own or not entry.is_dir(follow_symlinks=False):
                continue
            descriptor = _lock(entry.path, wait=False)
            if descriptor is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(descriptor)


def _become_the_script(request: RunRequest) -> NoReturn:
    """Run the script in this process, tuned and unrecorded."""
    os.execve(sys.executable, request.command, _environment(request, None))


def _environment(request: RunRequest, spool: str | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (_INJECT, os.environ.get("PYTHONPATH"))))
    settings = request.settings(spool).to_environment()
    return {**os.environ, "PYTHONPATH": path, VARIABLE: settings}


class Supervisor:
    """Does what is needed while the script runs, and right after."""

    def __init__(self, request: RunRequest, spool: str) -> None:
        self._request = request
        self._folder = spool
        self._spool = Spool(spool)
        self._started = time.time()
        self._problems: dict[str, None] = {}  # each once, in order
        self._log = self._open_log(request.log) if request.log else None
        live = not request.quiet and Screen.is_usable(2)
        self._screen = Screen(2) if live else None

    def run(self) -> int:
        """Start the script, wait for its end, and report. Returns its code."""
        with open_signals() as signals:
            command, environment = self._request.command, _environment(self._request, self._folder)
            child = signals.start(command, environment)
            try:
                while child.poll() is None:
                    self._handle(child, signals, signals.wait(self._interval()))
                    self._update()
            finally:
                self._guard(self._close_screen)
                self._screen = None
            self._update()
            self._finish(child.returncode)
        return int(child.returncode)

    def _interval(self) -> float:
        return _LIVE_INTERVAL if self._screen else _QUIET_INTERVAL

    def _handle(self, child: subprocess.Popen[bytes], signals: Signals, info: Any) -> None:
        if info is None:
            return
        if info.si_signo == signal.SIGWINCH:
            self._guard(self._resize)
            return
        if info.si_code <= 0:  # sent by a process; the script gets the keyboard's signals anyway
            child.send_signal(info.si_signo)
        if info.si_signo == signal.SIGTSTP:
            self._guard(self._close_screen)
            signals.stop()

    def _update(self) -> None:
        """Log and show what is new."""
        self._guard(self._log_and_show)

    def _log_and_show(self) -> None:
        for history, events, rows in self._spool.poll():
            if self._log:
                self._log.add(history, events, rows)
        if self._screen and (lines := status_lines(self._spool.histories)):
            self._screen.show(lines)

    def _resize(self) -> None:
        if self._screen:
            self._screen.resize()

    def _close_screen(self) -> None:
        if self._screen:
            self._screen.close()

    def _guard(self, action: Callable[[], None]) -> None:
        """Report an error instead of raising it: no error here may harm the script."""
        try:
            action()
        except Exception as error:
            self._problems[f"mechanic run met an error while the script ran: {error!r}"] = None
            screen, self._screen = self._screen, None
            if screen:
                with contextlib.suppress(OSError):
                    screen.close()

    def _finish(self, code: int) -> None:
        ending = Ending(self._request, code, self._started, time.time())
        self._guard(lambda: self._close_log(ending))
        if self._request.plot:
            self._guard(self._draw)
        if not self._request.quiet:
            text = self._summarize(ending)
            with contextlib.suppress(OSError):  # standard error may be closed
                sys.stderr.write(text)
                sys.stderr.flush()

    def _summarize(self, ending: Ending) -> str:
        spool = self._spool
        try:
            return as_text(ending, spool.histories, list(self._problems), spool.failures)
        except Exception as error:  # the script's exit code is not ours to change
            return f"mechanic run: the summary could not be made: {error!r}\n"

    def _close_log(self, ending: Ending) -> None:
        for history in self._spool.histories:
            rows = history.close()
            if self._log:
                self._log.add(history, [], rows)
        if self._log:
            self._log.close({**self._description(), **as_json(ending, self._spool.histories)})
            if self._log.problem:
                self._problems[self._log.problem] = None

    def _draw(self) -> None:
        from mechanic.run.plot import Curves, draw

        assert self._request.plot is not None
        curves = [Curves.of_history(one) for one in self._spool.histories if one.rows]
        if curves:
            draw(curves, self._request.plot)
        else:
            self._problems[f"{self._request.plot} was not drawn: no optimizer took a step"] = None

    def _open_log(self, folder: Path) -> Log:
        try:
            return Log(folder, self._description())
        except OSError as error:
            raise ValueError(f"--log {folder} cannot be written: {error}") from error

    def _description(self) -> dict[str, Any]:
        return {
            "command": self._request.target,
            "folder": os.getcwd(),
            "options": self._request.options,
            "started": self._started,
            "versions": {
                "mechanic": mechanic.__version__,
                "python": sys.version.split()[0],
                "torch": _version("torch"),
            },
        }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
