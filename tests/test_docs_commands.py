"""The commands of all pages: each is parsed by the program that it calls, which knows its options,
and is run, here or by another test, unless `NOT_RUN` says why not."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from pages import ROOT, Block, blocks, page, run_shell
from running import TRAINING, write
from torch.distributed.run import get_args_parser

from mechanic import cli

PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
PROGRAMS = "accelerate|git|make|mechanic|pip|python|torchrun"

# What is run here, in a clone, and what is added so that it is short.
IN_A_CLONE = {
    "python benchmarks/report.py --readme": "",
    "python benchmarks/optimizers.py lion sgd": "--steps 10",
    "python benchmarks/optimizers.py --steps 480 tam adan": "--steps 10",
}
SHORT = "--budget smoke --seeds 1 --methods mechanic"
OF_THE_BENCH = {
    "mechanic bench convex": SHORT,
    "mechanic report": "",
    "mechanic bench --list": "",
    "mechanic bench vision lm --data DIR": SHORT,
    "mechanic bench lm --methods adamw mechanic prodigy --seeds 5 --typed 1e-4 1 1e4": SHORT,
}
OF_RUN = [
    "mechanic run train.py --epochs 3",
    "mechanic run -m package.train --epochs 3",
    "mechanic run --log runs/a --plot a.png train.py",
    "cp -r runs/a runs/b",  # another run, which the page does not show
    "mechanic plot runs/a runs/b -o both.png",
    "mechanic doctor runs/a",
    "rm -r runs",
    "mechanic run --nproc 2 train.py",
    "torchrun --nproc-per-node 2 --no-python mechanic run train.py",
    "torchrun --nproc-per-node 2 --no-python -- mechanic run --log runs/a train.py",
]
# What other tests run.
ELSEWHERE = {
    "make demo": "test_the_demo_ends_as_the_readme_says",
    "make docs": "site",
    "mechanic run examples/unmodified/plain_loop.py": "test_the_summary_of_a_run",
    "mechanic run train.py": "test_the_scripts_of_the_quick_start",
    'pip install ".[torch,run]"': "test_the_wheel_installs_with_each_extra_that_needs_torch",
    'pip install ".[torch,bench]"': "test_the_wheel_installs_with_each_extra_that_needs_torch",
    'pip install ".[torch]"': "test_the_wheel_installs_with_each_extra_that_needs_torch",
    "python train.py": "test_the_scripts_of_the_quick_start",
    "torchrun --nproc-per-node 2 ddp.py": "test_the_recipe_for_many_processes",
    "torchrun --nproc-per-node 2 examples/fsdp.py": "test_fsdp_at_two_world_sizes",
}
SD_SCRIPTS = "needs sd-scripts and a diffusion model: docs/trainers.md says how it was run"
NOT_RUN = {
    "accelerate launch train_network.py --optimizer_type mechanic.torch.optim.AdamW "
    "--optimizer_args weight_decay=0.01 \"mechanic_scope='group'\" "
    "--learning_rate 1.0 --lr_scheduler cosine": SD_SCRIPTS,
    "accelerate launch train_network.py --lr_scheduler_type learned.Cosine "
    "--lr_scheduler_args T_max=1600": SD_SCRIPTS,
    "make bench": "minutes; test_bench_run.py runs the suite",
    "make check": "a part of make test",
    "make figures": "draws over the figures that are committed",
    "make release-check": "what test_release.py runs",
    "make step-cost": "minutes of timings",
    "make test": "would test itself; CI runs it",
    "make test-all": "hours",
    "make test-docs": "would test itself; CI runs it",
    "make test-oldest": "fetches another torch",
    "mechanic bench lm --storage postgresql+psycopg://user@server/bench": "needs a server, which "
    "test_bench_study.py starts where it is installed",
    "mechanic bench vision lm mlm finetune --data FOLDER": "needs CIFAR, a GPU and hours",
    "python benchmarks/optimizers.py": "ten minutes, and it writes docs/optimizers.md",
    "python benchmarks/step_cost.py --device cuda --whole-step": "needs a GPU",
}


def commands(name: str) -> list[str]:
    """The lines of the shell on a page, joined where a backslash says so, without comments."""
    code = "".join(block.code for block in blocks(page(name)) if block.language == "sh")
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    return [bare for line in lines if (bare := re.sub(r"(^|\s+)#.*$", "", line))]


ALL = sorted({command for name in PAGES for command in commands(name)})


def test_every_command_is_run_or_has_a_reason_not_to_be():
    known = [*IN_A_CLONE, *OF_THE_BENCH, *OF_RUN, *ELSEWHERE, *NOT_RUN]
    added = {command for command in OF_RUN if command.startswith(("cp ", "rm "))}
    assert len(known) == len(set(known))
    assert set(known) - added == set(ALL)


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_test_that_runs_a_command_is_there(test: str):
    files = (ROOT / "tests").glob("test_*.py")
    assert any(f"def {test}(" in path.read_text("utf-8") for path in files)


@pytest.mark.parametrize("name", PAGES)
def test_no_command_stands_outside_of_a_block(name: str):
    text = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in text
    assert not re.findall(rf"^(?: {{4,}}|\t)(?:\$ )?(?:{PROGRAMS}) .*$", text, re.MULTILINE)


# --------------------------------------------------------------------------- parsed


@pytest.mark.parametrize("command", ALL)
def test_the_program_knows_the_options(command: str):
    parse(*shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "make demonstration",
        "mechanic bench convex --speed 3",
        "mechanic run --speed 3 train.py",
        "pip install .[torch,speed]",
        "python benchmarks/step_cost.py --speed 3",
        "torchrun --nproc-per-node 2 examples/fsdp.py --speed 3",
        "torchrun --speed 3 examples/fsdp.py",
        "accelerate launch --speed 3 train_network.py",
    ],
)
def test_an_option_that_is_not_there_is_found(command: str):
    with pytest.raises((SystemExit, AssertionError)):
        parse(*shlex.split(command))


def parse(program: str, *words: str) -> None:
    if program == "make":
        (target,) = words
        run = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True)
        assert run.returncode == 0, run.stderr
    elif program == "mechanic":
        parse_mechanic(words)
    elif program == "pip":
        install, what = words
        assert install == "install"
        extras = re.fullmatch(r"\.\[([\w,]+)\]", what)
        assert extras is not None
        for extra in extras[1].split(","):
            assert re.search(rf"^{extra} = \[", page("pyproject.toml"), re.MULTILINE)
    elif program == "python":
        parse_script(words)
    elif program == "torchrun":
        parse_torchrun(words)
    else:
        assert (program, words[0]) == ("accelerate", "launch")
        launched = launch_command_parser().parse_args(words[1:])
        assert launched.training_script == "train_network.py"  # of sd-scripts, whose are the rest


def parse_mechanic(words: Sequence[str]) -> None:
    if words[0] != "run":
        assert isinstance(cli._parser().parse_args(words), argparse.Namespace)
        return
    options, script = cli.split_arguments(words[1:])
    cli._parser().parse_args(["run", *options])
    assert script[:2] == ["-m", "package.train"] or script[0].endswith(".py")
    if (ROOT / script[0]).exists():
        parse_script(script)


def parse_torchrun(words: Sequence[str]) -> None:
    asked = get_args_parser().parse_args(words)
    script = [asked.training_script, *asked.training_script_args]
    if asked.no_python:
        parse(*(word for word in script if word != "--"))
    else:
        parse_script(script)


class Parsed(Exception):  # noqa: N818
    """Ends a script that has read its options."""


def parse_script(words: Sequence[str]) -> None:
    """Run a script until it has read its options. A page may have a script of its own."""
    script, *options = words
    if not (ROOT / script).exists():
        assert script in {block.title for name in PAGES for block in blocks(page(name))}
        assert not options
        return
    parse_options = argparse.ArgumentParser.parse_args

    def parse_and_end(*given: object) -> None:
        parse_options(*given)  # type: ignore[call-overload]
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        patch.setattr(sys, "argv", [script, *options])
        patch.syspath_prepend(str((ROOT / script).parent))
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / script), run_name="__main__")


# --------------------------------------------------------------------------- run


def run_line(command: str, folder: Path) -> None:
    run_shell(Block("sh", "", command, None), folder)


@pytest.mark.nightly
@pytest.mark.parametrize("command", IN_A_CLONE)
def test_command_in_a_clone(command: str):
    run_line(f"{command} {IN_A_CLONE[command]}", ROOT)


@pytest.mark.nightly
def test_the_commands_of_the_bench(tmp_path: Path):
    (tmp_path / "DIR").mkdir()
    for command, more in OF_THE_BENCH.items():
        run_line(f"{command} {more}", tmp_path)
    assert (tmp_path / "mechanic-report" / "report.html").stat().st_size > 10_000


SCRIPT = """
import argparse
asked = argparse.ArgumentParser()
asked.add_argument("--epochs", type=int, default=2)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, steps=15 * asked.parse_args().epochs)
"""


@pytest.mark.nightly
def test_the_commands_of_run(tmp_path: Path):
    write(tmp_path, SCRIPT)
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text(TRAINING + SCRIPT, "utf-8")
    for command in OF_RUN:
        run_line(command, tmp_path)
    assert {"a.png", "both.png"} <= {path.name for path in tmp_path.iterdir()}
