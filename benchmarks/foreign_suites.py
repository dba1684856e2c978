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
does it. What fails is run as it is: what does not pass then, too, does not count. A failure is put
down to the first cause of `foreign_causes.py` that fits its test and its message; and it is run
once more by class with each scale held at 1, where the optimizer is to do what it does without
Mechanic: what passes then fails for the size of the learned rate and for nothing else.
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
NAMED = 20  # so many tests of one cause are named
PACKAGES = "MECHANIC_FOREIGN_PACKAGES"
NOTES = "MECHANIC_FOREIGN_NOTES"
CHOSEN = "MECHANIC_FOREIGN_CHOSEN"
HELD = "MECHANIC_FOREIGN_HELD"


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
    seconds: float = 0.0


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
    if HELD in os.environ:
        _hold_scales()
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

    return mechanize(cls, s_init=1.0) if HELD in os.environ else mechanize(cls)


def _hold_scales() -> None:
    """Freeze each scale after its first step, which sets it to what it starts with."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from mechanic.torch import tuner
    from mechanic.torch.attach import MechanizedType

    def freeze(optimizer: Any, *_: Any) -> None:
        if isinstance(type(optimizer), MechanizedType):
            tuner(optimizer).freeze()

    register_optimizer_step_post_hook(freeze)


def _is_base(value: Any) -> bool:
    """Whether a value is a class of optimizers that is made to be used, and wraps no other one."""
    from torch.optim import Optimizer

    from mechanic.torch.attach import MechanizedType

    if not isinstance(value, type) or not issubclass(value, Optimizer) or value is Optimizer:
        return False
    if isinstance(value, MechanizedType) or inspect.isabstract(value):
        return False
    wraps = any("optimizer" in name for name in inspect.signature(value).parameters)
    return not wraps and not value.__name__.startswith("Base")


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


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out the tests that are not chosen. One that is chosen need not be there: some suites
    take other tests for other classes."""
    if CHOSEN in os.environ:
        chosen = set(Path(os.environ[CHOSEN]).read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_logreport(report: Any) -> None:
    """Note what has become of a test. Where there are workers, they tell the process that started
    them, and only that one notes it."""
    if NOTES not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        _note("test", report.nodeid, report.outcome, report.longreprtext, report.duration)


def _note(*what: str | float) -> None:
    """Append a line, as one write, for workers append to the same file."""
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


# What starts them.


def environment(way: str, suite: Suite, extra: Path, site: Path) -> dict[str, str]:
    """The environment in which optimizers are mechanized one way, in child processes as well."""
    from mechanic.run.settings import VARIABLE, RunSettings

    path = [str(HERE), str(extra.resolve())]
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= {HELD: "1"} if way == "held" else {}
    if way in ("class", "held"):
        (site / "sitecustomize.py").write_text("import foreign_suites\nforeign_suites.install()\n")
        path.insert(0, str(site))
        own[PACKAGES] = " ".join({"torch.optim": 0, _importable(suite): 0})
    elif way == "instance":
        path.insert(0, str(HERE.parent / "mechanic" / "run" / "inject"))
        own[VARIABLE] = RunSettings().to_environment()
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(path)}


def _importable(suite: Suite) -> str:
    return suite.package if suite.package == "pytorch_optimizer" else "torch.optim"


def run(suite: Suite, way: str, asked: argparse.Namespace, tests: Iterable[str] = ()) -> Run:
    """Run a suite one way, or some tests of it. What is not done in time is not in the result."""
    root = find(suite, asked.folder)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        notes, chosen = scratch / "notes.jsonl", scratch / "tests.txt"
        notes.touch()
        chosen.write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", *suite.files, "-q", "--tb=short"]
        command += ["-p", "foreign_suites", "-p", "no:cacheprovider"]
        command += ["-n", str(asked.workers)] if asked.workers > 1 else ["-p", "no:xdist"]
        command += [
            f"--rootdir={root.resolve()}",
            f"--basetemp={scratch / 'temporary'}",
            *suite.arguments,
        ]
        command += ["-k", suite.select] if suite.select else []
        own = environment(way, suite, asked.folder / "extra", scratch) | {NOTES: str(notes)}
        own |= {CHOSEN: str(chosen)} if tests else {}
        began = time.monotonic()
        said, code = _output(command, root, own, asked.limit)
        found = read(notes, time.monotonic() - began, is_whole=code in (0, 1))
    if not found.outcomes and not tests:
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


def passes(outcomes: Outcomes) -> set[str]:
    """The tests that pass."""
    return {test for test, outcome in outcomes.items() if outcome.status == "passed"}


def describe(
    name: str, runs: dict[str, Run], plain: Outcomes, held: Outcomes
) -> tuple[list[str], list[str]]:
    """The rows of the table, and the paragraphs about what fails."""
    rows, causes = [], []
    for way, found in runs.items():
        failed = [test for test in failures(found) if test in passes(plain)]
        passed = len(passes(found.outcomes))
        rows.append(
            f"| {name} | {way} | {passed:,} of {passed + len(failed):,}"
            f"{'' if found.is_whole else ', cut short'} | {found.mechanized:,} "
            f"| {sum(found.refused.values())} | {found.seconds:.0f} s |"
        )
        causes += _by_cause(name, way, {test: found.outcomes[test] for test in failed}, held)
        causes += [f"- {way}: left plain {n} times: {why}" for why, n in found.refused.items()]
    return rows, causes


def _by_cause(suite: str, way: str, failed: Outcomes, held: Outcomes) -> list[str]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test, outcome in sorted(failed.items()):
        groups[cause_of(suite, test, outcome.message) or "**not explained**"].append(test)
    lines = []
    for reason, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {way}, {len(tests):,}: {reason}{_control(held, tests)}")
        lines += [f"  - `{test.split('::', 1)[-1]}`" for test in tests[:NAMED]]
        if len(tests) > NAMED:
            lines.append(f"  - and {len(tests) - NAMED:,} more")
    return lines


def _control(held: Outcomes, tests: list[str]) -> str:
    """How many of some tests pass with the scale held at 1."""
    tried = {test: held[test] for test in tests if test in held}
    passed = len(passes(tried))
    return f" (with the scale held at 1, {passed:,} of {len(tried):,} pass)" if tried else ""


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


def _run_whole(asked: argparse.Namespace, name: str) -> dict[str, Run]:
    """A suite, run each way that is asked for, or that was kept."""
    runs = {}
    for way in asked.ways:
        found = load(asked.kept, name, way)
        if found is None and not asked.report:
            found = run(SUITES[name], way, asked)
            keep(asked.kept, name, way, found)
        if found is not None:
            runs[way] = found
    return runs


def _run_some(asked: argparse.Namespace, name: str, way: str, tests: Iterable[str]) -> Outcomes:
    """What becomes of some tests without Mechanic, or with every scale held at 1."""
    kept = load(asked.kept, name, way) or Run({}, 0, {}, 0.0)
    missing = [test for test in tests if test not in kept.outcomes]
    if missing and not asked.report:
        found = run(SUITES[name], way, asked, missing)
        kept = kept._replace(outcomes={**kept.outcomes, **found.outcomes})
        keep(asked.kept, name, way, kept)
    return kept.outcomes


def main() -> None:
    """Run what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds the sources of the suites")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--workers", type=int, default=1, help="processes that share a suite")
    parser.add_argument("--sources", default="not said", help="where the tests are from, in words")
    parser.add_argument("--output", type=Path, help="write the page there, too")
    parser.add_argument("--kept", type=Path, help="a JSON file of runs, which are not made again")
    parser.add_argument("--report", action="store_true", help="only write what --kept has")
    asked = parser.parse_args()
    table, pages = [], []
    for name in asked.suites:
        runs = _run_whole(asked, name)
        doubtful = sorted({test for found in runs.values() for test in failures(found)})
        plain = _run_some(asked, name, "plain", doubtful)
        held = _run_some(asked, name, "held", [test for test in doubtful if test in passes(plain)])
        rows, causes = describe(name, runs, plain, held)
        table += rows
        pages += ["", f"## {name}", "", *(causes or ["Nothing fails."])]
        print("\n".join([*rows, *causes]), flush=True)
    text = "\n".join([*head(asked), *table, *pages]) + "\n"
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
