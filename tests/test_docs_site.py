"""The site: it builds without a warning, its links lead somewhere, it asks for no network, and
nothing on it is cut off."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
import yaml

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


class Page(HTMLParser):
    """The names of a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {given.get("id") or "", given.get("name") or ""}
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag == "link":
            self.loads.append(given.get("href") or "")
        self.loads.append(given.get("src") or "")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.nightly
def test_no_link_is_dead(pages: dict[Path, Page]) -> None:
    assert len(pages) > 20
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            file, _, name = unquote(link).partition("#")
            if "://" in file or file.startswith(("mailto:", "data:")):
                continue
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.name}: {link}"
            if name and target in pages:
                assert name in pages[target].names, f"{path.name}: {link}"


@pytest.mark.nightly
def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [load for load in page.loads if "://" in load or load.startswith("//")], path


def test_every_page_of_the_docs_can_be_found() -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]
    named = set(leaves(nav))
    assert named >= {path.name for path in (ROOT / "docs").glob("*.md")}
    assert named >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def leaves(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        parts = nav.values() if isinstance(nav, dict) else nav
        for part in parts:  # type: ignore[attr-defined]
            yield from leaves(part)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.mark.nightly
def test_search_works_from_the_disk_without_a_network(site: Path, browser: "Browser") -> None:
    page = browser.new_context(offline=True).new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: r.url.startswith("file:") or wrong.append(r.url))
    page.goto((site / "index.html").as_uri())
    field = page.locator("input.md-search__input")
    field.click()
    field.press_sequentially("accumulation", delay=20)
    page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
    assert "matching document" in page.locator(".md-search-result__meta").inner_text()
    assert wrong == []


WIDER_THAN_ITS_PLACE = """all => all.filter(one => one.scrollWidth > one.clientWidth)
    .map(one => one.innerText.slice(0, 200))"""


@pytest.mark.nightly
def test_nothing_is_cut_off(site: Path, pages: dict[Path, Page], browser: "Browser") -> None:
    """Code and tables fit on a laptop. On a phone they may be moved sideways, and no page is."""
    laptop = browser.new_page(viewport={"width": 1280, "height": 800})
    phone = browser.new_page(viewport={"width": 390, "height": 800})
    for path in pages:
        laptop.goto(path.as_uri())
        is_written_by_hand = path.parent == site.resolve()  # not a report of many methods
        for kind in ("pre code", *[".md-typeset__scrollwrap"] * is_written_by_hand):
            found = laptop.locator(kind).evaluate_all(WIDER_THAN_ITS_PLACE)
            assert found == [], f"{path.name}: {found}"
        phone.goto(path.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") == 390, path.name
