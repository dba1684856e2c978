"""The command line: `mechanic run`, `plot`, `doctor`, `bench` and `report`."""

import argparse
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import mechanic
from mechanic.run.request import add_arguments, check_plot_path, make_request, split_arguments

STORAGE = "sqlite:///mechanic-bench.db"
_RAISING = ("strict", "surrogateescape")  # how a stream fails at a letter; the second in C locales


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and check the arguments, and call the command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not know a λ. It is shown a ?, where Python would end in an error.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISING:
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    target: list[str] = []
    if given[:1] == ["run"]:  # arguments after the script's name belong to the script
        run_options, target = split_arguments(given[1:])
        given = ["run", *run_options]
    parser = _parser()
    options, unknown = parser.parse_known_args(given)
    options.target = target
    try:
        if unknown:
            raise ValueError(f"there is no {unknown[0]}; see mechanic {options.command} --help")
        _check_packages(options)
        return int(options.run(options))
    except ValueError as error:  # the user's input was wrong, and the message says why
        parser.exit(2, f"mechanic {options.command}: {_in_one_line(error)}\n")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_in_one_line(message)}; see {self.prog} --help\n")


def _in_one_line(message: object) -> str:
    """A message, whatever the names in it hold."""
    return "\\n".join(str(message).splitlines())


def _check_packages(options: argparse.Namespace) -> None:
    needed = {
        "run": (),  # what it needs depends on its options: see mechanic.run.request
        "doctor": (),
        "plot": ("matplotlib",),
    }.get(options.command, ("torch", "numpy", "optuna", "rich", "sklearn", "matplotlib", "plotly"))
    if absent := [package for package in needed if importlib.util.find_spec(package) is None]:
        bench = 'pip install ".[torch,bench]" in a clone of Mechanic'
        fix = "pip install matplotlib" if options.command == "plot" else bench
        raise ValueError(f"it needs {', '.join(absent)}: {fix}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mechanic",
        description="A learning-rate tuner that wraps the optimizer that you use.",
        epilog="examples: mechanic run train.py --epochs 3; mechanic bench convex",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mechanic {mechanic.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="tune a training script without editing it"))
    _add_plot(commands.add_parser("plot", help="draw what `run --log` has written"))
    _add_doctor(
        commands.add_parser("doctor", help="say what went wrong in a run, from its log, and why")
    )
    _add_bench(
        commands.add_parser("bench", help="compare sweeps, Mechanic and its peers on real tasks")
    )
    _add_report(
        commands.add_parser("report", help="write tables and figures of the runs of `bench`")
    )
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add_arguments(parser)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_plot)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a log folder")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("mechanic-run.png"),
        metavar="FILE",
        help="the file to draw to: png, svg or pdf (default: mechanic-run.png)",
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_doctor)
    parser.description = "Exit code 0: healthy; 1: something was found; 2: there is no such log."
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `run --log` has written")


def _run(options: argparse.Namespace) -> int:
    from mechanic.run import supervise

    return supervise.main(make_request(options, options.target))


def _plot(options: argparse.Namespace) -> int:
    from mechanic.run import plot

    check_plot_path(options.output, "-o")
    plot.draw(plot.load_all(options.folders), options.output)
    print(options.output)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from mechanic.run import doctor

    text, is_healthy = doctor.diagnose(doctor.load(options.folder))
    print(text)
    return 0 if is_healthy else 1


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench)
    _add_bench_runs(parser)
    _add_bench_resources(parser)
    parser.add_argument(
        "--list", action="store_true", help="list the tasks and methods, and run nothing"
    )


def _add_bench_runs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which runs to make."""
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help="the suites to run, or all; see --list")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="run only these tasks of the suites")
    add(
        "--methods",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="run only these methods, or groups of methods: sweeps, presets, peers",
    )
    add(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="repeat each run with the seeds 0 to N-1 (default: 3)",
    )
    add(
        "--budget",
        choices=("smoke", "short", "full"),
        default="short",
        help="smoke: only see that all tasks run; short: minutes (the default); full: as long as "
        "in the paper",
    )
    add(
        "--typed",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="LR",
        help="the learning rates to type for Mechanic (default: 1)",
    )
    add(
        "--retry-failed",
        action="store_true",
        help="run again the runs that met an error; those that diverged are not repeated",
    )


def _add_bench_resources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where to run, and where data and results are."""
    add = parser.add_argument
    add(
        "--jobs",
        type=int,
        default=None,
        metavar="N",
        help="number of runs at the same time (default: the number of cores on a CPU, 1 on a GPU)",
    )
    add("--device", default=None, help="cpu, cuda, cuda:1 … (default: the first GPU if any)")
    add(
        "--data",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="the data folder; data that comes with packages needs none",
    )
    add("--corpus", default="", metavar="NAME", help="the text of the data folder to learn")
    add("--download", action="store_true", help="download missing data where that is possible")
    add(
        "--storage",
        default=STORAGE,
        metavar="URL",
        help=f"any Optuna storage (default: {STORAGE}); with one on a server, all machines that "
        "run this command share the work",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.set_defaults(run=_report)
    add("suites", nargs="*", metavar="SUITE", help="report only these suites")
    add(
        "--storage",
        nargs="+",
        default=[STORAGE],
        metavar="URL",
        help=f"where bench has stored its runs (default: {STORAGE}); several are combined",
    )
    add(
        "--output",
        type=Path,
        default=Path("mechanic-report"),
        metavar="FOLDER",
        help="the folder to write to (default: mechanic-report)",
    )
    add("--title", default="Mechanic bench", help="the title of the report")


def _bench(options: argparse.Namespace) -> int:
    from mechanic.bench import run

    options.suites = options.suites or (["all"] if options.list else [])
    request = _bench_request(options)
    if not options.list:
        return run.main(request)
    run.show_tasks(request)
    return 0


def _bench_request(options: argparse.Namespace) -> Any:
    import os

    import torch

    from mechanic.bench.data import Data
    from mechanic.bench.plan import BenchRequest
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
        raise ValueError(f"--typed: a learning rate must be positive and finite, got {bad[0]}")
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"--data must name an existing folder, got {options.data}")
    return BenchRequest(
        suites=suites,
        tasks=tuple(options.tasks),
        methods=_method_names(options.methods),
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


def _method_names(given: Sequence[str]) -> tuple[str, ...]:
    from mechanic.bench.methods import GROUPS, METHODS

    names: list[str] = []
    for name in given:
        if name not in METHODS and name not in GROUPS:
            known = ", ".join((*GROUPS, *METHODS))
            raise ValueError(f"--methods: there is no {name!r}; choose from {known}")
        names += GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(names))


def _report(options: argparse.Namespace) -> int:
    from mechanic.bench.report import write_report
    from mechanic.bench.study import check_storage, load, open_storage
    from mechanic.bench.suites import SUITES

    if wrong := [suite for suite in options.suites if suite not in SUITES]:
        raise ValueError(f"there is no suite {', '.join(wrong)}; choose from {', '.join(SUITES)}")
    runs = []
    for url in map(_storage_url, options.storage):
        check_storage(url)
        runs += load(open_storage(url))
    stored = sorted({run.suite for run in runs})
    runs = [run for run in runs if not options.suites or run.suite in options.suites]
    if not runs:
        if not stored:
            raise ValueError("no run has ended yet")
        suites = ", ".join(options.suites)
        raise ValueError(f"no run of {suites} has ended yet; choose from {', '.join(stored)}")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for path in write_report(runs, options.output, title=options.title):
            print(path)
    except OSError as error:
        raise ValueError(f"--output {options.output} cannot be written: {error}") from error
    return 0


def _storage_url(given: str) -> str:
    """Turn the name of an SQLite file into its URL."""
    return given if "://" in given or not given.endswith(".db") else f"sqlite:///{given}"


if __name__ == "__main__":
    sys.exit(main())
