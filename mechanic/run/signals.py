"""Signals: those of the keyboard reach the script by themselves, others are passed on to it."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
_PR_SET_PDEATHSIG = 1


def open_signals() -> "Signals":
    """The way of this platform to take signals; to be used in a `with`."""
    return WaitedFor() if hasattr(signal, "sigtimedwait") else Signals()


class Signals:
    """Where signals cannot be waited for (macOS, Windows): handlers that pass them on.

    SIGINT is taken to come from the keyboard, that is, to have reached the script too.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start the script."""
        self._child = subprocess.Popen(command, env=environment, close_fds=False)
        for name in _PASSED_ON:
            number = getattr(signal, name, None)
            if number is not None and name != "SIGTSTP":
                act: Any = signal.SIG_IGN if name == "SIGINT" else self._pass_on
                self._handlers[number] = signal.signal(number, act)
        return self._child

    def _pass_on(self, number: int, _: Any) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def wait(self, seconds: float) -> Any:
        """Wait until the script ends, a while at most; or give a signal that came."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

    def stop(self) -> None:
        """Stop, as Ctrl-Z would have stopped us, until we are continued."""


class WaitedFor(Signals):
    """Signals that are blocked and taken one by one, with how they came (Linux, BSD)."""

    def __init__(self) -> None:
        super().__init__()
        names = (*_PASSED_ON, "SIGCHLD", "SIGWINCH")
        self._taken = {getattr(signal, name) for name in names}
        self._mask: Iterable[int] = ()

    def __enter__(self) -> "WaitedFor":
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        return self

    def __exit__(self, *_: object) -> None:
        while signal.sigtimedwait(self._taken, 0):
            pass  # what came when the script had ended has nobody to go to
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start the script, with the signals as they were, and tied to this process's life."""
        prctl, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

        def prepare() -> None:
            if prctl is not None:  # a kill -9 of the supervisor is meant for the script
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:
                    os.kill(os.getpid(), signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

        return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=prepare)

    def wait(self, seconds: float) -> Any:
        """The next signal, or None: after a while, or when the script may have ended."""
        info = signal.sigtimedwait(self._taken, seconds)
        return None if info is None or info.si_signo == signal.SIGCHLD else info

    def stop(self) -> None:
        """Stop, as Ctrl-Z would have stopped us, until we are continued."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


def die_by(number: int) -> None:
    """Die by a signal, so that whoever waits for us sees what the script died of."""
    import resource  # Windows has none, and no death by signals

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left its own core
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
