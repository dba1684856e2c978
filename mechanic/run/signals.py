"""Signals: those from the keyboard reach the script anyway, the others are forwarded to it."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
_PR_SET_PDEATHSIG = 1


def open_signals() -> "Signals":
    """What this platform offers to receive signals; for use in a `with` statement."""
    return BlockedSignals() if hasattr(signal, "sigtimedwait") else Signals()


class Signals:
    """Handlers that forward signals, where signals cannot be waited for (macOS, Windows).

    SIGINT is assumed to come from the keyboard, which sends it to the script as well.
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
        for name in _FORWARDED:
            number = getattr(signal, name, None)
            if number is not None and name != "SIGTSTP":
                handler: Any = signal.SIG_IGN if name == "SIGINT" else self._forward
                self._handlers[number] = signal.signal(number, handler)
        return self._child

    def _forward(self, number: int, _: Any) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def wait(self, seconds: float) -> Any:
        """Wait until the script ends, but not longer than `seconds`. Returns None: the handlers
        forward the signals."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

    def stop(self) -> None:
        """Stop this process as Ctrl-Z does, until it is continued."""


class BlockedSignals(Signals):
    """Signals that are blocked and then received one by one, with their origin (Linux, BSD)."""

    def __init__(self) -> None:
        super().__init__()
        names = (*_FORWARDED, "SIGCHLD", "SIGWINCH")
        self._blocked = {getattr(signal, name) for name in names}
        self._original_mask: Iterable[int] = ()

    def __enter__(self) -> "BlockedSignals":
        self._original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        return self

    def __exit__(self, *_: object) -> None:
        while signal.sigtimedwait(self._blocked, 0):
            pass  # the script has ended, so that nobody is left to receive them
        signal.pthread_sigmask(signal.SIG_SETMASK, self._original_mask)

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start the script with the original signal mask. It dies when this process dies."""
        prctl, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

        def prepare() -> None:
            if prctl is not None:  # a kill -9 of the supervisor is meant for the script
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:  # the supervisor died before prctl was called
                    os.kill(os.getpid(), signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._original_mask)

        return subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=prepare)

    def wait(self, seconds: float) -> Any:
        """The next signal; None if the time is over or if the script may have ended."""
        info = signal.sigtimedwait(self._blocked, seconds)
        return None if info is None or info.si_signo == signal.SIGCHLD else info

    def stop(self) -> None:
        """Stop this process as Ctrl-Z does, until it is continued."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


def die_by(number: int) -> None:
    """Die by a signal, so that the parent process sees by what the script was killed."""
    import resource  # Windows has neither this module nor death by a signal

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left its own core dump
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
