"""The command line: `mechanic run`, `plot`, `bench` and `report`."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import mechanic
from mechanic.run.request import add_arguments, check, check_drawing, split

STORAGE = "sqlite:///mechanic-bench.db"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, and hand over to the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    target: list[str] = []
    if given[:1] == ["run"]:  # what follows the script's name is the script's
        own, target = split(given[1:])
        given = ["run", *own]
    parser = _parser()
    options, unknown = parser.parse_known_args(given)
    options.target = target
    try:
        if unknown:
            raise ValueError(f"there is no {unknown[0]}; see mechanic {options.command} --help")
        _check_packages(options)
        return int(options.run(options))
    except ValueError as error:  # what the user gave was wrong, and the message says how
        parser.exit(2, f"mechanic {options.command}: {error}\n")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _check_packages(options: argparse.Namespace) -> None:
    needed = {
        "run": (),  # says itself, by what it is asked for
        "plot": ("matplotlib",),
    }.get(options.command, ("torch", "numpy", "optuna", "rich", "sklearn", "matplotlib", "plotly"))
    if absent := [package for package in needed if importlib.util.find_spec(package) is None]:
        extras = "run" if options.command == "plot" else "torch,bench"
        fix = f'pip install ".[{extras}]" in a checkout of Mechanic'
        raise ValueError(f"needs {', '.join(absent)}: {fix}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mechanic",
        description="A learning-rate tuner that wraps any optimizer.",
        epilog="examples: mechanic run train.py --epochs 3; mechanic bench convex",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mechanic {mechanic.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="tune a training script that nobody edits"))
    _add_plot(commands.add_parser("plot", help="draw what run has logged"))
    _add_bench(commands.add_parser("bench", help="sweeps, Mechanic and its peers on real tasks"))
    _add_report(commands.add_parser("report", help="tables and figures of what bench has run"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add_arguments(parser)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_plot)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what --log made")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("mechanic-run.png"),
        metavar="FILE",
        help="where to draw it: png, svg or pdf (mechanic-run.png)",
    )


def _run(options: argparse.Namespace) -> int:
    from mechanic.run import supervise

    return supervise.main(check(options, options.target))


def _plot(options: argparse.Namespace) -> int:
    from mechanic.run import plot

    check_drawing(options.output, "-o")
    plot.draw(plot.load_all(options.folders), options.output)
    print(options.output)
    return 0


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(run=_bench)
    add("suites", nargs="*", metavar="SUITE", help="what to run, or all; --list shows them")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="only these tasks of the suites")
    add(
        "--methods",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="only these methods, or groups of them: sweeps, presets, peers",
    )
    add("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N-1 of each run (3)")
    add(
        "--budget",
        choices=("smoke", "short", "full"),
        default="short",
        help="smoke: does it run; short: minutes (the default); full: as long as the paper's",
    )
    add(
        "--typed",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="LR",
        help="learning rates to type for Mechanic (1)",
    )
    add(
        "--jobs",
        type=int,
        default=None,
        metavar="N",
        help="runs at the same time (the cores on a CPU, 1 on a GPU)",
    )
    add("--device", default=None, help="cpu, cuda, cuda:1 … (the first GPU if there is one)")
    add(
        "--data",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="where the data is; what packages bundle needs none",
    )
    add("--corpus", default="", metavar="NAME", help="which text of the folder to learn")
    add("--download", action="store_true", help="fetch what is missing and can be fetched")
    add(
        "--storage",
        default=STORAGE,
        metavar="URL",
        help=f"any Optuna storage ({STORAGE}); one on a "
        "server spreads the work over all machines that run this command",
    )
    add(
        "--retry-failed",
        action="store_true",
        help="run again what met an error; what diverged did so for good",
    )
    add("--list", action="store_true", help="list the tasks and methods, and run nothing")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(run=_report)
    add("suites", nargs="*", metavar="SUITE", help="only these suites")
    add(
        "--storage",
        nargs="+",
        default=[STORAGE],
        metavar="URL",
        help=f"where bench keeps its runs ({STORAGE}); several are taken together",
    )
    add(
        "--output",
        type=Path,
        default=Path("mechanic-report"),
        metavar="FOLDER",
        help="where to write (mechanic-report)",
    )
    add("--title", default="Mechanic bench", help="of the page")


def _bench(options: argparse.Namespace) -> int:
    from mechanic.bench import run

    options.suites = options.suites or (["all"] if options.list else [])
    request = _request(options)
    if not options.list:
        return run.main(request)
    run.show_tasks(request)
    return 0


def _request(options: argparse.Namespace) -> Any:
    import os

    import torch

    from mechanic.bench.data import Data
    from mechanic.bench.plan import Request
    from mechanic.bench.suites import SUITES

    suites = tuple(SUITES) if "all" in options.suites else tuple(dict.fromkeys(options.suites))
    if not options.suites or not set(suites) <= set(SUITES):
        wrong = ", ".join(suite for suite in suites if suite not in SUITES) or "none"
        raise ValueError(f"give one or more of {', '.join(SUITES)}, or all; got {wrong}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    _at_least_one("--seeds", options.seeds)
    jobs = options.jobs or ((os.cpu_count() or 1) if device == "cpu" else 1)
    if options.jobs is not None:
        _at_least_one("--jobs", options.jobs)
    if bad := [lr for lr in options.typed if not 0 < lr < float("inf")]:
        raise ValueError(f"--typed: a learning rate is positive and finite, got {bad[0]}")
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"--data must name a folder, got {options.data}")
    return Request(
        suites=suites,
        tasks=tuple(options.tasks),
        methods=_methods(options.methods),
        seeds=options.seeds,
        budget=options.budget,
        typed=tuple(dict.fromkeys(options.typed)),
        data=Data(options.data, options.corpus, options.download),
        device=device,
        storage=_storage_url(options.storage),
        jobs=jobs,
        retry_failed=options.retry_failed,
    )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {device} cannot be used: {str(error).splitlines()[0]}"
        ) from None


def _methods(asked: Sequence[str]) -> tuple[str, ...]:
    from mechanic.bench.methods import GROUPS, METHODS

    names: list[str] = []
    for name in asked:
        if name not in METHODS and name not in GROUPS:
            there = ", ".join((*GROUPS, *METHODS))
            raise ValueError(f"--methods: there is no {name!r}; there are {there}")
        names += GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(names))


def _report(options: argparse.Namespace) -> int:
    from mechanic.bench.report import write_report
    from mechanic.bench.study import check_storage, load, open_storage
    from mechanic.bench.suites import SUITES

    if wrong := [suite for suite in options.suites if suite not in SUITES]:
        raise ValueError(f"there is no suite {', '.join(wrong)}; there are {', '.join(SUITES)}")
    runs = []
    for url in map(_storage_url, options.storage):
        check_storage(url)
        runs += load(open_storage(url))
    there = sorted({run.suite for run in runs})
    runs = [run for run in runs if not options.suites or run.suite in options.suites]
    if not runs:
        what = f"of {', '.join(options.suites)}; there are runs of {', '.join(there)}"
        raise ValueError(f"no run has ended yet {what if there else ''}".rstrip())
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for path in write_report(runs, options.output, title=options.title):
            print(path)
    except OSError as error:
        raise ValueError(f"--output {options.output} cannot be written: {error}") from error
    return 0


def _storage_url(given: str) -> str:
    """A file's name is as good as its URL."""
    return given if "://" in given or not given.endswith(".db") else f"sqlite:///{given}"


if __name__ == "__main__":
    sys.exit(main())
