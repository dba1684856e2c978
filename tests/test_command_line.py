"""Whatever is typed after `mechanic`: it is understood, or one line says what is wrong."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mechanic import cli
from mechanic.bench import run
from mechanic.run import plot, supervise
from mechanic.run.request import RunRequest

RUN = (
    *("--only", "--skip", "--dry-run", "--freeze-after", "--log", "--plot", "--quiet", "--nproc"),
    *("--preset", "--s-init", "--s-decay", "--betas", "--max-scale", "--no-skip-nonfinite", "-m"),
    "--scope",
)
BENCH = (
    *("convex", "vision", "all", "--tasks", "--methods", "--seeds", "--budget", "--typed"),
    *("--data", "--device", "--storage", "--jobs", "--retry-failed", "--corpus", "--list"),
)
PLOT, REPORT = ("-o", "--output"), ("--storage", "--output", "--title")

# What one can type: no NUL, which no system passes on, and no half of a surrogate pair. Other
# control characters have a test of their own.
texts = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)
numbers = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["0", "-1", "1", "nan", "inf", "1e999", "0x10", "1_0", "٣", "", "0.9,0.99", ","]
    ),
)
names = st.sampled_from(
    [
        *(
            "train.py",
            "missing.py",
            ".",
            "folder",
            "log",
            "log.png",
            "a.svg",
            "no/a.png",
            "-",
            "--",
        ),
        *("-h", "default", "paper", "relative", "AdamW", "sqlite:///x.db", "x.db", "a.txt", "os"),
        *("sqlite://", "http://[", "://", "x" * 100, "~", "é.png", "/", "/dev/null", ".."),
    ]
)


def arguments(*options: str) -> st.SearchStrategy[list[str]]:
    values = st.one_of(texts, numbers, names)
    given = st.sampled_from(options)
    word = st.one_of(given, values, st.tuples(given, values).map("=".join))
    pair = st.tuples(given, values).map(list)
    parts = st.lists(st.one_of(word.map(lambda one: [one]), pair), max_size=6)
    return parts.map(lambda found: [word for part in found for word in part])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("typed")
    (made / "train.py").write_text("raise SystemExit('this must not run')", encoding="utf-8")
    (made / "folder").mkdir()
    (made / "log").mkdir()
    row = '{"step": 1, "optimizer": "AdamW", "scale": 1.0, "effective_lr": [1.0]}\n'
    (made / "log" / "history.jsonl").write_text(row, encoding="utf-8")
    (made / "x.db").write_bytes(b"no database")
    (made / "a.txt").write_text("text", encoding="utf-8")
    return made


@pytest.fixture(scope="module", autouse=True)
def no_work() -> Any:
    """Nothing is started and nothing is drawn; a request has been checked then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise, "main", _accept)
        patch.setattr(plot, "draw", lambda curves, path: None)
        patch.setattr(run, "main", lambda request: 0)
        yield


accepted: list[RunRequest] = []


def _accept(request: RunRequest) -> int:
    assert request.target
    accepted.append(request)
    return 0


def typed(folder: Path, *words: str) -> tuple[int, str]:
    """The exit code and what was written to stderr. Any other exception is a traceback."""
    out, error, had = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code: Any = cli.main(list(words))
    except SystemExit as end:
        code = end.code
    finally:
        os.chdir(had)
    return code, error.getvalue()


def check(folder: Path, *words: str) -> int:
    code, error = typed(folder, *words)
    if code == 0:
        return 0
    assert code == 2, error
    assert error.startswith("mechanic"), error
    assert error.endswith("\n")
    assert len(error) > len("mechanic run: ") + 5
    assert error.count("\n") == 1, error
    return 2


by_day = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(words=arguments(*RUN))
@by_day
def test_run(folder: Path, words: list[str]) -> None:
    check(folder, "run", *words)
    check(folder, "run", *words, "train.py")


@given(words=arguments(*PLOT))
@by_day
def test_plot(folder: Path, words: list[str]) -> None:
    check(folder, "plot", *words)
    check(folder, "plot", "log", *words)


@given(words=arguments(*REPORT))
@by_day
def test_report(folder: Path, words: list[str]) -> None:
    check(folder, "report", *words)


@given(words=arguments("-h"))
@by_day
def test_doctor(folder: Path, words: list[str]) -> None:
    """1 is its word for a run that is not healthy."""
    for command in (["doctor", *words], ["doctor", "log", *words]):
        code, error = typed(folder, *command)
        assert code in (0, 1, 2), error
        assert (error.count("\n") == 1) == (code == 2), error


@given(words=arguments(*BENCH))
@by_day
def test_bench(folder: Path, words: list[str]) -> None:
    check(folder, "bench", *words)
    check(folder, "bench", "convex", *words)


@given(words=arguments("run", "plot", "report", "--version", "--help", *RUN))
@by_day
def test_anything_at_all(folder: Path, words: list[str]) -> None:
    if words[:1] != ["bench"]:
        check(folder, *words)


def test_what_is_right_is_accepted(folder: Path) -> None:
    accepted.clear()
    assert check(folder, "run", "train.py", "--epochs", "3") == 0
    words = ["--betas", "0.9,0.99", "--max-scale=2", "--freeze-after", "7", "--only", "A,B"]
    assert check(folder, "run", *words, "train.py", "-h") == 0
    assert check(folder, "plot", "log", "-o", "new.png") == 0
    first, second = accepted
    assert first.target == ["train.py", "--epochs", "3"]
    assert second.tuner == {"betas": [0.9, 0.99], "max_scale": 2.0}
    assert (second.only, second.freeze_after) == (("A", "B"), 7)


@pytest.mark.parametrize("command", ["run", "plot", "doctor"])
def test_a_name_with_a_line_break_is_told_in_one_line(folder: Path, command: str) -> None:
    check(folder, command, "two\nlines")


def test_a_name_that_is_too_long_is_told(folder: Path) -> None:
    check(folder, "plot", "x" * 300)
