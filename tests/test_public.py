"""What is public, as it stands: a change here is a change of the version (CONTRIBUTING.md)."""

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mechanic.optax
import mechanic.torch
from mechanic import Options, cli
from mechanic.integrations import metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
NAMED = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
WHOLE = {"mechanic.torch.optim", "mechanic.tuner", "mechanic.provable"}  # modules

NAMES = {
    "mechanic": ["Options", "Preset", "__version__"],
    "mechanic.torch": ["Tuner", "mechanize", "tuner"],
    "mechanic.optax": [
        *("MechanicState", "effective_learning_rate", "eval_params", "freeze", "mechanize"),
        *("metrics", "scale", "scopes", "suggest_lr", "unfreeze"),
    ],
    "mechanic.convert": ["from_torch", "to_torch"],
    "mechanic.integrations": ["metrics"],
}
# Modules without a list of their own: what the reference has of them.
OTHERS = {
    "mechanic.integrations.lightning": ["MechanicCallback"],
    "mechanic.integrations.transformers": ["MechanicCallback"],
    "mechanic.torch.optim": ["AdamW", "SGD"],  # and all others of torch.optim
    "mechanic.provable": ["init", "update"],
    "mechanic.tuner": ["Sums", "init", "update", "scale_of"],
}

TUNER = [
    *("agrees", "detach", "diagnose", "effective_lr", "freeze", "frozen", "metrics", "observe"),
    *("scale", "scopes", "suggest_lr", "unfreeze"),
]

OPTIONS = {
    "preset": "default",
    "s_init": None,
    "s_decay": None,
    "betas": None,
    "max_scale": float("inf"),
    "skip_nonfinite": True,
    "max_grad_norm": float("inf"),
    "displacement": "float32",
    "scope": "all",
}
TORCH_ALONE = {"sums_in_backward": False, "process_group": None}
OPTAX_ALONE = {"learning_rate": None, "follow_edits": False}

COMMANDS = {
    "run": [
        *("--betas", "--dry-run", "--freeze-after", "--log", "--max-scale", "--no-skip-nonfinite"),
        *(
            "--nproc",
            "--only",
            "--plot",
            "--preset",
            "--quiet",
            "--s-decay",
            "--s-init",
            "--scope",
            "--skip",
        ),
    ],
    "plot": ["--output", "-o"],
    "doctor": [],
    "bench": [
        *("--budget", "--corpus", "--data", "--device", "--download", "--jobs", "--list"),
        *("--methods", "--retry-failed", "--seeds", "--storage", "--tasks", "--typed"),
    ],
    "report": ["--output", "--storage", "--title"],
}

FRAMEWORKS = ("torch", "jax", "optax", "numpy", "matplotlib", "optuna", "sklearn", "transformers")


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(NAMES[module])


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.nightly if "integrations" in name else ())
        for name in OTHERS
    ],
)
def test_other_names(module: str) -> None:
    found = importlib.import_module(module)
    assert all(callable(getattr(found, name)) for name in OTHERS[module])


def test_every_list_of_names_is_known() -> None:
    """So that a name which is added to the `__all__` of a package has to be in the reference."""
    listed = {
        ".".join(path.relative_to(ROOT).parent.parts)
        for path in (ROOT / "mechanic").rglob("__init__.py")
        if re.search(r"^__all__\b", path.read_text("utf-8"), re.MULTILINE)
    }
    assert listed == set(NAMES)


def test_the_reference_has_every_name() -> None:
    assert len(NAMED) == len(set(NAMED))
    known = {f"{module}.{name}" for module, names in (NAMES | OTHERS).items() for name in names}
    parts = {name for name in known if name.rpartition(".")[0] in WHOLE}
    assert set(NAMED) == known - parts | WHOLE
    shown = re.search(r"^::: mechanic\.tuner\n.*\n +members: \[(.*)\]$", PAGE, re.MULTILINE)
    assert shown is not None
    assert shown[1].split(", ") == OTHERS["mechanic.tuner"]


ENTRIES = sorted(
    {*NAMED, *(f"{module}.{name}" for module in WHOLE for name in OTHERS[module])}
    - {"mechanic.Preset", "mechanic.__version__"}  # neither functions nor classes
    - {"mechanic.tuner", "mechanic.provable"}  # whose members have examples
    - {f"mechanic.torch.optim.{name}" for name in OTHERS["mechanic.torch.optim"]}  # as the module
)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(name, marks=pytest.mark.nightly if "Callback" in name else ())
        for name in ENTRIES
    ],
)
def test_every_entry_of_the_reference_has_an_example(entry: str) -> None:
    found = pkgutil.resolve_name(entry)
    assert ">>> " in (inspect.getdoc(found) or "")
    if found is mechanic.torch.Tuner:
        methods = [name for name in TUNER if inspect.isfunction(getattr(found, name))]
        assert len(methods) > 5
        for name in methods:
            assert ">>> " in inspect.getdoc(getattr(found, name)), name


def defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_options() -> None:
    assert defaults(mechanic.torch.mechanize) == OPTIONS | TORCH_ALONE
    assert defaults(mechanic.optax.mechanize) == OPTIONS | OPTAX_ALONE
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    assert fields == OPTIONS | {"sums_in_backward": False}


def test_the_handle() -> None:
    assert sorted(name for name in vars(mechanic.torch.Tuner) if name[0] != "_") == TUNER


def test_what_is_logged() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanic.torch.mechanize(torch.optim.SGD([weights], lr=1.0))
    weights.grad = torch.ones(3)
    optimizer.step()
    assert sorted(metrics(optimizer)) == ["mechanic/lr/0", "mechanic/scale"]
    names = ["effective_lr/0", "scale", "scales", "signal", "skipped", "steps"]
    assert sorted(mechanic.torch.tuner(optimizer).metrics()) == names
    assert "effective_lr" in optimizer.param_groups[0]


def test_commands() -> None:
    parser = cli._parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found = {
        name: sorted({o for a in sub._actions for o in a.option_strings} - {"-h", "--help"})
        for name, sub in commands.choices.items()
    }
    assert found == COMMANDS


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_imports_no_framework(words: list[str]) -> None:
    """Which is why it comes at once: 0.1 s on one core, where importing torch takes seconds."""
    code = (
        "import sys; from mechanic import cli\n"
        f"try: cli.main({words})\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == "[]"
    assert run.stdout.startswith("usage: mechanic")


@pytest.mark.parametrize(
    ("module", "absent", "said"),
    [
        ("mechanic.torch", "torch", "mechanic.torch needs torch: pip install torch"),
        ("mechanic.torch.optim", "torch", "mechanic.torch needs torch: pip install torch"),
        ("mechanic.optax", "jax", "mechanic.optax needs jax: pip install jax optax"),
        ("mechanic.optax", "optax", "mechanic.optax needs optax: pip install jax optax"),
    ],
)
def test_what_a_module_needs_is_named(module: str, absent: str, said: str) -> None:
    script = f"""
import importlib
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == {absent!r} else find(name, *rest)
try:
    importlib.import_module({module!r})
except ModuleNotFoundError as error:
    print(error, error.name, sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.splitlines() == [said, absent], run.stderr
