"""Run the test suites of others with every optimizer mechanized, and say what fails and why.

    python benchmarks/foreign_suites.py FOLDER --output FILE.md
    python benchmarks/foreign_suites.py FOLDER --suites test_optim GradScaler --ways class

FOLDER holds the sources that the tests come with, as their own repositories lay them out:

    pytorch/test/                 of the tag of the torch that is installed
    pytorch_optimizer/tests/      its sdist has them
    accelerate/tests/             its sdist has them
    lightning/tests/              of the tag of the lightning that is installed

A suite that is not there is looked for beside the installed package, where a checkout has it. The
tests need `expecttest` and `parameterized`, which may lie in FOLDER/extra (`pip install --target`).

Each suite runs twice: with each class of optimizers replaced by `mechanize(class)` before a test
sees it, and with each optimizer mechanized as soon as its constructor returns, as `mechanic run`
does it. What fails is run as it is: what fails then, too, does not count. A failure is put down to
the first cause of `foreign_causes.py` that fits its test and its message.
"""

import argparse
import collections
import datetime
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from foreign_causes import CAUSES

HERE = Path(__file__).parent
WAYS = ("class", "instance")
NAMED = 60  # so many tests of one cause are named
PACKAGES = "MECHANIC_FOREIGN_PACKAGES"
NOTES = "MECHANIC_FOREIGN_NOTES"


class Suite(NamedTuple):
    """Where the tests of a suite are, and which of them are run."""

    package: str
    """The package that is tested, as pip and as an import name it"""
    folder: str
    """In FOLDER, where pytest is started"""
    files: tuple[str, ...]
    select: str = ""
    """pytest's -k"""
    arguments: tuple[str, ...] = ()


SUITES = {
    "test_optim": Suite("torch", "pytorch/test", ("test_optim.py",)),
    "GradScaler": Suite(
        *("torch", "pytorch/test", ("test_torch.py",)),
        select="gradscaler or grad_scal or params_invalidated_with_grads",
    ),
    "DTensor": Suite("torch", "pytorch/test", ("distributed/tensor/test_optimizers.py",)),
    "pytorch_optimizer": Suite(
        *("pytorch_optimizer", "pytorch_optimizer", ("tests",)), arguments=("-o", "addopts=")
    ),
    "accelerate": Suite(
        "accelerate",
        "accelerate",
        ("tests/test_state_checkpointing.py", "tests/test_optimizer.py", "tests/test_scheduler.py"),
    ),
    "lightning": Suite(
        "lightning",
        "lightning/tests",
        (
            "tests_pytorch/core/test_lightning_optimizer.py",
            "tests_pytorch/trainer/optimization/test_optimizers.py",
            "tests_pytorch/trainer/optimization/test_manual_optimization.py",
            "tests_pytorch/loops/optimization/test_automatic_loop.py",
        ),
    ),
}


class Outcome(NamedTuple):
    """What pytest said of one test."""

    status: str
    """passed, failed or skipped"""
    message: str = ""


Outcomes = dict[str, Outcome]


class Run(NamedTuple):
    """One suite, run one way."""

    outcomes: Outcomes
    mechanized: int
    """How many optimizers were mechanized in pytest's own process"""
    refused: dict[str, int]
    """Why optimizers stayed plain, and how many did"""
    seconds: float
    is_whole: bool = True
    """Whether it has ended by itself"""


# What runs inside of the tests' processes.


def install() -> None:
    """Have every optimizer that this process makes mechanized, as its environment asks."""
    packages = os.environ[PACKAGES].split()
    for package in packages:
        importlib.import_module(package)
    for name, module in list(sys.modules.items()):
        if name.startswith(tuple(packages)):
            _mechanize_classes(module)


def _mechanize_classes(module: Any) -> None:
    """Replace the classes of optimizers that a module names, in its dicts and lists as well. Those
    of torch stay where they are defined, for pickle looks there."""
    for name, value in list(vars(module).items()):
        is_home = module.__name__.startswith("torch.") and module.__name__ == getattr(
            value, "__module__", ""
        )
        if _is_base(value) and not is_home:
            setattr(module, name, _mechanized(value))
        elif isinstance(value, dict) and any(map(_is_base, value.values())):
            value.update({k: _mechanized(v) for k, v in value.items() if _is_base(v)})
        elif isinstance(value, list) and any(map(_is_base, value)):
            value[:] = [_mechanized(v) if _is_base(v) else v for v in value]


def _mechanized(cls: Any) -> Any:
    from mechanic.torch import mechanize

    return mechanize(cls)


def _is_base(value: Any) -> bool:
    """Whether a value is a class of optimizers that is made to be used, and wraps no other one."""
    from torch.optim import Optimizer

    from mechanic.torch.attach import MechanizedType

    if not isinstance(value, type) or not issubclass(value, Optimizer) or value is Optimizer:
        return False
    if isinstance(value, MechanizedType) or inspect.isabstract(value):
        return False
    first = next(iter(inspect.signature(value).parameters), "")
    return "optimizer" not in first and not value.__name__.startswith("Base")


def pytest_configure() -> None:
    """Count the optimizers that are mechanized and those that are refused."""
    if NOTES not in os.environ:
        return
    importlib.import_module("torch.optim")  # before `adopt`, which waits for it
    from mechanic.run.adopt import OptimizerRegistry
    from mechanic.torch import attach

    attach_one, tune = attach._attach, OptimizerRegistry._tune

    def counting(*args: Any, **kwargs: Any) -> None:
        attach_one(*args, **kwargs)
        _note("mechanized")

    def telling(registry: Any, optimizer: Any) -> tuple[str, str]:
        status, reason = tune(registry, optimizer)
        if status == "refused":
            _note("refused", f"{type(optimizer).__name__}: {reason}")
        return status, reason

    attach._attach = counting
    OptimizerRegistry._tune = telling  # type: ignore[method-assign]


def pytest_runtest_logreport(report: Any) -> None:
    """Note what has become of a test."""
    if NOTES in os.environ and (report.when == "call" or report.outcome != "passed"):
        _note("test", report.nodeid, report.outcome, report.longreprtext)


def _note(*what: str) -> None:
    with open(os.environ[NOTES], "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


# What starts them.


def environment(way: str, suite: Suite, extra: Path, site: Path) -> dict[str, str]:
    """The environment in which optimizers are mechanized one way, in child processes as well."""
    from mechanic.run.settings import VARIABLE, RunSettings

    path = [str(HERE), str(extra.resolve())]
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if way == "class":
        (site / "sitecustomize.py").write_text("import foreign_suites\nforeign_suites.install()\n")
        path.insert(0, str(site))
        own[PACKAGES] = " ".join({"torch.optim": 0, _importable(suite): 0})
    elif way == "instance":
        path.insert(0, str(HERE.parent / "mechanic" / "run" / "inject"))
        own[VARIABLE] = RunSettings().to_environment()
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(path)}


def _importable(suite: Suite) -> str:
    return suite.package if suite.package == "pytorch_optimizer" else "torch.optim"


def run(suite: Suite, way: str, folder: Path, limit: float, tests: Iterable[str] = ()) -> Run:
    """Run a suite one way, or some tests of it. What is not done in time is not in the result."""
    root = find(suite, folder)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        notes, chosen = scratch / "notes.jsonl", scratch / "tests.txt"
        notes.touch()
        chosen.write_text("\n".join(tests or suite.files), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", f"@{chosen}", "-q", "--tb=short"]
        command += ["-p", "foreign_suites", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [
            f"--rootdir={root.resolve()}",
            f"--basetemp={scratch / 'temporary'}",
            *suite.arguments,
        ]
        command += ["-k", suite.select] if suite.select and not tests else []
        own = environment(way, suite, folder / "extra", scratch) | {NOTES: str(notes)}
        began = time.monotonic()
        said, code = _output(command, root, own, limit)
        found = read(notes, time.monotonic() - began, is_whole=code in (0, 1))
    if not found.outcomes:
        raise SystemExit(f"{' '.join(command)} has run no test:\n{said[-3000:]}")
    return found


def _output(command: list[str], root: Path, own: dict[str, str], limit: float) -> tuple[str, int]:
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=root, env=own, **quiet) as process:
        try:
            return process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0], process.returncode


def read(notes: Path, seconds: float, *, is_whole: bool) -> Run:
    """What the tests' process has noted."""
    found: Outcomes = {}
    mechanized, refused = 0, collections.Counter[str]()
    for line in notes.read_text(encoding="utf-8").splitlines():
        kind, *what = json.loads(line)
        if kind == "mechanized":
            mechanized += 1
        elif kind == "refused":
            refused[what[0]] += 1
        elif found.get(what[0], Outcome("passed")).status == "passed":
            found[what[0]] = Outcome(*what[1:])
    return Run(found, mechanized, dict(refused), seconds, is_whole)


def load(file: Path | None, suite: str, way: str) -> Run | None:
    """A run that was made before, from a file of them."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    if f"{suite}/{way}" not in kept:
        return None
    found, *rest = kept[f"{suite}/{way}"]
    return Run({test: Outcome(*outcome) for test, outcome in found.items()}, *rest)


def keep(file: Path | None, suite: str, way: str, found: Run) -> None:
    """Add a run to a file of them."""
    if file is not None:
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(kept | {f"{suite}/{way}": found}), encoding="utf-8")


def cause_of(suite: str, test: str, message: str) -> str:
    """Why a test fails when its optimizers are mechanized, or an empty string."""
    fits = (c for c in CAUSES if c.suite in ("", suite) and re.search(c.test, test))
    return next((c.reason for c in fits if re.search(c.message, message, re.DOTALL)), "")


def find(suite: Suite, folder: Path) -> Path:
    """Where a suite's files are: in the folder, or in the checkout that a package comes from."""
    spec = importlib.util.find_spec(suite.package)
    origin = Path(spec.origin) if spec is not None and spec.origin else folder
    tail = Path(*Path(suite.folder).parts[1:])
    roots = [folder / suite.folder, *(parent / tail for parent in origin.parents[1:4])]
    for root in roots:
        if (root / suite.files[0]).exists():
            return root
    raise SystemExit(
        f"the tests of {suite.package} are neither in {roots[0]} nor beside the installed package: "
        f"put {suite.files[0]} there, or leave the suite out with --suites"
    )


def failures(found: Run) -> list[str]:
    """The tests that fail."""
    return [test for test, outcome in found.outcomes.items() if outcome.status == "failed"]


def describe(name: str, runs: dict[str, Run], plain: Outcomes) -> tuple[list[str], list[str]]:
    """The rows of the table, and the paragraphs about what fails."""
    rows, causes = [], []
    for way, found in runs.items():
        unsound = {test for test, outcome in plain.items() if outcome.status != "passed"}
        failed = [test for test in failures(found) if test not in unsound]
        passed = sum(outcome.status == "passed" for outcome in found.outcomes.values())
        rows.append(
            f"| {name} | {way} | {passed} of {passed + len(failed)}"
            f"{'' if found.is_whole else ', cut short'} | {found.mechanized:,} "
            f"| {sum(found.refused.values())} | {found.seconds:.0f} s |"
        )
        causes += _by_cause(name, way, {test: found.outcomes[test] for test in failed})
        causes += [f"- {way}: left plain {n} times: {why}" for why, n in found.refused.items()]
    return rows, causes


def _by_cause(suite: str, way: str, failed: Outcomes) -> list[str]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test, outcome in sorted(failed.items()):
        groups[cause_of(suite, test, outcome.message) or "**not explained**"].append(test)
    lines = []
    for reason, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {way}, {len(tests)}: {reason}")
        lines += [f"  - `{test.split('::', 1)[-1]}`" for test in tests[:NAMED]]
        if len(tests) > NAMED:
            lines.append(f"  - and {len(tests) - NAMED} more")
    return lines


def head(asked: argparse.Namespace) -> list[str]:
    """What was run, where and when."""
    packages = ("torch", "pytorch_optimizer", "accelerate", "lightning", "pytest")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return [
        "# The suites of others, with every optimizer mechanized",
        "",
        f"- command: `python benchmarks/foreign_suites.py FOLDER`, {', '.join(asked.suites)}",
        f"- hardware: {platform.machine()}, a CPU, 1 thread; Python {platform.python_version()}",
        f"- versions: {versions}",
        f"- tests: {asked.sources}",
        f"- date: {datetime.date.today()}",
        "",
        "Tests that fail or are skipped without Mechanic are not counted. A run that is cut short "
        "took longer than it was given; what it had not come to is not counted either.",
        "",
        "| suite | mechanized by | passed | optimizers mechanized | left plain | time |",
        "|---|---|---:|---:|---:|---:|",
    ]


def _run_once(asked: argparse.Namespace, name: str, way: str) -> Run:
    found = load(asked.kept, name, way) or run(SUITES[name], way, asked.folder, asked.limit)
    keep(asked.kept, name, way, found)
    return found


def _run_plain(asked: argparse.Namespace, name: str, tests: Iterable[str]) -> Outcomes:
    """What becomes of some tests without Mechanic."""
    kept = load(asked.kept, name, "plain") or Run({}, 0, {}, 0.0)
    missing = [test for test in tests if test not in kept.outcomes]
    if missing:
        found = run(SUITES[name], "plain", asked.folder, asked.limit, missing)
        kept = kept._replace(outcomes={**kept.outcomes, **found.outcomes})
        keep(asked.kept, name, "plain", kept)
    return kept.outcomes


def main() -> None:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds the sources of the suites")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--sources", default="not said", help="where the tests are from, in words")
    parser.add_argument("--output", type=Path, help="write the page there, too")
    parser.add_argument("--kept", type=Path, help="a JSON file of runs, which are not made again")
    asked = parser.parse_args()
    table, pages = [], []
    for name in asked.suites:
        runs = {way: _run_once(asked, name, way) for way in asked.ways}
        doubtful = sorted({test for found in runs.values() for test in failures(found)})
        rows, causes = describe(name, runs, _run_plain(asked, name, doubtful))
        table += rows
        pages += ["", f"## {name}", "", *(causes or ["Nothing fails."])]
        print("\n".join([*rows, *causes]), flush=True)
    text = "\n".join([*head(asked), *table, *pages]) + "\n"
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
