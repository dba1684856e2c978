"""The status line: the last row of the terminal, kept out of what scrolls."""

import os

_SAVE, _RESTORE = "\0337", "\0338"  # DECSC, DECRC: the cursor and its attributes
_SMALLEST = 4  # rows; below, every row is the script's


class Screen:
    """The last row of a terminal.

    The rows above it are made the scroll region (DECSTBM), as apt does: the script and its progress
    bars write there, whatever they do with newlines and carriage returns. Every change is one
    write, so that it cannot be torn apart by the script's own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rows = self._columns = 0

    @staticmethod
    def is_usable(descriptor: int) -> bool:
        """Whether there is a terminal that understands."""
        knows = hasattr(os, "tcgetpgrp") and os.environ.get("TERM", "dumb") not in ("", "dumb")
        return knows and os.isatty(descriptor)

    def show(self, text: str) -> None:
        """Write the line, if the terminal is ours to write to."""
        if os.tcgetpgrp(self._descriptor) != os.getpgrp():
            return
        if not self._rows and not self._open():
            return
        line = text[: self._columns - 1]
        self._write(f"{_SAVE}\033[{self._rows};1H\033[0;7m{line}\033[0m\033[K{_RESTORE}")

    def resize(self) -> None:
        """The terminal has another size: make the region anew."""
        if self._rows:
            self._open()

    def close(self) -> None:
        """Give the last row back."""
        if self._rows:
            self._write(f"{_SAVE}\033[r\033[{self._rows};1H\033[K{_RESTORE}")
            self._rows = 0

    def _open(self) -> bool:
        size = os.get_terminal_size(self._descriptor)
        if size.lines < _SMALLEST:
            self.close()
            return False
        self._columns, self._rows = size
        # One row down and up again (IND, CUU) keeps the column, and brings a cursor that stands
        # in the last row out of it. DECSTBM sends the cursor home, hence the saving.
        self._write(f"\033[r\033D{_SAVE}\033[1;{self._rows - 1}r{_RESTORE}\033[1A")
        return True

    def _write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())
