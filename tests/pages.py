"""The blocks of code of a page, and how they are run as they are printed."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RANKS = Path(__file__).with_name("ranks")
NUMBER = re.compile(r"((?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
FACTOR = 3


class Block(NamedTuple):
    language: str
    title: str  # the name of the file that a reader would save it as, or ""
    code: str
    printed: str | None  # what the block of text right after it says that it prints


def blocks(text: str) -> list[Block]:
    found = list(BLOCK.finditer(text))
    made = []
    for here, after in zip(found, [*found[1:], None], strict=False):
        language, title, code = here.groups()
        follows = (
            after is not None
            and after[1] == "text"
            and not text[here.end() : after.start()].strip()
        )
        made.append(Block(language, title or "", code, after[3] if after and follows else None))
    return [block for block in made if block.language != "text"]


def texts(text: str) -> list[str]:
    """What the blocks of text say, those right after a block of code and the others."""
    return [found[3] for found in BLOCK.finditer(text) if found[1] == "text"]


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def sections(name: str) -> dict[str, str]:
    """The text below each heading of the second level; what comes before the first is ""."""
    parts = re.split(r"^## (.+)$", page(name), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block with what the blocks before it have defined, and compare what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.code, block.title or "<page>", "exec"), names)
    compare(block, out.getvalue())


def run_shell(block: Block, folder: Path) -> None:
    """Run a block in a shell that finds this Python and its commands first."""
    command = ["bash", "-euc", block.code]
    run = subprocess.run(command, cwd=folder, env=shell(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    compare(block, run.stdout + run.stderr)


def shell() -> dict[str, str]:
    """The environment of a reader's shell, where nothing turns the compiled step off."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "MECHANIC_NATIVE"}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS)}


def compare(block: Block, printed: str) -> None:
    if block.printed is not None:
        assert is_like(block.printed, printed), (
            f"the page says\n{block.printed}\nand it printed\n{printed}"
        )


def is_like(said: str, printed: str) -> bool:
    """Whether a text is what a page says: word for word, with numbers of the same size, since
    another machine rounds otherwise, and with anything in the place of three dots."""
    parts = NUMBER.split(" ".join(said.split()))
    words = [re.escape(part).replace(re.escape("..."), ".*") for part in parts[::2]]
    found = re.fullmatch(f"({NUMBER.pattern[1:-1]})".join(words), " ".join(printed.split()))
    if found is None:
        return False
    pairs = [(float(a), float(b)) for a, b in zip(parts[1::2], found.groups(), strict=True)]
    return all(a == b or (a * b > 0 and 1 / FACTOR <= a / b <= FACTOR) for a, b in pairs)
