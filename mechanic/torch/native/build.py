"""Compiling C at first use, and keeping what was compiled for later runs.

What is kept lies in a folder that belongs to the user alone, under a name that tells what it was
made from: the source, the compiler, its options and the processor. It is written to a file of its
own first and then renamed, so that several processes may do so at once.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

Flags = Sequence[str]

_COMPILERS = ("cc", "gcc", "clang")
_ALWAYS = ("-std=gnu11", "-fPIC", "-shared", "-pthread")
_PATIENCE = 120  # seconds


def find_compiler() -> list[str] | None:
    """The command of a C compiler: the one that `CC` names, or one that is found."""
    for command in (os.environ.get("CC", ""), *_COMPILERS):
        words = shlex.split(command)
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    return None


@functools.cache
def is_processor_known() -> bool:
    """Whether code for this very processor can be told from that for others, as it must where
    machines share what is kept."""
    return bool(_processor())


def load(source: str, flags: Sequence[Flags]) -> ctypes.CDLL:
    """Compile a library, or take the one that was kept. `flags` are tried one after the other.

    Raises:
        RuntimeError: if there is no compiler, or it fails.
        OSError: if the library cannot be written or loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    for own in flags[:-1]:
        try:
            return _load(source, compiler, own)
        except RuntimeError:  # it does not know these
            continue
    return _load(source, compiler, flags[-1])


def _load(source: str, compiler: list[str], flags: Flags) -> ctypes.CDLL:
    command = [*compiler, *_ALWAYS, *flags]
    folder = _cache_folder()
    if folder is not None:
        kept = folder / f"{_key(source, command)}.so"
        try:
            return _load_kept(kept, source, command)
        except OSError:  # the disk is full, or nothing there may be executed
            pass
    with tempfile.TemporaryDirectory(prefix="mechanic-") as own:
        library = Path(own, "library.so")
        _compile(source, command, library)
        return ctypes.CDLL(str(library))  # it stays in memory when its file is gone


def _load_kept(kept: Path, source: str, command: list[str]) -> ctypes.CDLL:
    if kept.exists():
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # it is damaged
            pass
    with tempfile.TemporaryDirectory(prefix="build-", dir=kept.parent) as own:
        library = Path(own, "library.so")
        _compile(source, command, library)
        os.replace(library, kept)
    return ctypes.CDLL(str(kept))


def _compile(source: str, command: list[str], library: Path) -> None:
    text = library.with_suffix(".c")
    text.write_text(source, "utf-8")
    done = subprocess.run(
        [*command, str(text), "-o", str(library), "-lm"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PATIENCE,
        start_new_session=True,  # Ctrl-C is for the program alone
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{command[0]} failed: {said[0] if said else done.returncode}")


def _key(source: str, command: list[str]) -> str:
    own = os.stat(os.path.realpath(command[0]))
    parts = source, *command, own.st_size, own.st_mtime_ns, platform.machine(), _processor()
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@functools.cache
def _processor() -> str:
    """What tells processors apart that run different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa", "cpu")
    told = {line for line in lines if line.split(":")[0].strip() in names}
    return "\n".join(sorted(told))


def _cache_folder() -> Path | None:
    """The folder in which libraries are kept, which no one else may write to; None if there is no
    such folder."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(root, "mechanic", "native")
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return folder if is_own and not found.st_mode & 0o022 else None
    except OSError:
        return None
