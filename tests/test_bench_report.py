"""The report: its files, its words, and the page in a real browser."""

import csv
import html
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import ENVIRONMENT, NASTY, everything, run, scaling, suite
from playwright.sync_api import Browser, Page, sync_playwright

from mechanic.bench.record import Run
from mechanic.bench.report import words, write_report
from mechanic.bench.report.look import choose_looks, percent, shade
from mechanic.bench.report.markup import join, tag
from mechanic.bench.report.panels import loss_panel, overall_panel, row_panels, sweep_panel
from mechanic.bench.report.plotly import figure_json
from mechanic.bench.report.text import markdown, runs_csv
from mechanic.bench.score import Comparison, ScoredMethod, compare

RUNS = everything()
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "new"
    written = write_report(RUNS, folder, title=f"Bench {NASTY[1]}")
    assert sorted(written) == sorted(path for path in folder.rglob("*") if path.is_file())
    return folder


def looks_of(comparison: Comparison) -> Any:
    return choose_looks(comparison.methods, [comparison.default])


def test_no_runs_are_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mechanic bench convex"):
        write_report([], tmp_path)


def test_the_script_of_the_committed_runs_says_what_it_needs() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "report.py"
    hiding = (
        "import runpy, sys\n"
        "sys.modules['matplotlib'] = None\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hiding], capture_output=True, text=True)
    assert done.returncode == 1
    fix = 'pip install ".[torch,bench]" in a clone of Mechanic'
    assert done.stderr == f"benchmarks/report.py needs matplotlib: {fix}\n"


def test_every_row_has_its_figure(folder: Path) -> None:
    comparisons = compare(RUNS)
    wide = len(comparisons) + 1  # an overall chart each, and the learned rates of `scaling`
    figures = list((folder / "figures").glob("*.png"))
    assert len(figures) == wide + sum(len(c.rows) for c in comparisons)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)


def test_names_that_become_one_file_name_are_kept_apart(tmp_path: Path) -> None:
    tasks = ("../a/b", "..-a:b", ".." + "/" * 3 + "a?b")
    runs = [one for task in tasks for one in suite("s", (task,), bases=("sgd",), seeds=1)]
    write_report(runs, tmp_path / "here")
    names = [path.name for path in (tmp_path / "here" / "figures").iterdir()]
    assert len(names) == len(tasks) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_runs_csv_has_every_run_and_field(folder: Path) -> None:
    with (folder / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(RUNS)
    for line, one in zip(lines, RUNS, strict=True):
        assert line["task"] == one.task
        assert line["reason"] == one.reason
        assert float(line["lr"]) == one.lr
        assert line["environment.torch"] == "2.13.0"
        if one.status == "done":
            assert float(line["metrics.train_loss"]) == one.metrics["train_loss"]


def test_runs_csv_quotes_what_it_must() -> None:
    text = runs_csv([run(None, reason='line one\nline "two", end')])
    (line,) = csv.DictReader(text.splitlines(keepends=True))
    assert line["reason"] == 'line one\nline "two", end'


def test_summary_csv_is_rows_by_methods(folder: Path) -> None:
    with (folder / "summary.csv").open(newline="") as file:
        lines = {
            (line["budget"], line["task"], line["base"]): line for line in csv.DictReader(file)
        }
    assert len(lines) == 9  # 6 convex, 2 nasty, 1 of budget full; scaling has no sweep
    assert lines["short", "a9a", "sgd"]["dog"] == "diverged 2/3"
    assert lines["short", "vehicle", "lion"]["dadaptation"] == "failed 3/3"
    assert -5 < float(lines["short", "a9a", "sgd"]["mechanic"]) < 10
    assert lines["short", "a9a", "sgd"][NASTY[0]] == ""


def test_markdown_escapes_and_links_figures_that_exist(folder: Path) -> None:
    text = (folder / "report.md").read_text("utf-8")
    assert not re.search(r"(?<!\\)<(script|img|/script)", text)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    for rule in (n for n, line in enumerate(tables) if line.startswith("| --- ")):
        assert columns[rule - 1] == columns[rule] == columns[rule + 1]
    links = re.findall(r"!\[.*?\]\((\S+)\)", text)
    assert links
    assert all((folder / link).is_file() for link in links)


def test_page_is_one_file_with_one_plotly(folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    assert page.count("plotly.js v") == 1
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", page)


def test_plots_carry_valid_json_that_no_name_can_leave() -> None:
    (comparison, _) = compare(RUNS)
    looks = looks_of(comparison)
    for row in comparison.rows:
        for panel in row_panels(row, looks):
            text = figure_json(panel)
            assert "<" not in text
            assert json.loads(text, parse_constant=pytest.fail)["data"]


def test_markup_escapes_all_that_is_not_markup() -> None:
    made = tag("td", NASTY[0], tag("b", "&"), None, title='"<', class_=None, data_x="1")
    assert made == (f'<td title="&quot;&lt;" data-x="1">{html.escape(NASTY[0])}<b>&amp;</b></td>')
    assert join("<", tag("i")) == "&lt;<i></i>"


def test_a_diverging_lr_does_not_squash_the_plot() -> None:
    losses = {0.001: 0.5, 0.01: 0.2, 0.1: 0.9, 1.0: 1e9}
    (comparison,) = compare([run(loss, lr=lr) for lr, loss in losses.items()])
    panel = sweep_panel(comparison.rows[0], looks_of(comparison))
    assert panel.y_range is not None
    assert panel.y_range[1] <= 1.0  # the loss at the start
    assert [mark.x for mark in panel.marks if mark.symbol == "triangle-up"] == [[0.1, 1.0]]


def test_a_method_in_trouble_has_no_line_across_the_sweep() -> None:
    (comparison, _) = compare(RUNS)
    row = next(row for row in comparison.rows if (row.task, row.base) == ("a9a", "sgd"))
    looks = looks_of(comparison)
    labels = {line.label for line in sweep_panel(row, looks).lines}
    assert "dog" not in labels
    assert {"best of sweep", "mechanic", "prodigy"} <= labels
    assert "dog" in {line.label for line in loss_panel(row, looks).lines}  # its course is shown


def test_rates_are_marked_on_their_own_base_only() -> None:
    (comparison, _) = compare(RUNS)
    row = next(row for row in comparison.rows if (row.task, row.base) == ("a9a", "sgd"))
    marks = [
        mark for mark in sweep_panel(row, looks_of(comparison)).marks if mark.symbol == "diamond"
    ]
    labels = {mark.label for mark in marks}
    assert {"mechanic", "dadaptation"} <= labels
    assert not {"prodigy", "dog"} & labels


def test_curves_of_lost_runs_do_not_break_the_plots() -> None:
    runs = [*suite("s", ("t",), bases=("sgd",))]
    nan = replace(runs[0].curve, loss=[math.nan] * 100, lr=[math.nan] * 100)
    runs = [replace(one, curve=nan) if one.method == "prodigy" else one for one in runs]
    (comparison,) = compare(runs)
    for panel in row_panels(comparison.rows[0], looks_of(comparison)):
        json.loads(figure_json(panel), parse_constant=pytest.fail)


def test_overall_chart_has_a_dot_a_row() -> None:
    (comparison, _) = compare(RUNS)
    panel = overall_panel(comparison, looks_of(comparison))
    ours = [mark for mark in panel.marks if mark.label == "mechanic" and mark.symbol != "line-ns"]
    assert sum(len(mark.x) for mark in ours) == len(comparison.scored)


def test_looks_are_distinct_and_stay_the_same() -> None:
    methods = [
        ScoredMethod("mechanic", "mechanic"),
        *(ScoredMethod(f"peer-{n}", "peer") for n in range(20)),
    ]
    looks = choose_looks(methods, [methods[0]])
    assert len(set(looks.values())) == len(looks)
    assert choose_looks(methods[:5], [methods[0]]).items() <= looks.items()


def test_warnings_name_what_a_reader_must_know() -> None:
    runs = [*suite("s", ("t",), bases=("sgd",))]
    assert words.warnings(compare(runs)[0]) == []
    other = ENVIRONMENT | {"torch": "2.12.0"}
    mixed = [replace(one, environment=other) if one.seed == 2 else one for one in runs]
    (warning,) = words.warnings(compare(mixed)[0])
    assert "torch 2.12.0 and 2.13.0" in warning
    later = [replace(one, environment=ENVIRONMENT | {"date": "2027-01-01"}) for one in runs[:5]]
    assert words.warnings(compare([*runs[5:], *later])[0]) == []  # a date is no environment
    (warning,) = words.warnings(
        compare([one for one in runs if one.lr < 2e-3 or one.kind != "sweep"])[0]
    )
    assert "edge of the grid" in warning
    unfinished = [one for one in runs if not (one.method == "prodigy" and one.seed == 2)]
    (warning,) = words.warnings(compare(unfinished)[0])
    assert warning.startswith("Unfinished")
    alone = words.warnings(compare([one for one in runs if one.seed == 0])[0])
    assert alone == [words.ONE_SEED]
    lost = [replace(one, status="failed") if one.kind == "sweep" else one for one in runs]
    (warning,) = words.warnings(compare(lost)[0])
    assert "t (sgd) is left out" in warning


@pytest.mark.parametrize(
    "runs",
    [
        [run()],
        [run(None)],
        [run(None, method="dog", kind="peer", base="", status="failed")],
        [*scaling(2, 1)],
        [run(0.5, method="mechanic", kind="mechanic"), run(0.4, start_loss=math.nan)],
        [
            run(-3.0, start_loss=-1.0),
            run(-2.0, start_loss=-1.0, method="mechanic", kind="mechanic"),
        ],
        [run(0.0, start_loss=0.0), run(0.0, method="mechanic", kind="mechanic")],
    ],
)
def test_odd_runs_make_a_report_too(runs: list[Run], tmp_path: Path) -> None:
    assert len(write_report(runs, tmp_path)) >= 4


def test_lost_runs_are_counted_and_named(tmp_path: Path) -> None:
    sweep = [run(loss, lr=lr, seed=s) for lr, loss in ((0.1, 0.2), (1.0, 0.9)) for s in range(3)]
    names = {"method": "mechanic", "kind": "mechanic", "lr": 1.0}
    ours = [run(loss, seed=seed, **names) for seed, loss in enumerate((0.1, 0.1, 0.5))]
    peers = {"method": "dog", "kind": "peer", "base": "", "lr": 1.0}
    theirs = [run(loss, seed=seed, **peers) for seed, loss in enumerate((None, 5.0, 0.2))]
    write_report([*sweep, *ours, *theirs], tmp_path)
    text = (tmp_path / "report.md").read_text("utf-8").replace("\u00a0", " ")
    assert "| mechanic | suite: task (sgd) | 1 of 3 | seed 2 (excess +37.5 %) |" in text
    assert "| 2 of 3 | seed 0 (diverged), seed 1 (above the start) |" in text
    summary = re.findall(r"^\| (mechanic|dog|best of sweep) \|[^|]*\| (\d+ of \d+) \|", text, re.M)
    assert summary[:3] == [("mechanic", "1 of 3"), ("dog", "2 of 3"), ("best of sweep", "0 of 3")]
    assert ", 1 lost |" in text  # beside the mean excess of the row
    page = (tmp_path / "report.html").read_text("utf-8").replace("\u00a0", " ")
    row = "<td>suite: task (sgd)</td><td>1 of 3</td><td>seed 2 (excess +37.5 %)</td>"
    assert f"<tr><th>mechanic</th>{row}" in page
    assert '<td class="lost">1 of 3</td>' in page
    assert "1 of 3 runs lost" in page


def test_where_no_run_is_lost_the_report_says_so() -> None:
    text = markdown(compare([run(0.2), run(0.9, lr=1.0)]), "t", {})
    assert words.NO_LOST_RUNS in text


def test_typed_lrs_are_told_apart(tmp_path: Path) -> None:
    lrs = (1e-4, 1.0, 1e4)
    runs = [run(0.4, method="mechanic", kind="mechanic", lr=lr) for lr in lrs]
    text = markdown(compare([run(), run(0.6, lr=1.0), *runs]), "t", {})
    assert all(f"mechanic (lr {lr})" in text for lr in ("1e-4", "1", "1e4"))


def test_numbers_for_people() -> None:
    texts = [percent(value).replace("\u00a0", " ") for value in (0.0, -0.001, 0.31, -4.21, 57.4)]
    assert texts == ["0.00 %", "0.00 %", "+0.31 %", "−4.2 %", "+57 %"]
    assert shade(0) == "#ffffff"
    assert shade(100) == shade(1000)
    assert shade(-10) != shade(10)


# The page in a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    """The page, opened; at the end nothing must have gone wrong or out."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    address = (folder / "report.html").as_uri()
    page.goto(address)
    yield page
    page.wait_for_timeout(100)
    page.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [address]


def plots() -> int:
    """How many the page should have."""
    count = 0
    for comparison in compare(RUNS):
        looks = looks_of(comparison)
        count += sum(len(row_panels(row, looks)) for row in comparison.rows)
        count += bool(comparison.scored) + bool(comparison.unswept)
    return count


def wait_for_plots(page: Page, count: int) -> None:
    """The page forbids `eval`, by which Playwright would wait."""
    for _ in range(400):
        if page.evaluate(DRAWN) >= count:
            return
        page.wait_for_timeout(100)
    assert page.evaluate(DRAWN) == count


DRAWN = "document.querySelectorAll('.chart .subplot.xy').length"


@pytest.mark.nightly
def test_plots_are_drawn_as_they_come_into_view(page: Page) -> None:
    assert page.locator("figure > .chart").count() == plots()
    assert page.evaluate(DRAWN) < plots() / 3
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 800):
        page.evaluate(f"scrollTo({{top: {y}, behavior: 'instant'}})")
        page.wait_for_timeout(20)
    wait_for_plots(page, plots())
    lines = page.evaluate("document.querySelectorAll('.chart .scatterlayer .trace').length")
    assert lines > 10 * plots()


@pytest.mark.nightly
def test_names_are_shown_as_they_are_on_paper_too(page: Page) -> None:
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    wait_for_plots(page, plots())
    assert page.locator("h1").text_content() == f"Bench {NASTY[1]}"
    headings = page.locator("section.task h3").all_text_contents()
    assert {NASTY[0] + NASTY[1], NASTY[0] + NASTY[2]} <= set(headings)
    ticks = page.evaluate(
        "[...document.querySelectorAll('.chart .ytick text')].map(t => t.textContent)"
    )
    assert {NASTY[0], NASTY[3]} <= set(ticks)
    assert page.locator("img").count() == 0


@pytest.mark.nightly
def test_a_click_on_a_method_hides_it_everywhere(page: Page) -> None:
    def visible(task: str) -> set[bool]:
        page.evaluate(f"document.querySelector('{task}').scrollIntoView({{behavior: 'instant'}})")
        page.wait_for_timeout(800)
        find = "t => t.meta === 'mechanic'"
        charts = f"[...document.querySelectorAll('{task} ~ .row .chart[data-drawn]')]"
        return set(
            page.evaluate(f"{charts}.flatMap(p => p.data.filter({find}).map(t => t.visible))")
        )

    chip = page.locator(".legend button", has_text=re.compile("^mechanic$")).first
    assert visible("#task-0-2") == {True}
    chip.click()
    assert visible("#task-0-2") == {False}
    assert visible("#task-0-4") == {False}  # drawn after the click
    chip.click()
    assert visible("#task-0-2") == {True}  # out of view at the click


@pytest.mark.nightly
def test_the_page_fits_the_screen(page: Page) -> None:
    for width in (1400, 800, 390):
        check_fit(page, width)
    check_links(page)


def check_fit(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("nav details").evaluate("d => d.open") is (width == 1400)
    box = page.locator(".excess").first
    box.evaluate("e => e.scrollTo(300, 300)")
    corner = box.locator("thead th").first.evaluate(
        "e => [e.getBoundingClientRect(), e.closest('.excess').getBoundingClientRect()]"
        ".map(r => [Math.round(r.x), Math.round(r.y)])"
    )
    assert max(abs(a - b) for a, b in zip(*corner, strict=True)) <= 1  # head and column stay


def check_links(page: Page) -> None:
    dead = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter("
        "a => !document.getElementById(a.hash.slice(1))).length"
    )
    assert dead == 0
    assert page.locator("nav a").count() > 10
