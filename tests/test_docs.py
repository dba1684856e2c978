"""The docs as text: lines that fit, tables that can be read, links and files that are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USER_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "research").rglob("*.md")),
    ROOT / "CHANGELOG.md",
]
LONGEST_LINE = 100
MOST_WORDS = 25  # of a table's cell

FOLDERS = ("benchmarks", "docs", "examples", "mechanic", "research", "tests")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*|test_\w+\.py)`")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are not in a block of code."""
    fenced = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    heads = (line.lstrip("#").strip().lower() for _, line in lines(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", USER_PAGES, ids=named)
def test_lines_fit(page: Path) -> None:
    long = [n for n, line in lines(page) if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert not long


@pytest.mark.parametrize("page", USER_PAGES, ids=named)
def test_the_cells_of_tables_are_short(page: Path) -> None:
    for number, line in lines(page):
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                assert len(cell.split()) <= MOST_WORDS, f"{named(page)}:{number}: {cell.strip()}"


@pytest.mark.parametrize("page", [*USER_PAGES, *OTHER_PAGES], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for number, line in lines(page):
        for target in LINK.findall(line):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{named(page)}:{number}: {target}"
            if anchor:
                assert anchor in anchors(found), f"{named(page)}:{number}: {target}"


@pytest.mark.parametrize("page", USER_PAGES, ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    for number, line in lines(page):
        for name in NAMED.findall(line):
            there = (ROOT / "tests").rglob(name) if name.startswith("test_") else ROOT.glob(name)
            assert any(there), f"{named(page)}:{number}: {name}"


def test_the_size_of_the_message_is_said_as_it_is() -> None:
    from mechanic.torch.measure import Parts

    count = len(Parts._fields)
    page = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    assert f"one all-reduce of {count} float64 numbers, {8 * count} bytes" in page
    assert f"one message of {8 * count} bytes" in (ROOT / "README.md").read_text("utf-8")
