"""The command line of `mechanic run`: split from the script's own arguments, and checked."""

import argparse
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechanic.options import Options
from mechanic.run.settings import RunSettings, is_first_rank

_FLAGS = ("--dry-run", "--quiet", "--no-skip-nonfinite", "-h", "--help")
_TUNER_OPTIONS = ("preset", "s_init", "s_decay", "betas", "max_scale", "scope")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A checked command line."""

    command: list[str]
    """The command to start."""
    target: list[str]
    """The script, or -m and the module, and then its arguments."""
    tuner: dict[str, Any]
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    freeze_after: int | None = None
    quiet: bool = False
    log: Path | None = None
    plot: Path | None = None
    nproc: int | None = None

    def settings(self, spool: str | None) -> RunSettings:
        """What the script's processes need to know."""
        return RunSettings(
            spool=spool,
            tuner=self.tuner,
            only=self.only,
            skip=self.skip,
            dry_run=self.dry_run,
            freeze_after=self.freeze_after,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, for the log."""
        return {
            **self.tuner,
            "only": self.only,
            "skip": self.skip,
            "dry_run": self.dry_run,
            "freeze_after": self.freeze_after,
            "nproc": self.nproc,
        }


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into the options of `mechanic run` and the target, which begins at the script's name.

    >>> split_arguments(["--quiet", "--log", "x", "train.py", "--quiet"])
    (['--quiet', '--log', 'x'], ['train.py', '--quiet'])
    >>> split_arguments(["-m", "pkg.train", "--log", "x"])
    ([], ['-m', 'pkg.train', '--log', 'x'])
    >>> split_arguments(["--", "train.py", "--", "1"])
    ([], ['train.py', '--', '1'])
    """
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if argument == "-m" or argument == "-" or not argument.startswith("-"):
            break
        has_value = argument not in _FLAGS and "=" not in argument
        at += 2 if has_value else 1
    return list(arguments[:at]), list(arguments[at:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mechanic run`; `split_arguments` has removed the target before."""
    add = parser.add_argument
    parser.usage = "mechanic run [options] (SCRIPT | -m MODULE) [its arguments]"
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAMES",
        help="tune only the optimizers of these classes: AdamW, or AdamW,SGD, or 'Adam*'",
    )
    add("--skip", action="append", default=[], metavar="NAMES", help="leave these classes alone")
    add("--dry-run", action="store_true", help="watch and report, but change nothing")
    add("--freeze-after", type=int, metavar="N", help="hold the scale after N steps")
    add(
        "--log",
        type=Path,
        metavar="FOLDER",
        help="write the history to this new folder, as JSON lines and, where tensorboard is "
        "installed, as its events",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the history at the end (png, svg or pdf)")
    add("--quiet", action="store_true", help="show no status line and no summary")
    add("--nproc", type=int, metavar="N", help="start N processes with torchrun")
    tuner = parser.add_argument_group("options of the tuner, as for mechanize()")
    tuner.add_argument("--preset", help="the rule: default, paper, mechanic-pytorch or optax")
    tuner.add_argument("--s-init", metavar="S", help="the first scale: a number, or 'relative'")
    tuner.add_argument("--s-decay", metavar="λ", help="the decay λ of the paper")
    tuner.add_argument(
        "--betas", metavar="β,β,…", help="the discounts of the tuners whose scales are added up"
    )
    tuner.add_argument("--max-scale", metavar="S", help="the largest scale allowed")
    tuner.add_argument(
        "--scope", metavar="SCOPE", help="what shares a scale: all parameters, each group or tensor"
    )
    tuner.add_argument(
        "--no-skip-nonfinite",
        action="store_true",
        help="also take steps whose gradients hold NaN or inf",
    )


def make_request(options: argparse.Namespace, target: list[str]) -> RunRequest:
    """Check the parsed options, and turn them into a request.

    Raises:
        ValueError: if an option is wrong. Nothing has been started then.
    """
    _check_target(target)
    for name in ("freeze_after", "nproc"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    _check_packages(options)
    if options.plot is not None:
        check_plot_path(options.plot, "--plot")
    request = RunRequest(
        command=_command(target, options.nproc),
        target=target,
        tuner=_tuner_options(options),
        only=_names(options.only),
        skip=_names(options.skip),
        dry_run=options.dry_run,
        freeze_after=options.freeze_after,
        quiet=options.quiet,
        log=options.log,
        plot=options.plot,
        nproc=options.nproc,
    )
    _check_log(options.log)
    return request


def _command(target: list[str], nproc: int | None) -> list[str]:
    if nproc is None:
        return [sys.executable, *target]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    # Without the -- torchrun would look for its own options among the script's.
    target = ["-m", "--", *target[1:]] if target[0] == "-m" else ["--", *target]
    return [sys.executable, *torchrun, *target]


def _check_target(target: list[str]) -> None:
    if not target:
        raise ValueError(
            "give a script, or -m and a module, as in: mechanic run train.py --epochs 3."
        )
    name = target[0]
    if name == "-m":
        _check_module(target[1:2])
    elif name == "-":
        raise ValueError("the script must be a file: standard input belongs to the script itself.")
    elif os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "__main__.py")):
            raise ValueError(f"{name} is a folder without a __main__.py; give a script.")
    elif not os.path.exists(name):
        raise ValueError(f"there is no script {name} in {os.getcwd()}.")
    elif not os.access(name, os.R_OK):
        raise ValueError(f"the script {name} cannot be read.")


def _check_module(given: list[str]) -> None:
    if not given:
        raise ValueError("-m needs the name of a module.")
    top = given[0].partition(".")[0]
    found = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if found is None and top not in sys.stdlib_module_names:
        raise ValueError(f"there is no module {top} in {os.getcwd()}, and none is installed.")


def _check_packages(options: argparse.Namespace) -> None:
    needed = {"it": "torch"}
    if options.plot:
        needed["--plot"] = "matplotlib"
    for what, package in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{what} needs {package}: pip install {package}")


def check_plot_path(path: Path, option: str) -> None:
    """Refuse a file to which no figure can be written."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{option} draws .png, .svg or .pdf, got {path}.")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written.")


def _check_log(log: Path | None) -> None:
    if log is not None and is_first_rank() and os.path.lexists(log):
        raise ValueError(f"--log {log} exists already; give a new folder, or remove it.")


def _names(given: list[str]) -> tuple[str, ...]:
    names = tuple(name for names in given for name in names.split(","))
    if "" in names:
        raise ValueError(f"--only and --skip take names of classes, got {','.join(given)!r}.")
    return names


def _tuner_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the tuner that were given, checked as `mechanize` checks them."""
    values: dict[str, Any] = {}
    for name in _TUNER_OPTIONS:
        given = getattr(options, name)
        if given is not None:
            values[name] = _number(given) if name not in ("preset", "betas") else given
    if options.betas is not None:
        values["betas"] = [_number(beta) for beta in options.betas.split(",")]
    if options.scope not in (None, "all", "group", "tensor"):
        raise ValueError(f"--scope must be all, group or tensor, got {options.scope!r}.")
    if options.no_skip_nonfinite:
        values["skip_nonfinite"] = False
    Options(**values)
    return values


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # "relative", or a mistake that `Options` reports
