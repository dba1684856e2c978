"""The status line: the last row of the terminal, which does not scroll."""

import os
from collections.abc import Sequence

_SAVE, _RESTORE = "\0337", "\0338"  # DECSC, DECRC: the cursor and its attributes
_SMALLEST = 4  # rows; in a smaller terminal there is no status line


class Screen:
    """The last row of a terminal.

    The rows above it become the scroll region (DECSTBM), as in apt. The script and its progress
    bars write there, whatever newlines and carriage returns they use. Every change is a single
    write, so that no output of the script can come between its parts.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rows = self._columns = 0

    @staticmethod
    def is_usable(descriptor: int) -> bool:
        """Whether the descriptor is a terminal that understands these control sequences."""
        if not hasattr(os, "tcgetpgrp") or os.environ.get("TERM", "") in ("", "dumb"):
            return False
        return os.isatty(descriptor)

    def show(self, lines: Sequence[str]) -> None:
        """Write the first line that fits, or as much of the last one, unless this process is in the
        background."""
        if os.tcgetpgrp(self._descriptor) != os.getpgrp():
            return
        if not self._rows and not self._open():
            return
        fits = (line for line in lines if len(line) < self._columns)
        line = next(fits, lines[-1][: self._columns - 1])
        self._write(f"{_SAVE}\033[{self._rows};1H\033[0;7m{line}\033[0m\033[K{_RESTORE}")

    def resize(self) -> None:
        """The size of the terminal has changed: set the scroll region again."""
        if self._rows:
            self._open()

    def close(self) -> None:
        """Give the last row back to the script."""
        if self._rows:
            self._write(f"{_SAVE}\033[r\033[{self._rows};1H\033[K{_RESTORE}")
            self._rows = 0

    def _open(self) -> bool:
        size = os.get_terminal_size(self._descriptor)
        if size.lines < _SMALLEST:
            self.close()
            return False
        self._columns, self._rows = size
        # One row down and up again (IND, CUU) moves a cursor out of the last row and keeps its
        # column. DECSTBM moves the cursor to the top, so each time its position is saved before.
        free = f"{_SAVE}\033[r{_RESTORE}"
        self._write(f"{free}\033D{_SAVE}\033[1;{self._rows - 1}r{_RESTORE}\033[1A")
        return True

    def _write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())
